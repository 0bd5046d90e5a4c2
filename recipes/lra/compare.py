"""Train every attention on a task of the Long Range Arena: ``python -m recipes.lra.compare --length 256``.

Prints accuracy beside that of Flowformer's Tables 2, 10 and 11, and the speed and memory of Table 3. Run it again, and
it goes on. ``--table 2`` has the rows of that table; ``--data`` takes another task, which recipes.lra.data has written.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import torch
from fairseq import options as fairseq_options
from fairseq import tasks
from matplotlib import pyplot as plt

import fairseq_plugin  # noqa: F401  registers the architectures
from common.attention import supporting
from fairseq_plugin.data.pixels import FIRST_TOKEN
from fairseq_plugin.models.long_range_arena import unit_dims

from .. import runs
from ..runs import Run, fairseq, spread
from . import data

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Task -> its classes, and the most tokens of a sequence, the first one included.
TASKS = {"listops": (10, 2000), "text": (2, 1001), "retrieval": (2, 4001), "image": (10, 1025), "pathfinder": (2, 1024)}
#: Table of the paper -> its rows.
TABLES = {
    "2": "local linear reformer sparse sinkhorn linformer favor synthesizer longformer softmax bigbird".split()
    + ["cosformer", "flow+no_competition", "flow+no_allocation", "flow"],
    "10": ["flow+elu", "flow+relu", "flow"],
    "11": ["flow+sigmoid_sigmoid", "flow+sigmoid_softmax", "flow+softmax_softmax", "flow"],
}
#: Row -> options of its Flow-Attention.
FLOW = {
    "flow": "",
    "flow+no_competition": "--flow-competition none",
    "flow+no_allocation": "--flow-allocation none",
    "flow+elu": "--flow-phi elu+1",
    "flow+relu": "--flow-phi relu",
    "flow+sigmoid_sigmoid": "--flow-competition sigmoid",
    "flow+sigmoid_softmax": "--flow-competition sigmoid --flow-allocation softmax",
    "flow+softmax_softmax": "--flow-allocation softmax",
}
ROWS = [*supporting("bidirectional"), "flash", *(row for row in FLOW if row != "flow")]
#: Row -> how its row of Table 2 or 10 begins, if not with its name. The Arena's Performer has relu features but on
#: ListOps, and its local attention is among tokens that are far from each other.
PUBLISHED = {
    "favor": "PERFORMER",
    "softmax": "TRANSFORMER",
    "flow": "SIGMOID",
    "flow+elu": "ELU",
    "flow+relu": "RELU",
    "flow+no_competition": "FLOWFORMER W/O COMPETITION",
    "flow+no_allocation": "FLOWFORMER W/O ALLOCATION",
}


def task_arguments(options) -> list[object]:
    """Arguments that fairseq-train and fairseq-validate both need."""
    kind = "sequence_pair_prediction" if options.task == "retrieval" else "sentence_prediction"
    first = [] if options.task == "pathfinder" else ["--init-token", 0]  # else the mean of all tokens is classified
    return [
        options.data / "data-bin",
        *("--task", kind, "--criterion", "sentence_prediction", "--num-classes", TASKS[options.task][0]),
        *("--max-positions", options.length, *first),
    ]


def model_arguments(options, row: str) -> list[object]:
    """A row's model, with about as many parameters as a Transformer whose FFN is twice as wide."""
    architecture = "flowformer" if row in FLOW else row
    width, layers, ffn = options.width, options.layers, 2 * options.width
    made = ["--arch", f"{architecture}_lra_{options.task}", "--encoder-embed-dim", width, "--classifier-dim", ffn]
    if row == "flash":
        query, inner = unit_dims(width, width, ffn)
        made += ["--encoder-layers", 2 * layers, "--encoder-attention-heads", 1, "--encoder-ffn-embed-dim", inner]
        made += ["--flash-query-dim", query]
    else:
        made += ["--encoder-layers", layers, "--encoder-attention-heads", options.heads]
        made += ["--encoder-ffn-embed-dim", ffn, "--encoder-attention-dim", width]
    made += [*FLOW.get(row, "").split(), *runs.reach_arguments(row, options.length)]
    return [*made, *"--dropout 0 --attention-dropout 0 --activation-dropout 0".split()]


