"""Train models of CTC on 5 seconds of speech with several attentions: ``python -m recipes.speech.compare``.

Prints character errors, time and memory by the length of recordings of up to 10 minutes. All models of a seed begin
with one small wav2vec 2.0, which is converted. ``--transfer`` gives the trained softmax model other attentions, which
learn from its own. NAME is the architecture NAME_wav2vec2; ``wav2vec2`` is fairseq's own.
"""

import argparse
import json
from pathlib import Path

import pandas as pd
from fairseq.models import ARCH_MODEL_REGISTRY
from matplotlib import pyplot as plt

from common.attention import ATTENTIONS
from fairseq_plugin import LinearTimeTransformer  # noqa: F401  registers the architectures

from .. import runs
from ..runs import Run, fairseq, spread
from . import data
from .checkpoints import learns_maps, write_converted, write_joined, write_teacher

SUFFIX = "_wav2vec2"
#: fairseq's own model, and the teacher of attention transfer.
STOCK = "wav2vec2"
NAMES = [STOCK, *(name.removesuffix(SUFFIX) for name in sorted(ARCH_MODEL_REGISTRY) if name.endswith(SUFFIX))]
NAMES.remove("hybrid")
#: The convolutions of the feature extractor: 320 samples are a frame.
EXTRACTOR = "[(64, 40, 20), (64, 8, 4), (96, 8, 4)]"
FRAMES_PER_SECOND = 50
#: Stages of a transfer. The first is the trained model with another attention, before any update.
STAGES = ("exchanged", "after transfer", "after fine-tuning")
LAST, BEST = (Path("checkpoints") / f"checkpoint_{name}.pt" for name in ("last", "best"))


def sizes(options: argparse.Namespace) -> list[object]:
    """A small wav2vec 2.0 without its attention; a short training repeats little, so it needs no dropout."""
    off = "dropout attention-dropout dropout-input dropout-features encoder-layerdrop".split()
    return [
        *("--conv-feature-layers", EXTRACTOR, "--extractor-mode", "layer_norm", "--layer-norm-first"),
        *("--encoder-layers", options.layers, "--encoder-embed-dim", options.width, "--conv-pos", 32),
        *("--encoder-ffn-embed-dim", 3 * options.width, "--encoder-attention-heads", options.heads),
        *("--conv-pos-groups", 8, "--final-dim", 32, "--quantize-targets", "--latent-vars", 32),
        *(word for name in off for word in (f"--{name}", 0)),
    ]


