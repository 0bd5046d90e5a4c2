"""Short trainings of every task and criterion of this plugin, and of masked models, that differ between two processes.

The batch of the first process has no padding, that of the second has some. One process reads both in each update.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq import options, tasks
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.logging.meters import AverageMeter
from fairseq.trainer import Trainer
from torch import Tensor

from fairseq_plugin.criterions.attention_transfer import AttentionTransferCriterion
from fairseq_plugin.criterions.ctc_distillation import CtcDistillationConfig, CtcDistillationCriterion
from recipes.lra.data import dictionary
from recipes.lra.data import write as write_examples
from recipes.texts import write_split

from . import audio, episodes, pixels, series, spans, text, transfer
from .language_models import awake, small
from .masked_models import small as small_masked

#: Updates of a training in which both processes have a batch.
UPDATES = 2
#: Tokens of a block, and the streams of all processes that read them.
_BLOCK, _STREAMS = 8, 4
#: Lines of the toy text: its last block is short.
_LINES = (7, 7, 7, 9, 5, 11, 7, 9)
_LM = "--sample-break-mode eos --tokens-per-sample 16 --dropout 0 --attention-dropout 0"
_SIZES = "--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2 --dropout 0"
_CONTEXT = "--task context_parallel_language_modeling"
#: The arguments of fairseq-train, by name; the first one is a folder that ``write`` makes.
_COMMANDS = {
    "sparse_cross_entropy": f"text --task language_modeling --arch daft_conv_lm --criterion sparse_cross_entropy {_LM} "
    "--entropy-weight 1",
    "masked": " ".join(
        ("text --task masked_lm --criterion masked_lm --mask-prob 0.5 --sample-break-mode eos --tokens-per-sample 16",)
        + ("--arch flash_mlm", *small_masked("flash_mlm"), "--dropout 0 --attention-dropout 0")
    ),
    "prompted": f"text --task prompted_language_modeling --arch flowformer_lm --criterion cross_entropy {_LM}",
    "streaming": f"text --task streaming_language_modeling --arch flowformer_lm --criterion cross_entropy {_LM} "
    f"--sample-break-mode none --tokens-per-sample {_BLOCK}",
    "context_parallel": f"text {_CONTEXT} --arch flowformer_lm --criterion cross_entropy {_LM} "
    "--sample-break-mode none --tokens-per-sample 11",
    "pixels": f"pixels --task pixel_modeling --arch flowformer_lm --criterion cross_entropy --dropout 0 "
    f"--tokens-per-sample {pixels.SHAPE.length}",
    "pairs": "pairs/data-bin --task sequence_pair_prediction --criterion sentence_prediction --num-classes 2 "
    f"--init-token 0 --arch flow_lra_retrieval --max-positions 16 {_SIZES}",
    "series": f"series --task time_series_classification --criterion sentence_prediction --arch flow_time_series "
    f"{_SIZES}",
    "spans": " ".join(
        ("spans", *spans.TASK, *spans.WINDOWS, "--arch flash_mlm", *small_masked("flash_mlm"), "--dropout 0")
    ),
    "action_mse": "episodes --task offline_rl --criterion action_mse --arch flow_decision --context 5 "
    "--decoder-layers 1 --decoder-embed-dim 16 --decoder-attention-heads 2 --dropout 0",
    "awac": "episodes --task offline_rl --criterion awac --arch awac_decision --context 5 --decoder-layers 1 "
    "--decoder-embed-dim 16 --dropout 0",
}
#: The trainings of learning from a teacher: the criterion, the kind of model, and the loss of attention transfer.
_OF_A_TEACHER = {
    **{f"transfer_{kind}": ("attention_transfer", kind, "outputs") for kind in transfer.TEACHERS},
    "transfer_weights": ("attention_transfer", "lm", "weights"),
    **{f"distillation_{kind}": ("distillation", kind, None) for kind in transfer.TEACHERS},
}
CASES = (*_COMMANDS, *_OF_A_TEACHER, "ctc_distillation")
#: Cases in which no batch has padding: images have one size.
WITHOUT_PADDING = ("pixels",)
#: Cases whose validation in several processes needs GPUs.
NOT_VALIDATED = ("spans",)


class Training(NamedTuple):
    """What fairseq-train has built before the first update, and the batches of each update by process."""

    task: Any
    model: torch.nn.Module
    criterion: Any
    updates: Callable[[int, int], list[list[dict[str, Any]]]]  # (processes, rank) -> the batches of each update


def write(folder: Path) -> None:
    """Make the data of all cases in ``folder``."""
    rng = np.random.default_rng(1)
    lines = [np.append(rng.integers(4, 60, length - 1), 2).astype(np.int32) for length in _LINES]
    (folder / "text").mkdir()
    text.dictionary().save(str(folder / "text" / "dict.txt"))
    write_split(folder / "text", "train", lines, 64)
    pixels.write_pixels(folder / "pixels")
    sizes = ((4, 6), (4, 6), (3, 6), (5, 2), (4, 6))
    tokens = [[rng.integers(0, 3, length) for length in both] for both in sizes]
    pairs = [(both, i % 2) for i, both in enumerate(tokens)]
    write_examples(folder / "pairs", {"train": pairs}, dictionary("abc"), range(2))
    series.write_waves(folder / "series", train=24, test=3)
    spans.write_names(folder / "spans", {"train": 8})
    episodes.write_episodes(folder / "episodes", count=6)
    (folder / "letters").mkdir()
    for seed, arch in enumerate(("wav2vec2", "hedgehog_wav2vec2")):
        audio.save_ctc(folder / "letters" / f"{arch}.pt", arch, seed)


def build(name: str, folder: Path, processes: int = 1) -> Training:
    """The training ``name`` of data in ``folder``, the same in each of so many ``processes``."""
    torch.manual_seed(1)
    if name in _OF_A_TEACHER:
        return _of_a_teacher(*_OF_A_TEACHER[name], folder / name, processes)
    if name == "ctc_distillation":
        return _of_letters(folder / "letters")
    data, *command = _COMMANDS[name].split()
    arch = command[command.index("--arch") + 1]
    command += small(arch) if arch.endswith("_lm") else []
    command += ["--lineartime-context-parallel", str(processes)] if name == "context_parallel" else []
    args = options.parse_args_and_arch(options.get_training_parser(), [str(folder / data), *command])
    task = tasks.setup_task(args)
    model, criterion = awake(task.build_model(args)), task.build_criterion(args)
    task.load_dataset("train")
    return Training(task, model, criterion, _updates(name, task))


def _of_a_teacher(criterion: str, kind: str, loss: str | None, folder: Path, processes: int) -> Training:
    folder = folder / f"{processes}-{torch.distributed.get_rank() if processes > 1 else 0}"
    folder.mkdir(parents=True, exist_ok=True)
    pair = transfer.make_pair(folder, kind, {"lm": "hedgehog_lm", "mlm": "hedgehog_mlm"}.get(kind, "hedgehog"))
    made = pair.distillation()
    if criterion == "attention_transfer":
        made = AttentionTransferCriterion(pair.task, pair.path, loss, 0.0, "legacy_ddp", processes)
    updates = _of_both(transfer.make_sample(kind), transfer.make_sample(kind, right=3, seed=2))
    return Training(pair.task, pair.student, made, updates)


def _of_letters(folder: Path) -> Training:
    (student,), _, task = load_model_ensemble_and_task([str(folder / "hedgehog_wav2vec2.pt")])
    cfg = CtcDistillationConfig(teacher=str(folder / "wav2vec2.pt"), ddp_backend="legacy_ddp", sentence_avg=False)
    updates = _of_both(audio.letters_sample(padding=0), audio.letters_sample(padding=100, seed=1))
    return Training(task, student.train(), CtcDistillationCriterion(cfg, task), updates)


def _updates(name: str, task: Any) -> Callable[[int, int], list[list[dict[str, Any]]]]:
    dataset = task.dataset("train")
    if name == "streaming":  # rows of a process go on from its own rows
        return lambda count, rank: [[batch] for batch in _streams(task, dataset, count, rank)][:UPDATES]
    if name == "context_parallel":  # of one sequence both processes read the whole batch
        return lambda count, rank: [[dataset.collater([dataset[0], dataset[1]])]] * UPDATES
    pairs = [dataset.collater([dataset[i], dataset[j]]) for i, j in combinations(range(min(len(dataset), 12)), 2)]
    first = next(batch for batch in pairs if not has_padding(batch))
    second = pairs[-1] if name in WITHOUT_PADDING else next(batch for batch in pairs if has_padding(batch))
    return _of_both(first, second)


def _of_both(first: dict[str, Any], second: dict[str, Any]) -> Callable[[int, int], list[list[dict[str, Any]]]]:
    """Updates of two batches, one for each process, and one in which the second process has none left."""

    def updates(processes: int, rank: int) -> list[list[dict[str, Any]]]:
        both = [first, second] if processes == 1 else [(first, second)[rank]]
        return [*[both] * UPDATES, [{} if rank else first]]

    return updates


def _streams(task: Any, dataset: Any, count: int, rank: int) -> Sequence[dict[str, Any]]:
    shards = {"num_shards": count, "shard_id": rank, "disable_iterator_cache": True}
    iterator = task.get_batch_iterator(dataset, max_sentences=_STREAMS // count, **shards)
    return list(iterator.next_epoch_itr(shuffle=False))


def has_padding(batch: dict[str, Any]) -> bool:
    """Whether one of the inputs of a batch has any."""
    inputs = batch["net_input"]
    mask = inputs.get("padding_mask")
    tokens = [x for name, x in inputs.items() if name.startswith(("src_tokens", "prev_output"))]
    return any(x.eq(text.PAD).any() for x in tokens) or (mask is not None and bool(mask.any()))


def configuration(folder: Path) -> Any:
    """What fairseq's trainer reads; it takes a second."""
    command = "--task language_modeling --arch transformer_lm --cpu --optimizer sgd --lr 0.01 --ddp-backend legacy_ddp"
    parser = options.get_training_parser()
    arguments = ["data", *command.split(), "--save-dir", str(folder)]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, arguments))


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
    if name not in NOT_VALIDATED:
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
    kept = {
        name: meter
        for name, meter in logged.items()
        if isinstance(meter, AverageMeter) and name not in ("wpb", "bsz", "context_bytes")
    }
    # fairseq's ctc counts errors, in names that begin with "_", and adds them up.
    counts = {name for name in kept if name.startswith("_") or name in ("ntokens", "nsentences")}
    return {name: float(meter.sum if name in counts else meter.avg) for name, meter in kept.items()}


def kinds(name: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The kinds of the values that each batch logs, in order, in training and in evaluation."""
    training = build(name, folder)
    found: dict[str, list[dict[str, Any]]] = {"training": [], "evaluation": []}
    for batch in (*training.updates(2, 0)[1], *training.updates(2, 1)[1]):
        for mode, of_mode in found.items():
            training.model.train(mode == "training"), training.criterion.train(mode == "training")
            _, size, logged = training.criterion(training.model, batch)
            of_mode.append({"sample_size": _kind(size), **{f"log.{key}": _kind(x) for key, x in logged.items()}})
    return found


def _kind(x: Any) -> str:
    return f"tensor {tuple(x.shape)}" if isinstance(x, Tensor) else "number"


def save_all(rank: int, folder: str, settings: Any) -> None:
    """In one of two processes: train all cases in turn, and write what each gave."""
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