def plan(options, row: str, seed: int) -> Run:
    """The training of a row, and the evaluation of the checkpoint that is best on valid."""
    interval = max(1, options.updates // 8)
    command = fairseq(
        *("train", *task_arguments(options), *model_arguments(options, row), "--seed", seed),
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--adam-eps", 1e-9, "--weight-decay", 0.1),
        *("--clip-norm", 1, "--lr", options.lr, "--lr-scheduler", "polynomial_decay", "--max-update", options.updates),
        *("--warmup-updates", max(1, options.updates // 10), "--total-num-update", options.updates),
        *("--batch-size", options.batch_size, "--valid-subset", "valid,test"),
        *(*runs.evaluated_every(interval), "--log-interval", interval),
        *"--best-checkpoint-metric accuracy --maximize-best-checkpoint-metric".split(),
    )
    best = "{folder}/checkpoints/checkpoint_best.pt"
    then = fairseq("validate", *task_arguments(options), "--path", best, "--valid-subset", "test")
    then += ["--batch-size", options.batch_size]
    return Run(row, seed, command, then)


def read(folder: Path) -> dict:
    """The results of a complete training."""
    logged = runs.points(folder / "train.log")
    test = runs.points(folder / "then.log").iloc[-1].accuracy
    best = logged[logged.split == "test"].accuracy.max()
    return {"test": test, "best": best, "parameters": runs.parameters(folder / "train.log")}


def speeds(options) -> pd.DataFrame:
    """Steps per second of training and inference, and MiB of a training step, for each row and length."""
    torch.set_num_threads(1)
    rows = []
    for length in options.speed_lengths:
        tokens, steps = torch.randint(FIRST_TOKEN, FIRST_TOKEN + len(data.SYMBOLS), (2, length), device=DEVICE), {}
        for row in options.models:
            steps[row, "train"], steps[row, "infer"] = steps_of(options, row, length, tokens)
        for (row, kind), seconds in runs.in_turns(steps).items():
            size = runs.peak_bytes(steps[row, kind]) / 2**20
            rows.append({"model": row, "kind": kind, "length": length, "steps": 1 / seconds, "MiB": size})
    return pd.DataFrame(rows)


def steps_of(options, row: str, length: int, tokens: torch.Tensor) -> tuple[Callable, Callable]:
    """Functions that run a step of training and of inference of a model as fairseq-train builds it."""
    words = [*task_arguments(options), *model_arguments(options, row), "--max-positions", length]
    parsed = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), list(map(str, words)))
    symbols = SimpleNamespace(source_dictionary=data.dictionary(data.SYMBOLS), max_positions=lambda: length)
    model = tasks.FairseqTask.build_model(symbols, parsed)
    model.register_classification_head("head", num_classes=TASKS[options.task][0])
    model.to(DEVICE)

    def train() -> None:
        scores, _ = model.train()(tokens, classification_head_name="head")
        torch.autograd.grad(scores.logsumexp(1).sum(), list(model.parameters()), allow_unused=True)

    @torch.no_grad()
    def infer() -> None:
        model.eval()(tokens, classification_head_name="head")

    return train, infer


def accuracies(options) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Train every row with every seed; the results of all, and a table beside the published accuracy."""
    planned = [plan(options, row, seed + 1) for seed, row in itertools.product(range(options.seeds), options.models)]
    found = runs.train_all(planned, options.out, options.jobs, read)
    columns = {"parameters": ("parameters", "first"), "selected on valid, %": ("test", spread(1))}
    columns |= {"best on test, %": ("best", spread(1)), "seeds": ("seed", "count")}
    accuracy = runs.table(found, columns)
    printed = pd.concat([runs.published("flowformer", number) for number in ("2", "10")])[f"{options.task.upper()} ↑"]
    accuracy["published, %"] = [
        next((cell for name, cell in printed.items() if name.startswith(PUBLISHED.get(row, row.upper()))), "-")
        for row in accuracy.model
    ]
    return found, accuracy


def draw(found: pd.DataFrame, timed: pd.DataFrame, path: Path) -> None:
    """The accuracy of each seed, and the speed of training by length."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 0.3 * found.model.nunique() + 3), layout="constrained")
    runs.dots(left, found, "test")
    left.set_xlabel("accuracy on the test split, %")
    lines = timed[timed.kind == "train"].pivot(index="length", columns="model", values="steps")
    lines.plot(ax=right, loglog=True, marker="o", ylabel="training steps per second", xlabel="tokens in a sequence")
    right.set_xticks(lines.index, lines.index)
    right.set_xticks([], minor=True)
    right.yaxis.set_major_formatter("{x:g}")
    right.yaxis.set_minor_formatter("{x:g}")
    figure.savefig(path, dpi=130)


def main(arguments: list[str] | None = None) -> None:
    """Train, time, print and draw."""
    parser = runs.parser(__doc__.splitlines()[0], "work/lra/compare")
    parser.add_argument("--task", choices=TASKS, default="listops")
    parser.add_argument("--data", type=Path, help="what recipes.lra.data wrote; default: ListOps, which is generated")
    usual = ["softmax", "flow", "linear", "flash", "daft_conv", "mixed_chunk"]
    parser.add_argument("--models", nargs="+", choices=ROWS, default=usual)
    parser.add_argument("--table", choices=TABLES, help="the rows of this table of the paper, in place of --models")
    parser.add_argument("--speed", action="store_true", help="only speed and memory, as in Table 3")
    parser.add_argument("--length", type=int, help="tokens of the longest sequence; default: the task's")
    parser.add_argument("--speed-lengths", type=int, nargs="+", default=[1024, 2048, 3072, 4096])
    for name, default in {"updates": 1500, "batch_size": 32, "width": 64, "layers": 1, "heads": 2}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-3, help="highest, of all models")
    options = parser.parse_args(arguments)
    generated, sizes = options.data is None, {"train": 64_000, "valid": 1_000, "test": 1_000}
    if generated and options.task != "listops" and not options.speed:
        parser.error(f"--task is {options.task} without --data; allowed: what recipes.lra.data {options.task} wrote")
    if options.quick:
        options.updates, options.speed_lengths, sizes = 8, [64, 128], {"train": 200, "valid": 40, "test": 40}
        options.length = options.length or (64 if generated else None)
    options.length = TASKS[options.task][1] if options.length is None else options.length
    if options.length < 2:
        parser.error(f"--length is {options.length}; allowed: from 2 on")
    options.models, options.data = TABLES.get(options.table, options.models), options.data or options.out / "data"
    runs.begin(options.out, ["recipes.lra.compare", options.task, options.data, options.length])
    if generated and not options.speed and not (options.data / data.LAST).exists():
        splits = data.listops(sizes, options.length // 16, options.length)
        data.write(options.data, splits, data.dictionary(data.SYMBOLS), range(10))
    found, accuracy = (None, None) if options.speed else accuracies(options)
    timed = speeds(options)
    per_second = timed.pivot(index="model", columns=["kind", "length"], values="steps").loc[options.models]
    if "softmax" in options.models:  # in parentheses: steps in the time of one of softmax
        per_second = per_second.round(2).astype(str) + (per_second / per_second.loc["softmax"]).map(" ({:.2f}x)".format)
    per_second.columns = [f"{kind}, {length:,}" for kind, length in per_second.columns]
    memory = timed[timed.kind == "train"].pivot(index="model", columns="length", values="MiB")
    tables = {"Steps per second": per_second.reset_index(), "MiB": memory.loc[options.models].round(1).reset_index()}
    note = "steps per second, and what a training step allocates: two sequences, one thread, models in turns"
    if options.speed:
        runs.report(options.out, tables, [note], timed)
        return
    notes = [
        f"{options.task}: {options.updates:,} updates of {options.batch_size} sequences of at most {options.length:,} "
        f"tokens, width {options.width}, layers {options.layers}, rate {options.lr:g}; mean ± deviation over seeds",
        "selected on valid: the checkpoint that is best on the valid split; best on test: the best of all evaluations, "
        "as the authors' code reports it, which is no estimate of anything unseen",
        "published: Flowformer's Tables 2 and 10, at the Arena's lengths, sizes and budgets: another experiment",
        note,
    ]
    runs.report(options.out, {"Accuracy, %": accuracy, **tables}, notes, found)
    draw(found, timed, options.out / "results.png")


if __name__ == "__main__":
    main()
