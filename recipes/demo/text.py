"""The text half of the demo: four models of the same shape learn Python's standard library with fairseq's commands."""

import os
import re
import time
from pathlib import Path

import pandas as pd
import torch
from fairseq.data import Dictionary
from torch.nn import functional as F

from .. import library, models, runs, texts

#: Architecture -> its attention. All have the same shape; gates and norms of an attention add parameters. The fair
#: baseline for Flowformer is torch's fused kernel.
ARCHITECTURES = {
    "flowformer_lm": "Flow-Attention",
    "softmax_lm": "softmax, torch's fused kernel",
    "transformer_lm": "softmax, fairseq's own",
    "gated_delta_lm": "Gated DeltaNet, a constant state that forgets",
}
#: Bytes of text per split; training takes about one epoch.
SPLITS = {"test": 120_000, "valid": 60_000, "train": 1_250_000}
LENGTH, SUBWORDS, SAMPLE = 2048, 4000, 120
PROMPTS = ['import os⏎import sys⏎⏎⏎class Reader:⏎    """', "def __init__(self", "    for name in"]


def model_arguments(architecture: str, length: int) -> list[object]:
    """Options of a model for sequences of ``length`` tokens.

    ``--decoder-normalize-before`` is for transformer_lm, whose default is post-norm. Embeddings have width 512,
    fairseq's default, and are projected to 256.
    """
    shape = "--decoder-embed-dim 256 --decoder-input-dim 512 --decoder-output-dim 512 --decoder-ffn-embed-dim 1024 "
    shape += "--decoder-layers 3 --decoder-attention-heads 4 --decoder-normalize-before "
    shape += "--share-decoder-input-output-embed --dropout 0.1"
    short_conv = ["--gated-delta-short-conv", 4] if architecture == "gated_delta_lm" else []  # as in its paper
    return ["--arch", architecture, *shape.split(), *short_conv, "--tokens-per-sample", length]


def prepare(out: Path, wanted: dict[str, int]) -> tuple[dict[str, int], dict[str, texts.Counts]]:
    """Write the library as subwords, a document per line; the bytes and the counts of each split.

    ``wanted`` are the bytes of each split, in the order in which they are filled.
    """
    documents, left = {split: [] for split in wanted}, dict(wanted)
    for document in library.read_library():
        split = next((split for split in wanted if left[split] > 0), None)
        if split is None:
            break
        documents[split].append(document)
        left[split] -= len(document.encode())
    sizes = {split: sum(len(document.encode()) for document in of) for split, of in documents.items()}
    # Learned from source lines: sentencepiece skips sentences longer than a few thousand bytes.
    lines = (library.to_line(line) for document in documents["train"] for line in document.splitlines(keepends=True))
    options = {"model_type": "bpe", "vocab_size": SUBWORDS, "normalization_rule_name": "identity"}
    options |= {"remove_extra_whitespaces": False, "add_dummy_prefix": False, "allow_whitespace_only_pieces": True}
    options |= {"user_defined_symbols": list(library.MARKS.values())}
    model = texts.train_sentencepiece(lines, out / "sentencepiece.model", SUBWORDS, threads=2, **options)
    texts.write_dictionary(model, out / "dict.txt")
    paths = {split: out / f"{split}.txt" for split in ("train", "valid", "test")}
    as_lines = {split: [[library.to_line(document)] for document in of] for split, of in documents.items()}
    counts = {split: texts.encode(as_lines[split], model, path) for split, path in paths.items()}
    texts.preprocess(paths, out / "data-bin", "--srcdict", out / "dict.txt")
    return sizes, counts


