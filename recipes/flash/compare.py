"""Train the paper's models on any text, on a CPU, and print perplexity and seconds per step at several lengths.

``python -m recipes.flash.compare --file any.txt`` from the checkout's root, through fairseq-train, with equal numbers
of parameters, updates and tokens per update.
"""

import argparse
import json
import shlex
import sys
import time
from pathlib import Path

from ..shared import fairseq_log
from ..shared.commands import CommandFailed, python_command, run
from ..shared.comparison import NO_READER, show
from ..shared.fairseq_training import last_validation, train
from ..shared.scripts import command_line, positive_int, script
from ..shared.trainings import failure
from ..shared.working_folder import working_folder
from .measurements import Comparison, Measurement, Plan, missing, report
from .models import DEFAULT_MODELS, MODELS, SHAPE
from .prepare import WRITER, Settings, cut_trial, to_data_bin

COMMAND = "recipes.flash.compare"
LENGTHS = [512, 1024, 2048, 4096]
UPDATES = 150
#: To see that everything runs; nothing is learned.
QUICK_LENGTHS, QUICK_UPDATES = [512, 1024], 10
TOKENS_PER_UPDATE = 4096
VOCABULARY = 2000
#: Log lines of a training: enough for a median without the first one, too few to cost time.
_LOG_POINTS = 20


def train_command(data: Path, out: Path, plan: Plan, architecture: str, length: int, inner_width: int) -> list[str]:
    """fairseq-train with the paper's optimiser, a learning rate for few updates, and one validation, at the end."""
    return python_command(
        *("-m", "fairseq_cli.train", data, "--user-dir", "fairseq_plugin", "--task", "language_modeling"),
        *SHAPE.arguments(architecture, inner_width),
        *("--tokens-per-sample", length, "--sample-break-mode", "none", "--max-tokens", plan.tokens_per_update),
        *NO_READER,
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.999)", "--adam-eps", "1e-06", "--weight-decay", "0.01"),
        *("--clip-norm", "0.1", "--lr", "0.003", "--lr-scheduler", "polynomial_decay", "--end-learning-rate", "0"),
        *("--warmup-updates", max(1, plan.updates // 10), "--total-num-update", plan.updates),
        *("--max-update", plan.updates, "--validate-interval", 1_000_000),
        *("--no-save", "--save-dir", out / "checkpoints", "--seed", 1),
        *("--log-format", "json", "--log-interval", max(1, plan.updates // _LOG_POINTS)),
    )


def measure(data: Path, out: Path, plan: Plan, architecture: str, length: int, inner_width: int) -> Measurement:
    """Train one model at one length.

    Raises:
        CommandFailed: fairseq-train failed.
        ValueError: a measurement is missing in its log.
    """
    command = train_command(data, out, plan, architecture, length, inner_width)
    log = out / "logs" / f"{architecture}.{length}.log"
    finished, lines = train(command, log, plan.updates, f"{architecture}, {length}")
    points = fairseq_log.parse_training(lines)
    perplexity = last_validation(points, log, plan.updates).values["ppl"]
    return Measurement(
        architecture,
        length,
        fairseq_log.parse_parameters(lines),
        perplexity,
        fairseq_log.median_tokens_per_second(points),
        finished.peak_bytes,
        finished.seconds,
        shlex.join(command),
    )


def equal_widths(out: Path, plan: Plan) -> dict[str, int]:
    """Architecture -> the inner width that gives it as many parameters as the others.

    Raises:
        CommandFailed: no inner width does.
    """
    # A process of its own, like every training, so that this one does not hold torch's memory.
    log = out / "logs" / "widths.log"
    command = python_command("-m", "recipes.flash.widths", out / "data-bin", "--length", plan.lengths[0])
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
    comparison = Comparison(plan, counts, [], {})
    try:
        for architecture, length in missing(comparison):
            try:
                one = measure(out / "data-bin", out, plan, architecture, length, widths[architecture])
            except (CommandFailed, ValueError) as error:
                print(f"  {error}", file=sys.stderr, flush=True)
                comparison.failed[architecture, length] = failure(error)
                continue
            comparison.measured.append(one)
            print(
                f"  {architecture} at {length:,}: perplexity {one.perplexity:.2f},"
                f" {plan.tokens_per_update / one.tokens_per_second:.3f} s per step, {one.parameters:,} parameters",
                flush=True,
            )
    except KeyboardInterrupt:
        print("\nInterrupted. The measurements so far follow.", file=sys.stderr)
    return comparison


def parser() -> argparse.ArgumentParser:
    """The script's options."""
    parser = argparse.ArgumentParser(prog="python -m recipes.flash.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, required=True, help="any text in UTF-8, from about 1 MB on")
    parser.add_argument("--out", type=Path, default=Path("work/flash/compare"), help="default: %(default)s")
    parser.add_argument("--lengths", type=numbers, help=f"default: {','.join(map(str, LENGTHS))}")
    parser.add_argument("--archs", type=architectures, default=DEFAULT_MODELS, help=f"of {', '.join(MODELS)}")
    parser.add_argument("--updates", type=positive_int, help=f"of every model; default: {UPDATES}")
    parser.add_argument("--vocabulary", type=positive_int, default=VOCABULARY, help="subwords (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="only see that everything runs: nothing is learned")
    return parser


def numbers(text: str) -> list[int]:
    """Comma-separated lengths, none twice."""
    lengths = sorted({positive_int(item) for item in text.split(",")})
    if lengths[-1] > TOKENS_PER_UPDATE:
        raise argparse.ArgumentTypeError(f"{lengths[-1]}; allowed: at most the {TOKENS_PER_UPDATE} tokens of an update")
    return lengths


def architectures(text: str) -> list[str]:
    """Comma-separated architectures, none twice."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in MODELS:
            raise argparse.ArgumentTypeError(f"{name}; allowed: {', '.join(MODELS)}")
    return names


@script("compare")
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
    command = command_line(COMMAND, arguments)
    if not options.file.is_file():
        raise ValueError(f"--file is {options.file}, which does not exist; allowed: a text file")
    if plan.updates < 3:
        raise ValueError(f"--updates is {plan.updates}; allowed: at least 3, for a speed")
    with working_folder(out, COMMAND, whole={"data-bin": WRITER}):
        comparison = compare(out, plan, options.file)
        show(out, report(comparison), command, started)
    return 1 if missing(comparison) else 0


if __name__ == "__main__":
    sys.exit(main())
