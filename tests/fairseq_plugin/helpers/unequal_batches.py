"""Short trainings of every task and criterion of this plugin, and of masked models, that differ between two processes.

The batch of the first process has no padding, that of the second has some. One process reads both in each update.
"""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq import options
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.logging.meters import AverageMeter
from fairseq.trainer import Trainer
from torch import Tensor

from fairseq_plugin.criterions.attention_transfer import AttentionTransferCriterion
from fairseq_plugin.criterions.ctc_distillation import CtcDistillationConfig, CtcDistillationCriterion

from . import audio, tasks, text, transfer
from .language_models import awake

Batch = dict[str, Any]
#: Updates in which both processes have a batch, and the streams of all processes.
UPDATES, STREAMS = 2, 4
#: Trainings of learning from a teacher: the criterion, the kind of model, and the loss of attention transfer.
_OF_A_TEACHER = {
    "transfer": ("attention_transfer", "translation", "outputs"),
    "transfer of weights": ("attention_transfer", "lm", "weights"),
    "distillation": ("distillation", "translation", None),
    "distillation of masked models": ("distillation", "mlm", None),
}
CASES = (*tasks.COMMANDS, *_OF_A_TEACHER, "ctc_distillation")


class Training(NamedTuple):
    """What fairseq-train has built before the first update, and the batches of each update by process."""

    task: Any
    model: torch.nn.Module
    criterion: Any
    updates: Callable[[int, int], list[list[Batch]]]  # (processes, rank) -> the batches of each update


def write(folder: Path) -> Path:
    """Make the data of all cases in ``folder``."""
    (folder / "letters").mkdir()
    for seed, arch in enumerate(("wav2vec2", "hedgehog_wav2vec2")):
        audio.save_ctc(folder / "letters" / f"{arch}.pt", arch, seed)
    return tasks.write(folder)


def build(name: str, folder: Path, processes: int = 1) -> Training:
    """The training ``name`` of data in ``folder``, the same in each of so many ``processes``."""
    torch.manual_seed(1)
    if name in _OF_A_TEACHER:
        return _of_a_teacher(*_OF_A_TEACHER[name], folder, processes)
    if name == "ctc_distillation":
        (student,), _, task = load_model_ensemble_and_task([str(folder / "letters" / "hedgehog_wav2vec2.pt")])
        teacher = str(folder / "letters" / "wav2vec2.pt")
        cfg = CtcDistillationConfig(teacher=teacher, ddp_backend="legacy_ddp", sentence_avg=False)
        updates = _of_both(audio.letters_sample(padding=0), audio.letters_sample(padding=100, seed=1))
        return Training(task, student.train(), CtcDistillationCriterion(cfg, task), updates)
    more = ["--lineartime-context-parallel", str(processes)] if name == "context_parallel" else []
    task, args = tasks.typed(name, folder, *more)
    model, criterion = awake(task.build_model(args)), task.build_criterion(args)
    task.load_dataset("train")
    return Training(task, model, criterion, _updates(name, task))


def _of_a_teacher(criterion: str, kind: str, loss: str | None, folder: Path, processes: int) -> Training:
    own = Path(tempfile.mkdtemp(dir=folder))
    pair = transfer.make_pair(own, kind, {"lm": "hedgehog_lm", "mlm": "hedgehog_mlm"}.get(kind, "hedgehog"))
    made = pair.distillation()
    if criterion == "attention_transfer":
        made = AttentionTransferCriterion(pair.task, pair.path, loss, 0.0, "legacy_ddp", processes)
    updates = _of_both(transfer.make_sample(kind), transfer.make_sample(kind, right=3, seed=2))
    return Training(pair.task, pair.student, made, updates)


def _updates(name: str, task: Any) -> Callable[[int, int], list[list[Batch]]]:
    dataset = task.dataset("train")
    if name == "streams":  # rows of a process go on from its own rows
        return lambda count, rank: [[batch] for batch in _streams(task, dataset, count, rank)][:UPDATES]
    if name == "context_parallel":  # of one sequence both processes read the whole batch
        return lambda count, rank: [[dataset.collater([dataset[0], dataset[1]])]] * UPDATES
    pairs = [dataset.collater([dataset[i], dataset[j]]) for i, j in combinations(range(min(len(dataset), 12)), 2)]
    first = next(batch for batch in pairs if not has_padding(batch))
    second = next((batch for batch in pairs if has_padding(batch)), pairs[-1])  # images have one size
    return _of_both(first, second)


