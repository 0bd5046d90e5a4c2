"""Language modeling with sequences split over several processes: ``--task context_parallel_language_modeling``.

fairseq's own task cannot do this: it shards batches over all processes and passes whole samples to the criterion.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from fairseq.data.iterators import EpochBatchIterator
from fairseq.logging import metrics
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from fairseq.utils import safe_getattr
from torch import Tensor, nn

from common.modules.gated_attention_unit import GatedAttentionUnit
from common.parallel import ContextGroup, check_context_parallel, context_parallel, own_part, part_length

from ..loading.known_options import option_field

_OPTION = "--lineartime-context-parallel"


@dataclass
class ContextParallelLanguageModelingConfig(LanguageModelingConfig):
    """Options of ``language_modeling``, and the number of processes that share a sequence."""

    lineartime_context_parallel: int = option_field(
        1,
        "processes P that hold a sequence together, each a P-th of its tokens; those of ranks 0 to P - 1 "
        "and so on. It changes memory and speed, and no loss but by dropout, whose pattern repeats in each part",
    )
    lineartime_context_timeout: int = option_field(
        300, "seconds after which a process that does not answer the others of its sequence is given up"
    )


@register_task("context_parallel_language_modeling", dataclass=ContextParallelLanguageModelingConfig)
class ContextParallelLanguageModelingTask(LanguageModelingTask):
    """``language_modeling`` in which P processes train on each batch, and each holds a part of every sequence.

    fairseq's data parallelism still spans all processes: it reduces the sum of the gradients of all tokens, divided by
    their number. Everything else, such as generation and evaluation in one process, is as in ``language_modeling``.

    Raises:
        ValueError: P does not divide the number of processes; the model has an attention that cannot compute a part of
            a sequence, or ``--lineartime-reset-at-eos``; ``--sentence-avg``; targets other than the next token.
    """

    #: A batch holds parts of texts, which a teacher cannot read on their own.
    reads_in_parts = True

    def __init__(self, args, dictionary, output_dictionary=None, targets=None) -> None:
        super().__init__(args, dictionary, output_dictionary, targets)
        self.parts = args.lineartime_context_parallel
        for option, value in ((_OPTION, self.parts), ("--lineartime-context-timeout", self._timeout)):
            if value < 1:
                raise ValueError(f"{option} is {value}; allowed: at least 1")
        if self.parts > 1 and self.targets != ["future"]:
            raise ValueError(f"{_OPTION} is {self.parts}; allowed with --self-target or --past-target: 1")
        self._group: ContextGroup | None = None
        self._everyone: ContextGroup | None = None

    @property
    def _timeout(self) -> int:
        return self.args.lineartime_context_timeout

    def build_model(self, args, from_checkpoint=False) -> nn.Module:
        """As fairseq's; ValueError for a model that cannot compute a part of a sequence."""
        model = super().build_model(args, from_checkpoint)
        if self.parts > 1:
            if safe_getattr(args, "lineartime_reset_at_eos", False):
                raise ValueError(f"--lineartime-reset-at-eos is given; allowed with {_OPTION} {self.parts}: not given")
            try:
                check_context_parallel(model)
            except ValueError as error:
                raise ValueError(f"{_OPTION} is {self.parts}, and {error}") from error
        return model

    def build_criterion(self, args):
        """As fairseq's; ValueError if it divides by the number of sentences, which no process holds whole."""
        criterion = super().build_criterion(args)
        if self.parts > 1 and getattr(criterion, "sentence_avg", False):
            raise ValueError(f"--sentence-avg is given; allowed with {_OPTION} {self.parts}: not given")
        return criterion

    def get_batch_iterator(
        self, dataset, *arguments: Any, num_shards: int = 1, shard_id: int = 0, **options: Any
    ) -> EpochBatchIterator:
        """As fairseq's, with the same batches for the P processes of a sequence."""
        if num_shards > 1:
            self._check_processes(num_shards)
            num_shards, shard_id = num_shards // self.parts, shard_id // self.parts
        return super().get_batch_iterator(dataset, *arguments, num_shards=num_shards, shard_id=shard_id, **options)

    def train_step(self, sample: dict[str, Any], model: nn.Module, criterion, *arguments: Any, **options: Any):
        """As fairseq's, on this process's part of ``sample``."""
        if self.parts > 1 and not _processes() > 1:
            self._check_processes(1)
        with self._own_part(sample, model) as part:
            loss, sample_size, logging_output = super().train_step(part, model, criterion, *arguments, **options)
        if self._group is not None:
            logging_output["context_bytes"], self._group.bytes_sent = self._group.bytes_sent, 0
        return loss, sample_size, logging_output

    def valid_step(self, sample: dict[str, Any], model: nn.Module, criterion, **options: Any):
        """As fairseq's, on this process's part of ``sample``; on the whole sample if there is one process."""
        with self._own_part(sample, model) as part:
            return super().valid_step(part, model, criterion, **options)

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion) -> None:
        """As fairseq's, counting each sentence once; ``context_bytes`` are all bytes that processes sent per update."""
        if self.parts > 1 and _processes() > 1:
            logging_outputs = [{**log, "nsentences": log.get("nsentences", 0) / self.parts} for log in logging_outputs]
        super().reduce_metrics(logging_outputs, criterion)
        if any("context_bytes" in log for log in logging_outputs):
            metrics.log_scalar("context_bytes", sum(log.get("context_bytes", 0) for log in logging_outputs), round=0)

    @property
    def context_group(self) -> ContextGroup:
        """The group of processes that share this one's sequences; all processes create it in their first step."""
        if self._group is None:
            self._check_processes(_processes())
            firsts, timeout = range(0, _processes(), self.parts), timedelta(seconds=self._timeout)
            groups = [dist.new_group(list(range(i, i + self.parts)), timeout=timeout) for i in firsts]
            self._everyone = ContextGroup(dist.new_group(timeout=timeout), "train together")
            self._group = ContextGroup(groups[dist.get_rank() // self.parts])
        return self._group

    @contextmanager
    def _own_part(self, sample: dict[str, Any], model: nn.Module) -> Iterator[dict[str, Any]]:
        """This process's part of ``sample``; inside, ``model`` treats its input as that part."""
        if self.parts == 1 or _processes() == 1:
            yield sample
            return
        group, tokens = self.context_group, sample["net_input"]["src_tokens"]
        _check_same_batch(group, tokens)
        length, padding = part_length(tokens.shape[1], self.parts, _chunk_size(model)), self.dictionary.pad()
        source, target = (own_part(x, group.rank, length, padding) for x in (tokens, sample["target"]))
        counts = source.ne(padding).sum(1)
        net_input = {**sample["net_input"], "src_tokens": source, "src_lengths": counts}
        part = {**sample, "net_input": net_input, "target": target, "ntokens": int(counts.sum())}
        try:
            with context_parallel(model, group, counts):
                yield part
            # fairseq's reductions come next and do not report which process is lost. With NCCL only a timeout does.
            if dist.get_backend() == "gloo":
                self._everyone.meet(tokens.device)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            # fairseq's trainer would skip the batch in this process only, and the others would wait.
            raise RuntimeError(
                f"process {dist.get_rank()} has no memory left for {tuple(source.shape)} tokens, its part of "
                f"{tuple(tokens.shape)}; with {_OPTION} no batch can be left out"
            ) from error

    def _check_processes(self, processes: int) -> None:
        if processes % self.parts:
            raise ValueError(f"{_OPTION} is {self.parts}; allowed with {processes} processes: a divisor of {processes}")


def _processes() -> int:
    """The number of processes of torch.distributed; 1 without it."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _chunk_size(model: nn.Module) -> int:
    """The chunk size of the gated attention units of ``model``, 1 without any; parts are cut at its multiples."""
    return max((x.chunk_size for x in model.modules() if isinstance(x, GatedAttentionUnit)), default=1)


def _check_same_batch(group: ContextGroup, tokens: Tensor) -> None:
    """Raise RuntimeError unless all processes of ``group`` have the same ``tokens`` (B, n)."""
    positions = torch.arange(1, tokens.numel() + 1, device=tokens.device)
    digest = (tokens.flatten() * positions % 1000003).sum()
    fingerprint = torch.stack([digest.new_tensor(tokens.shape[0]), digest.new_tensor(tokens.shape[1]), digest])
    if not group.gather(fingerprint).eq(fingerprint).all():
        raise RuntimeError("the processes of one sequence have read other batches; allowed: the same data for all")
