"""The results of the demo as tables in plain text and Markdown, and as JSON."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..shared import fairseq_log
from ..shared.tables import MISSING, Run, Speeds, Table, break_even, write_reports
from .images import REQUIRED_TOP1, ImageResult
from .text import ARCHITECTURES, TOKENS_PER_SAMPLE, TextResult


def read_speeds(lines: Sequence[str]) -> Speeds:
    """Read the measurements that ``recipes.demo.lengths`` printed."""
    speeds: Speeds = {}
    for line in lines:
        if line.startswith('{"architecture"'):
            speed = json.loads(line)
            speeds.setdefault(speed["architecture"], {})[speed["length"]] = speed["tokens_per_second"]
    return speeds


def tables(text: TextResult, speeds: Speeds, images: ImageResult) -> list[Table]:
    """The tables of all results that the demo shows."""
    models = Table(
        "Language models of Python's standard library, same data and updates",
        ("architecture", "attention", "parameters", "perplexity", "bits/byte", "train tokens/s", "peak memory"),
        [
            (
                model.architecture,
                ARCHITECTURES[model.architecture],
                f"{model.parameters:,}",
                f"{model.evaluation.perplexity:.1f}",
                f"{model.bits_per_byte:.3f}",
                f"{model.tokens_per_second:,.0f}",
                f"{model.training.peak_bytes / 2**20:,.0f} MiB",
            )
            for model in text.models
        ],
        [
            f"test split: {text.files['test']} files, {text.text_bytes['test']:,} bytes; all"
            f" {text.tokens['test']:,} tokens scored, an end of file per file included",
            f"perplexity is per token; bits/byte = bits of all tokens / bytes; {TOKENS_PER_SAMPLE} tokens per sequence",
            "tokens/s: median of fairseq's log; memory: the whole fairseq-train process",
        ],
    )
    lengths = sorted({length for row in speeds.values() for length in row})
    speed = Table(
        "Training tokens/s by sequence length",
        ("architecture", *(f"{length:,}" for length in lengths)),
        [
            (name, *(f"{row[length]:,.0f}" if length in row else MISSING for length in lengths))
            for name, row in speeds.items()
        ],
        [_break_even_note(speeds, peer) for peer in speeds if peer != "flowformer_lm"],
    )
    digits = Table(
        "Handwritten digits, 32 x 32",
        ("model", "parameters", "held-out accuracy", "epochs", "training", "peak memory"),
        [
            (
                "flowformer_hier_digits",
                f"{images.parameters:,}",
                f"{images.top1:.1f} %",
                str(len(images.epochs)),
                f"{images.training.seconds:.0f} s",
                f"{images.training.peak_bytes / 2**20:,.0f} MiB",
            )
        ],
        [
            f"{images.digits['train']} digits to learn from, {images.digits['validation']} held out;"
            + f" trained by {images.trainer}; required: {REQUIRED_TOP1:.0f} %"
        ],
    )
    return [models, speed, digits]


def _break_even_note(speeds: Speeds, peer: str) -> str:
    architecture = "flowformer_lm"
    length = break_even(speeds, architecture, peer)
    slower_lengths = sorted(n for n in speeds[peer] if speeds[architecture].get(n, 0) < speeds[peer][n])
    note = f"{architecture} against {peer}: "
    note += f"at least as fast from {length:,} tokens on" if length else "slower at the longest length measured"
    if slower_lengths:
        note += "; slower at " + ", ".join(f"{n:,}" for n in slower_lengths)
    return note


def as_json(text: TextResult, speeds: Speeds, images: ImageResult, run: Run) -> dict[str, Any]:
    """All numbers, including curves, as plain types."""
    return {
        "run": run._asdict(),
        "text": {
            "files": text.files,
            "bytes": text.text_bytes,
            "tokens": text.tokens,
            "models": [
                {
                    "architecture": model.architecture,
                    "parameters": model.parameters,
                    "test": model.evaluation._asdict(),
                    "bits_per_byte": model.bits_per_byte,
                    "train_tokens_per_second": model.tokens_per_second,
                    "train_seconds": model.training.seconds,
                    "peak_bytes": model.training.peak_bytes,
                    "curves": fairseq_log.curves(model.points),
                }
                for model in text.models
            ],
            "samples": text.samples,
        },
        "tokens_per_second_by_length": speeds,
        "images": {
            "parameters": images.parameters,
            "digits": images.digits,
            "top1": images.top1,
            "train_seconds": images.training.seconds,
            "peak_bytes": images.training.peak_bytes,
            "trainer": images.trainer,
            "epochs": [epoch._asdict() for epoch in images.epochs],
        },
    }


def write(out: Path, text: TextResult, speeds: Speeds, images: ImageResult, run: Run) -> str:
    """Write results.txt, results.md and results.json to ``out``; returns the text."""
    blocks = tables(text, speeds, images)
    return write_reports(out, blocks, run, as_json(text, speeds, images, run))