def training(architecture: str, out: Path, updates: int) -> runs.Run:
    """A training with fairseq-train, and fairseq-eval-lm on the test split."""
    data, part = out / "data-bin", ["--max-tokens", LENGTH, "--sample-break-mode", "none"]
    command = runs.fairseq(
        *("train", data, "--task", "language_modeling", *model_arguments(architecture, LENGTH), *part),
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--weight-decay", 0.01, "--clip-norm", 1.0),
        *("--lr", 0.004, "--lr-scheduler", "polynomial_decay", "--warmup-updates", updates // 5),
        *("--total-num-update", updates, "--max-update", updates, "--no-epoch-checkpoints"),
        *("--validate-interval-updates", max(3, updates // 4), "--log-interval", max(1, updates // 30), "--seed", 1),
    )
    checkpoint = ("--path", "{folder}/checkpoints/checkpoint_last.pt", "--gen-subset", "test")
    evaluate = ("-m", "fairseq_cli.eval_lm", data, "--user-dir", "fairseq_plugin", *checkpoint, *part)
    evaluate = (*evaluate, "--tokens-per-sample", LENGTH)
    return runs.Run(architecture, 1, command, evaluate, threads=os.cpu_count())


def read(folder: Path, size: int, tokens: int) -> dict[str, object]:
    """The results that a training logged, and its evaluation on a test split of ``size`` bytes and ``tokens``."""
    evaluated = (folder / "then.log").read_text(encoding="utf-8")
    scored = int(re.search(r"Evaluated ([\d,]+) tokens in", evaluated)[1].replace(",", ""))
    bits, perplexity = map(float, re.search(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)", evaluated).groups())
    if scored != tokens:
        raise RuntimeError(f"{folder / 'then.log'}: {scored} tokens were scored, not all {tokens}")
    points = runs.points(folder / "train.log")
    points["wall"] = points.wall.ffill()  # evaluations have none
    # Without the first speed, since the machine warms up, and those of an interval with a validation.
    inner = points[(points.split == "train_inner") & (points.split.shift() == "train_inner")]
    return {
        "parameters": runs.parameters(folder / "train.log"),
        "perplexity": perplexity,
        "bits per byte": bits * scored / size,
        "tokens/s": inner.wps.median(),
        "curve": points[["split", "num_updates", "wall", "loss"]].to_dict("records"),
    }


def speed(architecture: str, length: int, tokens_per_step: int, data: Path, least: float) -> float:
    """Tokens per second of the fastest of at least two training steps that take ``least`` seconds together.

    A step has ``tokens_per_step``, or one sequence if that is longer, so that only the length changes.
    """
    torch.manual_seed(1)
    dictionary = Dictionary.load(str(data / "dict.txt"))
    model = models.build(["--task", "language_modeling", *model_arguments(architecture, length)], dictionary).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    tokens = torch.randint(dictionary.nspecial, len(dictionary), (max(1, tokens_per_step // length), length))

    def step() -> float:
        started = time.perf_counter()
        logits, _ = model(tokens)
        F.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten(), reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - started

    step()
    seconds = [step(), step()]
    while sum(seconds) < least:
        seconds.append(step())
    return tokens.numel() / min(seconds)


def samples(out: Path, architecture: str) -> list[str]:
    """Continuations of each prompt by fairseq-interactive."""
    prompts, log = out / "prompts.txt", out / "samples.log"
    if not log.exists():
        prompts.write_text("".join(prompt + "\n" for prompt in PROMPTS), encoding="utf-8")
        checkpoint = out / "runs" / f"{architecture}.1" / "checkpoints" / "checkpoint_last.pt"
        command = ["-m", "fairseq_cli.interactive", out / "data-bin", "--user-dir", "fairseq_plugin"]
        command += ["--task", "language_modeling", "--path", checkpoint, "--bpe", "sentencepiece"]
        command += ["--sentencepiece-model", out / "sentencepiece.model", "--input", prompts]
        command += "--beam 1 --sampling --sampling-topp 0.9 --temperature 0.7".split()
        runs.run([*command, "--max-len-b", SAMPLE, "--seed", 1], log, os.cpu_count())
    found = re.findall(r"^D-\d+\t[^\t]*\t(.*)$", log.read_text(encoding="utf-8"), re.MULTILINE)
    return [library.from_line(line) for line in found]


def draw(left: runs.plt.Axes, right: runs.plt.Axes, frame: pd.DataFrame) -> None:
    """Losses by update and by second: a line in training, dots on the valid split."""
    for axes, x, unit in ((left, "num_updates", "updates"), (right, "wall", "seconds of training")):
        for number, (name, curve) in enumerate(zip(frame.model, frame.curve)):
            points = pd.DataFrame(curve)
            for split, style in (("train_inner", {"label": name}), ("valid", {"linestyle": "", "marker": "o"})):
                chosen = points[points.split == split]
                axes.plot(chosen[x], chosen.loss, color=f"C{number}", **style)
        axes.set(title="Language models: line train, dot valid", xlabel=unit, ylabel="loss, bits per token")
    left.legend(frameon=False)
