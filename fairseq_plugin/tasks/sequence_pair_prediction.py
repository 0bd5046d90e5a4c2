"""Classification of pairs of sequences that do not see each other: ``--task sequence_pair_prediction``.

fairseq's ``sentence_prediction`` joins the two into one sequence. Here they are two inputs of one encoder, as in the
Long Range Arena's Retrieval.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy as np
from fairseq.criterions import FairseqCriterion
from fairseq.data import (
    FairseqDataset,
    IdDataset,
    NestedDictionaryDataset,
    NumelDataset,
    NumSamplesDataset,
    OffsetTokensDataset,
    PrependTokenDataset,
    RightPadDataset,
    SortDataset,
    StripTokenDataset,
    data_utils,
)
from fairseq.data.shorten_dataset import maybe_shorten_dataset
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import register_task
from fairseq.tasks.sentence_prediction import SHORTEN_METHOD_CHOICES, SentencePredictionTask
from omegaconf import II, MISSING

from common.ops.shared.checks import check_positive_int

from ..data.indexed_sums import load_tokens
from ..loading.known_options import option_field
from ._checks import check_classification

#: The folders of a data set.
_PARTS = ("input0", "input1", "label")


@dataclass
class SequencePairPredictionConfig(FairseqDataclass):
    """The options of ``sentence_prediction`` that apply to two separate sequences."""

    data: str = option_field(MISSING, "folder of input0, input1 and label")
    num_classes: int = option_field(-1, "number of classes")
    init_token: Optional[int] = option_field(  # noqa: UP045  fairseq reads Optional[...]
        None, "add token at the beginning of each of the two sequences"
    )
    no_shuffle: bool = option_field(False, "keep the order of the examples")
    shorten_method: SHORTEN_METHOD_CHOICES = option_field(
        "none", "if not none, shorten sequences that exceed --max-positions"
    )
    shorten_data_split_list: str = option_field(
        "", "comma-separated list of splits to apply shortening to (default: all of them)"
    )
    max_positions: int = option_field(512, "max tokens of a sequence")
    # Not read from the criterion as in fairseq's own task: the default criterion, cross_entropy, lacks the option.
    classification_head_name: str = option_field(
        "sentence_classification_head", "name of the classification head to use"
    )
    seed: int = II("common.seed")


@register_task("sequence_pair_prediction", dataclass=SequencePairPredictionConfig)
class SequencePairPredictionTask(SentencePredictionTask):
    """The data of ``sentence_prediction`` (``input0``, ``input1`` and ``label``) with separate inputs."""

    #: The number of sequences per example, for the model.
    sequences = 2

    @classmethod
    def setup_task(cls, cfg: SequencePairPredictionConfig, **kwargs) -> "SequencePairPredictionTask":
        """Build the task with the dictionaries of its data.

        Raises:
            ValueError: the number of classes is not given, or the folder has no dictionary.
        """
        check_positive_int("--num-classes", cfg.num_classes)
        check_positive_int("--max-positions", cfg.max_positions)
        symbols, labels = (cls.load_dictionary(_dictionary_file(cfg.data, part)) for part in ("input0", "label"))
        return cls(cfg, symbols, labels)

    def build_criterion(self, cfg, from_checkpoint: bool = False) -> FairseqCriterion:
        """fairseq's hook: the criterion.

        Raises:
            ValueError: it is not ``sentence_prediction``, names another head, or is for regression.
        """
        criterion = super().build_criterion(cfg, from_checkpoint)
        check_classification(criterion, cfg, "sequence_pair_prediction", self.cfg.classification_head_name)
        return criterion

    def load_dataset(self, split: str, combine: bool = False, **unused) -> FairseqDataset:
        """Load ``split``: samples with ``src_tokens`` and ``src_tokens2``, (B, T) each, padded on the right.

        Raises:
            ValueError: a part of the split is missing, or parts have different numbers of examples.
        """
        inputs = [self._input(number, split, combine) for number in range(self.sequences)]
        labels = self._indexed("label", self.label_dictionary, split, combine)
        counts = [len(part) for part in (*inputs, labels)]
        if len(set(counts)) > 1:
            raise ValueError(
                f"{split} in {self.cfg.data} has {counts} first, second inputs and labels; allowed: as many"
            )
        labels = StripTokenDataset(labels, id_to_strip=self.label_dictionary.eos())
        net_input = {}
        for ending, tokens in zip(("", "2"), inputs):
            net_input[f"src_tokens{ending}"] = RightPadDataset(tokens, pad_idx=self.source_dictionary.pad())
            net_input[f"src_lengths{ending}"] = NumelDataset(tokens)
        dataset = NestedDictionaryDataset(
            {
                "id": IdDataset(),
                "net_input": net_input,
                "nsentences": NumSamplesDataset(),
                "ntokens": NumelDataset(inputs[0], reduce=True),
                "target": OffsetTokensDataset(labels, offset=-self.label_dictionary.nspecial),
            },
            sizes=[np.maximum(*(tokens.sizes for tokens in inputs))],
        )
        if not self.cfg.no_shuffle:
            with data_utils.numpy_seed(self.cfg.seed):
                dataset = SortDataset(dataset, sort_order=[np.random.permutation(len(dataset))])
        self.datasets[split] = dataset
        return dataset

    def _input(self, number: int, split: str, combine: bool) -> FairseqDataset:
        """Sequence ``number`` of all examples, with the initial token added and shortened as the options say."""
        tokens = self._indexed(f"input{number}", self.source_dictionary, split, combine)
        if self.cfg.init_token is not None:
            tokens = PrependTokenDataset(tokens, self.cfg.init_token)
        shortening = self.cfg.shorten_data_split_list, self.cfg.shorten_method, self.max_positions(), self.cfg.seed
        return maybe_shorten_dataset(tokens, split, *shortening)

    def _indexed(self, kind: str, dictionary, split: str, combine: bool) -> FairseqDataset:
        return load_tokens(Path(self.cfg.data, kind, split), _how_to_make(self.cfg.data, kind), dictionary, combine)


def _dictionary_file(data: str, part: str) -> str:
    """The dictionary file of a part of the data; if it is missing, a ValueError that says how to make it."""
    path = os.path.join(data, part, "dict.txt")
    if not os.path.isfile(path):
        raise ValueError(f"{path} does not exist; {_how_to_make(data, part)}")
    return path


def _how_to_make(data: str, part: str) -> str:
    """The end of an error message: the contents of a data folder, and the command that makes its ``part``."""
    same = " --srcdict DATA/input0/dict.txt" if part == "input1" else ""
    return (
        f"allowed with --task sequence_pair_prediction: a folder of {', '.join(_PARTS)}, each as fairseq-preprocess "
        f"--only-source --trainpref train.{part} --validpref valid.{part} --destdir {os.path.join(data, part)}"
        f"{same.replace('DATA', data)} makes it"
    )
