"""Classification of pairs of sequences that do not see each other: ``--task sequence_pair_prediction``.

fairseq's ``sentence_prediction`` joins the two into one sequence. Here they are two inputs, which the model puts
through one encoder, as in the Long Range Arena's Retrieval.
"""

import os

import numpy as np
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
from fairseq.tasks import register_task
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask


@register_task("sequence_pair_prediction", dataclass=SentencePredictionConfig)
class SequencePairPredictionTask(SentencePredictionTask):
    """The data of ``sentence_prediction``, ``input0``, ``input1`` and ``label``, with the inputs kept apart."""

    #: Of an example, for the model.
    sequences = 2

    def load_dataset(self, split: str, combine: bool = False, **unused) -> FairseqDataset:
        """Load ``split``: samples with ``src_tokens`` and ``src_tokens2``, (B, T) each, padded on the right.

        Raises:
            ValueError: a part of it is missing, or two parts have different numbers of examples.
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
        """The sequences ``number`` of all examples, with what the options put in front or cut off."""
        tokens = self._indexed(f"input{number}", self.source_dictionary, split, combine)
        if self.cfg.init_token is not None:
            tokens = PrependTokenDataset(tokens, self.cfg.init_token)
        cut = self.cfg.shorten_data_split_list, self.cfg.shorten_method, self.max_positions(), self.cfg.seed
        return maybe_shorten_dataset(tokens, split, *cut)

    def _indexed(self, kind: str, dictionary, split: str, combine: bool) -> FairseqDataset:
        path = os.path.join(self.cfg.data, kind, split)
        dataset = data_utils.load_indexed_dataset(path, dictionary, combine=combine)
        if dataset is None:
            raise ValueError(
                f"{path} does not exist; allowed with --task sequence_pair_prediction: input0, input1, label"
            )
        return dataset