def train(options: argparse.Namespace, folder: Path, seed: int, updates: int, lr: float, *task: object) -> list[object]:
    """fairseq-train of ``updates`` on the lists in ``folder``."""
    interval = max(1, updates // min(4, updates))
    return fairseq(
        *("train", folder, *task, "--seed", seed, "--normalize", "--max-tokens", options.batch_seconds * data.RATE),
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--clip-norm", 1.0, "--lr", lr),
        *("--lr-scheduler", "cosine", "--warmup-updates", max(1, round(0.3 * updates)), "--max-update", updates),
        *(*runs.evaluated_every(interval), "--log-interval", max(1, interval // 4)),
    )


def ctc(options: argparse.Namespace, encoder: Path, seed: int, joined: Path | None = None) -> list[object]:
    """A training with CTC from the wav2vec 2.0 ``encoder``; or a fine-tuning of all of ``joined``."""
    task = ["--task", "audio_finetuning", "--labels", "ltr", "--arch", "wav2vec_ctc", "--w2v-path", encoder]
    task += ["--feature-grad-mult", 1.0, "--criterion", "ctc", "--post-process", "letter", "--zero-infinity"]
    task += ["--best-checkpoint-metric", "uer"]
    if joined is None:
        return train(options, options.speech, seed, options.updates, options.lr, *task)
    task += ["--finetune-from-model", joined]
    return train(options, options.speech, seed, options.transfer_updates, options.tuning_lr, *task)


def transferring(options: argparse.Namespace, name: str, seed: int, start: Path, teacher: Path) -> list[object]:
    """Attention transfer from ``teacher`` to ``start``, which has other attentions."""
    task = ["--task", "audio_pretraining", "--arch", name + SUFFIX, *sizes(options), "--mask-prob", 0]
    task += [word for option, value in overrides(options, name).items() for word in (option, value)]
    task += ["--criterion", "attention_transfer", "--teacher", teacher, "--finetune-from-model", start]
    task += ["--lineartime-trained-parameters", "new" if learns_maps(start) else "attention", "--disable-validation"]
    return train(options, options.speech, seed, options.transfer_updates, options.lr, *task)


def overrides(options: argparse.Namespace, name: str) -> dict[str, int]:
    """The frames of the longest recording, for an attention that has a constant for each frame."""
    needs = getattr(ATTENTIONS.get(name), "needs", ())
    return {"--lineartime-max-frames": FRAMES_PER_SECOND * max(options.lengths)} if "max_tokens" in needs else {}


def seed_runs(options: argparse.Namespace, seed: int) -> tuple[list[pd.DataFrame], list[pd.DataFrame]]:
    """All trainings of a seed; the results of its models, and those of its transfers."""
    folder = options.out / "runs"
    pretraining = ["--task", "audio_pretraining", "--arch", STOCK, *sizes(options), "--criterion", "wav2vec"]
    pretraining += ["--infonce", "--loss-weights", "[0.1, 10]", "--disable-validation"]
    recordings = options.speech.with_name("recordings") if options.recordings else options.speech
    command = train(options, recordings, seed, options.pretraining_updates, options.lr / 4, *pretraining)
    if not runs.train(Run("start", seed, command), folder / f"start.{seed}"):
        raise SystemExit(f"nothing to begin with; see {folder / f'start.{seed}'}")
    start = folder / f"start.{seed}" / LAST

    def recognise(lengths: list[int], *files: object) -> list[object]:
        return ["-m", "recipes.speech.recognise", options.speech, *files, "--lengths", *lengths]

    def convert(source: Path, name: str, stage: str) -> Path:
        path = folder / f"{name}.{stage}.{seed}.pt"
        values = {option[2:].replace("-", "_"): value for option, value in overrides(options, name).items()}
        write_converted(source, path, name + SUFFIX, values)
        return path

    encoders = {name: start if name == STOCK else convert(start, name, "start") for name in options.models}
    then = recognise(options.lengths, "{folder}/" + str(BEST))
    planned = [Run(name, seed, ctc(options, encoder, seed), then) for name, encoder in encoders.items()]
    found = [runs.train_all(planned, options.out, options.jobs, read)]
    tuned, teacher = folder / f"{STOCK}.{seed}" / BEST, folder / f"teacher.{seed}.pt"
    if not options.transfer or not tuned.exists():
        return found, []
    write_teacher(start, tuned, teacher)
    exchanged = {name: convert(teacher, name, "exchanged") for name in options.transfer}
    planned = [
        Run(f"{name}.transfer", seed, transferring(options, name, seed, path, teacher))
        for name, path in exchanged.items()
    ]
    runs.train_all(planned, options.out, options.jobs, lambda folder: {})
    planned = []
    for name in options.transfer:
        encoder = folder / f"{name}.transfer.{seed}" / LAST
        untrained, joined = (folder / f"{name}.{stage}.{seed}.pt" for stage in ("untrained", "joined"))
        write_joined(tuned, teacher, exchanged[name], untrained)
        write_joined(tuned, teacher, encoder, joined)
        then = recognise([min(options.lengths)], untrained, joined, "{folder}/" + str(BEST))
        planned.append(Run(f"{name}.tuned", seed, ctc(options, encoder, seed, joined), then))
    return found, [runs.train_all(planned, options.out, options.jobs, read)]


def read(folder: Path) -> dict:
    """Results of a training: the errors of its recognise command in their order, its size and its minutes."""
    lines = (folder / "then.log").read_text(encoding="utf-8").splitlines()
    read = [json.loads(line) for line in lines if line.startswith("{")]
    wall = runs.points(folder / "train.log").wall.max() / 60
    return {"read": read, "parameters": runs.parameters(folder / "train.log"), "minutes": wall}


def by_length(found: pd.DataFrame, value: str, digits: int) -> pd.DataFrame:
    """Mean and deviation over seeds of a value, a row for each model and a column for each length."""
    rows = found.pivot_table(index="model", columns="length", values=value, aggfunc=spread(digits), sort=False)
    rows.columns = [f"{length} s" for length in rows.columns]
    return rows


def transfer_table(found: pd.DataFrame, transferred: pd.DataFrame) -> pd.DataFrame:
    """Character errors of the trained softmax model with another attention, by stage."""
    for stage, name in enumerate(STAGES):
        transferred[name] = [read[stage]["cer"] for read in transferred.read]
    transferred["model"] = transferred.model.str.removesuffix(".tuned")
    rows = runs.table(transferred, {**{name: (name, spread(1)) for name in STAGES}, "seeds": ("seed", "count")})
    teacher = found[(found.model == STOCK) & (found.length == found.length.min())].cer
    rows.insert(1, STOCK, spread(1)(teacher))
    return rows


def main() -> None:
    """Train, read, print and draw."""
    parser = runs.parser(__doc__.splitlines()[0], "work/speech/compare")
    data.add_options(parser)
    models = [STOCK, "flowformer", "linear", "hedgehog", "local", "mixed_chunk"]
    parser.add_argument("--models", nargs="+", choices=NAMES, default=models, metavar="NAME")
    others = [name for name in NAMES if name not in (STOCK, "softmax")]
    parser.add_argument("--transfer", nargs="*", choices=others, default=["hedgehog", "flowformer"], metavar="NAME")
    parser.add_argument("--updates", type=int, default=300, help="of every model of CTC")
    parser.add_argument("--pretraining-updates", type=int, default=5, help="of the wav2vec 2.0 that all begin with")
    parser.add_argument("--transfer-updates", type=int, default=50, help="of transfer, and then of fine-tuning, each")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest, of all models")
    parser.add_argument("--tuning-lr", type=float, default=5e-4, help="highest after a transfer")
    parser.add_argument("--batch-seconds", type=int, default=20, help="of audio in a batch")
    for name, value in {"width": 128, "layers": 2, "heads": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    if options.quick:
        small = {"sentences": 60, "lengths": [5, 10], "train": 8, "test_seconds": 10, "updates": 4}
        vars(options).update(small, pretraining_updates=2, transfer_updates=2)
    if options.transfer and STOCK not in options.models:
        parser.error(f"--models lacks {STOCK}, the teacher of --transfer; give --transfer without names, or add it")
    data.write(options, options.out / "data")
    options.speech = options.out / "data" / "data"
    results = [seed_runs(options, seed) for seed in range(1, options.seeds + 1)]
    trained = pd.concat([frame for found, _ in results for frame in found], ignore_index=True)
    values = pd.json_normalize(trained.read.explode()).set_index(trained.read.explode().index)
    found = trained.drop(columns=["read", "MiB"]).join(values)
    errors = by_length(found, "cer", 1)
    errors.insert(0, "parameters", trained.groupby("model").parameters.first())
    errors["seeds"], errors["minutes"] = (
        trained.groupby("model").size(),
        trained.groupby("model").minutes.agg(spread(1)),
    )
    tables = {"Character errors in per cent, by seconds of the recording": errors.reset_index()}
    tables["Milliseconds of the processor for a second of audio"] = by_length(found, "ms", 1).reset_index()
    tables["MiB of a forward pass beyond the model and its input"] = by_length(found, "MiB", 0).reset_index()
    if transferred := [frame for _, frames in results for frame in frames]:
        title = f"The trained {STOCK} with another attention: character errors at {min(options.lengths)} s"
        tables[title] = transfer_table(found, pd.concat(transferred, ignore_index=True))
    notes = [
        "character errors, spaces included, of the most probable symbol of each frame; mean ± deviation over seeds",
        f"{options.updates:,} updates of at most {options.batch_seconds} s; the checkpoint with the fewest errors on "
        f"valid; one wav2vec 2.0 of {options.pretraining_updates} updates before; one recording at a time, one thread",
    ]
    runs.report(options.out, tables, notes, found)
    figure, panels = plt.subplots(1, 2, figsize=(13, 4.4), layout="constrained")
    for axes, (value, label) in zip(panels, {"cer": "character errors, %", "ms": "ms for a second of audio"}.items()):
        means = found.pivot_table(index="length", columns="model", values=value, sort=False)
        means.plot(ax=axes, marker="o", logx=True, logy=value == "ms", xlabel="seconds of the recording", ylabel=label)
    figure.savefig(options.out / "results.png", dpi=130)


if __name__ == "__main__":
    main()