def _of_both(first: Batch, second: Batch) -> Callable[[int, int], list[list[Batch]]]:
    """Updates of two batches, one for each process, and one in which the second process has none left."""

    def updates(processes: int, rank: int) -> list[list[Batch]]:
        both = [first, second] if processes == 1 else [(first, second)[rank]]
        return [*[both] * UPDATES, [{} if rank else first]]

    return updates


def _streams(task: Any, dataset: Any, count: int, rank: int) -> Sequence[Batch]:
    shards = {"num_shards": count, "shard_id": rank, "disable_iterator_cache": True}
    iterator = task.get_batch_iterator(dataset, max_sentences=STREAMS // count, **shards)
    return list(iterator.next_epoch_itr(shuffle=False))


def has_padding(batch: Batch) -> bool:
    """Whether one of the inputs of a batch has any."""
    inputs = batch["net_input"]
    mask = inputs.get("padding_mask")
    tokens = [x for name, x in inputs.items() if name.startswith(("src_tokens", "prev_output"))]
    return any(x.eq(text.PAD).any() for x in tokens) or (mask is not None and bool(mask.any()))


def configuration(folder: Path) -> Any:
    """What fairseq's trainer reads; it takes a second."""
    command = "--task language_modeling --arch transformer_lm --cpu --optimizer sgd --lr 0.01 --ddp-backend legacy_ddp"
    arguments = ["data", *command.split(), "--save-dir", str(folder)]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), arguments))


def train(name: str, folder: Path, settings: Any, processes: int = 1, rank: int = 0) -> dict[str, Any]:
    """What the updates and evaluations afterwards log, and the weights, of one of so many ``processes``."""
    settings.distributed_training.distributed_world_size = processes
    training = build(name, folder, processes)
    # All processes draw the same numbers, and one process draws them for each of its batches.
    training.criterion.register_forward_pre_hook(_seed)
    trainer = Trainer(settings, training.task, training.model, training.criterion)
    training.task.begin_epoch(1, trainer.get_model())
    updates = training.updates(processes, rank)
    trainer.reset_dummy_batch(updates[0][0])  # for a process that has no batch left, as fairseq-train does
    logs = [_logged(lambda batches=batches: trainer.train_step(batches)) for batches in updates]
    if name != "spans":  # whose validation in several processes needs GPUs
        logs += [_logged(lambda x=x: [trainer.valid_step(batch) for batch in x]) for x in (updates[0], updates[-1])]
    weights = {key: x.detach().clone() for key, x in training.model.named_parameters()}
    padding = [has_padding(batch) for batches in updates for batch in batches if batch]
    return {"logs": logs, "weights": weights, "padding": padding}


def _seed(*_: Any) -> None:
    torch.manual_seed(1)


def _logged(step: Callable[[], Any]) -> dict[str, float]:
    """The means that ``step`` logs, or the sums of its counts, to all of their digits, but for batches and bytes."""
    with metrics.aggregate(new_root=True) as logged:
        step()
    kept = {name: x for name, x in logged.items() if isinstance(x, AverageMeter)}
    for name in kept.keys() & {"wpb", "bsz", "context_bytes"}:
        del kept[name]
    # fairseq's ctc counts errors, in names that begin with "_", and adds them up.
    counts = {name for name in kept if name.startswith("_") or name in ("ntokens", "nsentences")}
    return {name: float(meter.sum if name in counts else meter.avg) for name, meter in kept.items()}


def save_all(rank: int, folder: str, settings: Any) -> None:
    """In one of two processes: train all cases in turn, and write what each gave; in plain PyTorch."""
    os.environ["LINEARTIME_CPU_KERNELS"] = "0"
    for name in CASES:
        torch.save(train(name, Path(folder), settings, 2, rank), Path(folder, f"{name}.{rank}.pt"))


def one_is_killed(rank: int, folder: str, settings: Any) -> None:
    """In one of two processes of a sequence: the second is killed when its backward pass has reached the embeddings."""

    def kill(_: Tensor) -> None:
        time.sleep(2)  # until its messages have come, and the first process has nothing left to do
        os.kill(os.getpid(), signal.SIGKILL)

    settings.distributed_training.distributed_world_size = 2
    training = build("context_parallel", Path(folder), 2)
    if rank == 1:
        training.model.decoder.embed_tokens.weight.register_post_accumulate_grad_hook(kill)
    trainer = Trainer(settings, training.task, training.model, training.criterion)
    trainer.train_step(training.updates(2, rank)[0])
