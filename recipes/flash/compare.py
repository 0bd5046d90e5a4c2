"""Train the paper's models on any text, on a CPU, and print perplexity and seconds per step at several lengths.

``python -m recipes.flash.compare --file any.txt`` from the checkout's root, through fairseq-train, with equal numbers
of parameters, updates and tokens per update.
"""

import argparse
import json
import shlex
import shutil
import sys
import time
from pathlib import Path

from tqdm import tqdm

from .. import fairseq_log
from ..commands import CommandFailed, python, run, shown
from ..tables import describe_run
from ..text_files import positive
from .measurements import Comparison, Measurement, Plan, missing, write
from .models import DEFAULT_MODELS, MODELS, SHAPE
from .prepare import Settings, cut_trial, to_data_bin

LENGTHS = [512, 1024, 2048, 4096]
UPDATES = 150
#: To see that everything runs; nothing is learned.
QUICK_LENGTHS, QUICK_UPDATES = [512, 1024], 10
TOKENS_PER_UPDATE = 4096
VOCABULARY = 2000
#: Of each training: enough for a median without the first, few enough not to be felt.
_LOG_POINTS = 20


def train_command(data: Path, out: Path, plan: Plan, architecture: str, length: int, inner_width: int) -> list[str]:
    """fairseq-train with the paper's optimiser, a learning rate for few updates, and one validation, at the end."""
    return python(
        "-m", "fairseq_cli.train", data, "--user-dir", "fairseq_plugin", "--task", "language_modeling",
        *SHAPE.arguments(architecture, inner_width), "--tokens-per-sample", length, "--sample-break-mode", "none",
        "--max-tokens", plan.tokens_per_update, "--num-workers", 0, "--optimizer", "adam",
        "--adam-betas", "(0.9, 0.999)", "--adam-eps", "1e-06", "--weight-decay", "0.01", "--clip-norm", "0.1",
        "--lr", "0.003", "--lr-scheduler", "polynomial_decay", "--warmup-updates", max(1, plan.updates // 10),
        "--total-num-update", plan.updates, "--end-learning-rate", "0", "--max-update", plan.updates,
        "--validate-interval", 1_000_000, "--no-save", "--save-dir", out / "checkpoints", "--seed", 1,
        "--log-format", "json", "--log-interval", max(1, plan.updates // _LOG_POINTS),
    )  # fmt: skip


def measure(data: Path, out: Path, plan: Plan, architecture: str, length: int, inner_width: int) -> Measurement:
    """Train one model at one length.

    Raises:
        CommandFailed: fairseq-train failed.
        ValueError: its log lacks something.
    """
    command = train_command(data, out, plan, architecture, length, inner_width)
    log = out / "logs" / f"{architecture}.{length}.log"
    with tqdm(
        total=plan.updates, desc=f"  {architecture}, {length}", unit=" updates", leave=False, disable=None
    ) as bar:

        def on_line(line: str) -> None:
            entry = fairseq_log.parse_entry(line)
            if entry is not None:
                bar.update(entry.update - bar.n)

        finished = run(command, log, on_line)
    lines = log.read_text(encoding="utf-8").splitlines()
    entries = fairseq_log.parse_training(lines)
    if not entries or entries[-1].kind != "valid" or entries[-1].update != plan.updates:
        raise ValueError(f"{shown(log)} does not end with a validation after update {plan.updates}")
    return Measurement(
        architecture,
        length,
        fairseq_log.parse_parameters(lines),
        entries[-1].perplexity,
        fairseq_log.median_tokens_per_second(entries),
        finished.peak_bytes,
        finished.seconds,
        shlex.join(command),
    )


def equal_widths(out: Path, plan: Plan) -> dict[str, int]:
    """Architecture -> the inner width that gives it as many parameters as the others.

    Raises:
        CommandFailed: none does.
    """
    # In a process of its own, as trainings are: nothing of torch stays in memory here.
    log = out / "logs" / "widths.log"
    command = python("-m", "recipes.flash.widths", out / "data-bin", "--length", plan.lengths[0])
    run([*command, "--archs", *plan.architectures], log)
    return json.loads(log.read_text(encoding="utf-8").splitlines()[-1])


def compare(out: Path, plan: Plan, text: Path) -> Comparison:
    """Prepare ``text`` and measure everything in ``plan``; one model's failure is noted and the next one tried.

    Raises:
        CommandFailed, ValueError: the text could not be prepared.
    """
    counts = to_data_bin(cut_trial(text, out / "raw", None), out, Settings(plan.vocabulary))
    for split, count in counts.items():
        print(f"  {split:<5}  {count.words:9,d} words  {count.tokens:9,d} tokens")
    if counts["valid"].tokens < max(plan.lengths):
        raise ValueError(
            f"--file has {counts['valid'].tokens:,} tokens in its valid part; allowed: at least the longest of"
            f" --lengths, {max(plan.lengths):,}"
        )
    widths = equal_widths(out, plan)
    print("  inner widths for equal parameters: " + ", ".join(f"{name} {width}" for name, width in widths.items()))
    found = Comparison(plan, counts, [], {})
    try:
        for architecture, length in missing(found):
            try:
                one = measure(out / "data-bin", out, plan, architecture, length, widths[architecture])
            except (CommandFailed, ValueError) as error:
                print(f"  {error}", file=sys.stderr, flush=True)
                found.failed[architecture, length] = str(error).strip().splitlines()[-1]
                continue
            found.measured.append(one)
            print(
                f"  {architecture} at {length:,}: perplexity {one.perplexity:.2f},"
                f" {plan.tokens_per_update / one.tokens_per_second:.3f} s per step, {one.parameters:,} parameters",
                flush=True,
            )
    except KeyboardInterrupt:
        print("\nInterrupted: what was measured until now follows.", file=sys.stderr)
    return found


def parser() -> argparse.ArgumentParser:
    """The script's options."""
    parser = argparse.ArgumentParser(prog="python -m recipes.flash.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, required=True, help="any text in UTF-8, from about 1 MB on")
    parser.add_argument("--out", type=Path, default=Path("work/flash/compare"), help="default: %(default)s")
    parser.add_argument("--lengths", type=numbers, help=f"default: {','.join(map(str, LENGTHS))}")
    parser.add_argument("--archs", type=architectures, default=DEFAULT_MODELS, help=f"of {', '.join(MODELS)}")
    parser.add_argument("--updates", type=positive, help=f"of every model; default: {UPDATES}")
    parser.add_argument("--vocabulary", type=positive, default=VOCABULARY, help="subwords (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="only see that everything runs: nothing is learned")
    return parser


def numbers(text: str) -> list[int]:
    """Comma-separated lengths, none twice."""
    found = sorted({positive(item) for item in text.split(",")})
    if found[-1] > TOKENS_PER_UPDATE:
        raise argparse.ArgumentTypeError(f"{found[-1]}; allowed: at most the {TOKENS_PER_UPDATE} tokens of an update")
    return found


def architectures(text: str) -> list[str]:
    """Comma-separated architectures, none twice."""
    found = list(dict.fromkeys(text.split(",")))
    for name in found:
        if name not in MODELS:
            raise argparse.ArgumentTypeError(f"{name}; allowed: {', '.join(MODELS)}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    plan = Plan(
        list(options.archs),
        options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS),
        options.updates or (QUICK_UPDATES if options.quick else UPDATES),
        TOKENS_PER_UPDATE,
        options.vocabulary,
    )
    out = options.out.absolute()
    started = time.monotonic()
    command = shlex.join(["python", "-m", "recipes.flash.compare", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        if not options.file.is_file():
            raise ValueError(f"--file is {options.file}, which does not exist; allowed: a text file")
        if plan.updates < 3:
            raise ValueError(f"--updates is {plan.updates}; allowed: at least 3, for a speed")
        shutil.rmtree(out / "logs", ignore_errors=True)
        found = compare(out, plan, options.file)
    except (ValueError, CommandFailed) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ncompare: interrupted.", file=sys.stderr)
        return 130
    print("\n" + write(out, found, describe_run(command, time.monotonic() - started)))
    print(f"\nThe same as Markdown, JSON and a picture: {shown(out)}")
    return 1 if missing(found) else 0


if __name__ == "__main__":
    sys.exit(main())
