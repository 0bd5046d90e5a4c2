"""Language modeling of a text as a few long streams: ``--task streaming_language_modeling``.

A block continues from the decoding state after the previous block, so its context is all earlier text, at the cost of
one pass. In training the state is carried over and detached: truncated backpropagation through time.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq.data import FairseqDataset, MonolingualDataset
from fairseq.distributed import utils as distributed_utils
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from fairseq.utils import safe_getattr
from omegaconf import II
from torch import nn

from ..data.streams import PLACE, StreamBatchIterator, StreamPlace, StreamRows
from ..generation.stream_memory import SavedStreams, StreamingBatches, StreamMemory, gathered, sealed, with_state
from ..models._decoder import LinearTimeDecoder
from ..modules.carried_state import CarriedState
from ._checks import check_required

logger = logging.getLogger(__name__)

#: fairseq's default of --restore-file, a file in --save-dir.
_LAST = "checkpoint_last.pt"
# Options of language modeling with which consecutive blocks are not one text: name -> allowed value.
_REQUIRED = {
    "sample_break_mode": "none",
    "shorten_method": "none",
    "add_bos_token": False,
    "self_target": False,
    "past_target": False,
}


@dataclass
class StreamingLanguageModelingConfig(LanguageModelingConfig):
    """Options of ``language_modeling``."""

    disable_validation: bool = II("dataset.disable_validation")
    restore_file: str = II("checkpoint.restore_file")
    save_dir: str = II("checkpoint.save_dir")


@register_task("streaming_language_modeling", dataclass=StreamingLanguageModelingConfig)
class StreamingLanguageModelingTask(LanguageModelingTask):
    """``language_modeling`` of consecutive blocks; each row of a batch is one stream.

    ``--batch-size`` B on W processes splits the text into R = B W streams: row r reads the r-th part from beginning to
    end, in blocks of ``--tokens-per-sample``. A stream begins without a state in each epoch. Every token except the
    first is predicted once, as in ``language_modeling``. Checkpoints store the states, to resume training. Memory does
    not grow with the text.

    Raises:
        ValueError: an option with which blocks are not one text; see also ``check_streams`` for models, and
            ``StreamRows`` and ``StreamBatchIterator`` for rows.
    """

    #: A batch holds parts of texts, which a teacher cannot read on their own.
    reads_in_parts = True

    def __init__(self, args, dictionary, output_dictionary=None, targets=None) -> None:
        super().__init__(args, dictionary, output_dictionary, targets)
        check_required(args, _REQUIRED, "streaming_language_modeling", ", since blocks are parts of one text")
        self._training, self._validation = StreamMemory(), StreamMemory()
        self._model: nn.Module | None = None  # the trained model, without wrappers
        self._place: StreamPlace | None = None  # of the last batch in training
        self._gathered: SavedStreams | None = None

    def build_model(self, args, from_checkpoint: bool = False) -> nn.Module:
        """fairseq's hook: the model, if it can read streams; see ``check_streams``."""
        model = super().build_model(args, from_checkpoint)
        check_streams(model, training=not from_checkpoint)
        return model

    def get_batch_iterator(self, dataset: FairseqDataset, *args: Any, **options: Any) -> Any:
        """fairseq's hook: batches of consecutive blocks; fairseq's own batches for typed prompts.

        ``--max-positions`` of a model does not apply to a stream, so no block is left out.
        """
        if not isinstance(dataset, MonolingualDataset):
            return super().get_batch_iterator(dataset, *args, **options)
        return self._batches(dataset, *args, **options)

    def _batches(
        self,
        dataset: MonolingualDataset,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        max_positions: Any = None,
        ignore_invalid_inputs: bool = False,
        required_batch_size_multiple: int = 1,
        seed: int = 1,
        num_shards: int = 1,
        shard_id: int = 0,
        num_workers: int = 0,
        epoch: int = 1,
        data_buffer_size: int = 0,
        disable_iterator_cache: bool = False,
        skip_remainder_batch: bool = False,
        grouped_shuffling: bool = False,
        update_epoch_batch_itr: bool = False,
    ) -> StreamBatchIterator:
        reuse = not disable_iterator_cache and not update_epoch_batch_itr and self.can_reuse_epoch_itr(dataset)
        if reuse and dataset in self.dataset_to_epoch_iter:  # as fairseq's own, whose workers persist
            return self.dataset_to_epoch_iter[dataset]
        tokens = self.args.tokens_per_sample
        rows = max_sentences or max(1, (max_tokens or tokens) // tokens)
        dataset.set_epoch(epoch)
        iterator = StreamBatchIterator(
            dataset,
            StreamRows(len(dataset), rows * num_shards, tokens),
            num_shards,
            shard_id=shard_id,
            seed=seed,
            num_workers=num_workers,
            epoch=epoch,
            buffer_size=data_buffer_size,
            skip_remainder_batch=skip_remainder_batch,
            reuse_dataloader=True,
        )
        if reuse:
            self.dataset_to_epoch_iter[dataset] = iterator
        return iterator

    def eval_lm_dataloader(
        self,
        dataset: FairseqDataset,
        max_tokens: int | None = 36000,
        batch_size: int | None = None,
        max_positions: Any = None,
        num_shards: int = 1,
        shard_id: int = 0,
        num_workers: int = 1,
        data_buffer_size: int = 10,
        context_window: int = 0,
    ) -> StreamingBatches:
        """fairseq's hook: batches with their states; one stream unless ``batch_size`` is given.

        Raises:
            ValueError: ``context_window`` is given.
        """
        if context_window > 0:
            raise ValueError(
                f"--context-window is {context_window}; allowed with --task streaming_language_modeling: 0, since all "
                "of the text before a block is its context"
            )
        iterator = self.get_batch_iterator(
            dataset=dataset,
            max_sentences=batch_size or 1,
            num_shards=num_shards,
            shard_id=shard_id,
            num_workers=num_workers,
            data_buffer_size=data_buffer_size,
        )
        return StreamingBatches(iterator.next_epoch_itr(shuffle=False))

    def begin_epoch(self, epoch: int, model: nn.Module) -> None:
        """fairseq's hook. States are kept, since resuming in the middle of an epoch calls it, too."""
        super().begin_epoch(epoch, model)
        self._model = model

    def train_step(
        self, sample: dict[str, Any], model, criterion, optimizer, update_num: int, ignore_grad: bool = False
    ) -> tuple:
        """fairseq's hook: the block continues from the previous state; an ignored batch does not change it."""
        if ignore_grad:
            attached = with_state(sample, CarriedState())
        else:
            attached, carried = self._training.attach(sample, update_num, self._model or model)
        result = super().train_step(attached, model, criterion, optimizer, update_num, ignore_grad)
        if not ignore_grad:
            self._place = sample[PLACE]
            self._training.keep(self._place, carried)
        if safe_getattr(self.args, "disable_validation", False):
            self._gather()
        return result

    def valid_step(self, sample: dict[str, Any], model, criterion, **further: Any) -> tuple:
        """fairseq's hook: as ``train_step``, with separate states."""
        attached, carried = self._validation.attach(sample, sample[PLACE].step)
        result = super().valid_step(attached, model, criterion, **further)
        self._validation.keep(sample[PLACE], carried)
        return result

    def begin_valid_epoch(self, epoch: int, model: nn.Module) -> None:
        """fairseq's hook: all processes call this before one of them saves a checkpoint."""
        super().begin_valid_epoch(epoch, model)
        self._model = model
        self._gather()

    def _gather(self) -> None:
        """Gather the states of all processes in the one that saves."""
        if distributed_utils.get_data_parallel_world_size() > 1:
            self._gathered = gathered(self._training.saved(self._model, self._place))

    def get_checkpoint_dict(self) -> dict[str, SavedStreams]:
        """fairseq's hook: the checkpoint's entry under the task's name; nothing at the end of an epoch."""
        saved = self._training.saved(self._model, self._place) if self._model is not None else None
        if saved is not None and distributed_utils.get_data_parallel_world_size() > 1:
            if self._gathered is not None and self._gathered["step"] == saved["step"]:
                saved = self._gathered
            else:
                logger.warning("the checkpoint has the streams of one process; others will begin anew")
        return {} if saved is None else {type(self).__name__: sealed(saved)}

    def set_checkpoint_dict(self, saved: SavedStreams) -> None:
        """fairseq's hook: resume from ``saved``.

        Raises:
            ValueError: it is damaged or has another format.
        """
        file = safe_getattr(self.args, "restore_file", _LAST)
        path = Path(safe_getattr(self.args, "save_dir", ""), file) if file == _LAST else Path(file)
        self._training.restore(saved, f"the checkpoint is {path}")


def check_streams(model: nn.Module, training: bool) -> None:
    """Raise ValueError unless ``model`` can read, and if ``training`` learn from, a text of any length as a stream.

    Learned positions and parameters per position or distance limit the length. In training, a growing state would keep
    the whole text, computed with outdated weights; redrawn random features invalidate a state; and a dropped layer has
    not read the block.
    """
    allowed = "allowed with --task streaming_language_modeling:"
    decoder = getattr(model, "decoder", None)
    if hasattr(model, "encoder") or not isinstance(decoder, LinearTimeDecoder):
        raise ValueError(f"the model is a {type(model).__name__}; {allowed} language models of this plugin")
    if decoder.max_tokens is not None:
        raise ValueError(
            f"the model has parameters for positions or distances of {decoder.max_tokens} tokens at most; {allowed} "
            "models for any length, without --decoder-learned-pos for example"
        )
    if not training:
        return
    for module in decoder.modules():
        name = getattr(module, "name", "") or type(module).__name__
        if not getattr(module, "linear_cost", True):
            raise ValueError(
                f"the model has {name!r} attention, whose state grows with each token; {allowed} attention with a "
                "state of constant size"
            )
        if getattr(module, "redraws", False):
            raise ValueError(
                f"the model has {name!r} attention, which draws anew in training what its state depends on; {allowed} "
                "attention that does not, as favor without --favor-redraw"
            )
    if getattr(decoder.cfg.decoder, "layerdrop", 0.0) > 0.0:
        raise ValueError(
            f"--decoder-layerdrop is {decoder.cfg.decoder.layerdrop}; {allowed} 0, a layer that is dropped has not "
            "read the block that later ones go on from"
        )
