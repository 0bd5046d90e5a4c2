"""Train the paper's models on any text, and show perplexity, its cost and seconds per step at several lengths.

``python -m recipes.flash.compare --file any.txt`` from the checkout's root, through fairseq-train, with equal numbers
of parameters, updates and tokens per update; ``--figure 5`` compares what the paper's Figure 5 does, and draws it so.
"""

import argparse
import json
import shlex
import sys
import time
from pathlib import Path

from common.command_parser import CommandParser

from ..shared import fairseq_log
from ..shared.commands import CommandFailed, python_command, run
from ..shared.comparison import NO_READER, show
from ..shared.fairseq_training import last_validation, train
from ..shared.scripts import command_line, positive_int, script
from ..shared.trainings import failure
from ..shared.working_folder import working_folder
from .measurements import Case, Comparison, Measurement, Plan, missing
from .models import ALL_MODELS, DEFAULT_MODELS, FIGURES, MASKED_MODELS, MODELS, SHAPE, Shape, masked_name
from .prepare import WRITER, Settings, cut_trial, to_data_bin
from .report import report

COMMAND = "recipes.flash.compare"
LENGTHS = [512, 1024, 2048, 4096]
UPDATES = 150
#: To see that everything runs; nothing is learned.
QUICK_LENGTHS, QUICK_UPDATES = [512, 1024], 10
TOKENS_PER_UPDATE = 4096
VOCABULARY = 2000
#: Log lines of a training: enough for a median without the first one, too few to cost time.
_LOG_POINTS = 20
#: Evaluations during a training, for the curve of perplexity, as far as there are updates enough between them.
EVALUATIONS, _LEAST_UPDATES = 10, 10


def train_command(data: Path, out: Path, plan: Plan, case: Case, inner_width: int | None) -> list[str]:
    """fairseq-train with the paper's optimiser, a learning rate for few updates, and evaluations on the way."""
    name, length, seed = case
    task = "masked_lm" if plan.masked else "language_modeling"
    return python_command(
        *("-m", "fairseq_cli.train", data, "--user-dir", "fairseq_plugin", "--task", task),
        *(("--criterion", "masked_lm") if plan.masked else ()),
        *plan.shape.arguments(name, inner_width),
        *("--tokens-per-sample", length, "--sample-break-mode", "none", "--max-tokens", plan.tokens_per_update),
        *NO_READER,
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.999)", "--adam-eps", "1e-06", "--weight-decay", "0.01"),
        *("--clip-norm", "0.1" if ALL_MODELS[name].clipped else "0"),
        *("--lr", "0.003", "--lr-scheduler", "polynomial_decay", "--end-learning-rate", "0"),
        *("--warmup-updates", max(1, plan.updates // 10), "--total-num-update", plan.updates),
        *("--max-update", plan.updates, "--validate-interval", 1_000_000),
        *("--validate-interval-updates", max(_LEAST_UPDATES, plan.updates // EVALUATIONS)),
        *("--no-save", "--save-dir", out / "checkpoints", "--seed", seed),
        *("--log-format", "json", "--log-interval", max(1, plan.updates // _LOG_POINTS // 2)),
    )


def measure(data: Path, out: Path, plan: Plan, case: Case, inner_width: int | None) -> Measurement:
    """Train one model at one length with one seed.

    Raises:
        CommandFailed: fairseq-train failed.
        ValueError: a measurement is missing in its log.
    """
    architecture, length, seed = case
    command = train_command(data, out, plan, case, inner_width)
    log = out / "logs" / f"{architecture}.{length}.{seed}.log"
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
        seed,
        tuple((point.update, point.values["ppl"]) for point in points if point.split == "valid"),
    )


def equal_widths(out: Path, plan: Plan) -> dict[str, int]:
    """Model -> the inner width that gives it as many parameters as the others; without those of a size of their own.

    Raises:
        CommandFailed: no inner width does.
    """
    names = [name for name in plan.architectures if ALL_MODELS[name].shape is None]
    if not names:
        return {}
    # A process of its own, like every training, so that this one does not hold torch's memory.
    log = out / "logs" / "widths.log"
    command = python_command("-m", "recipes.flash.widths", out / "data-bin", "--length", plan.lengths[0])
    size = [word for name, value in plan.shape._asdict().items() for word in (f"--{name}", str(value))]
    run([*command, *size, "--archs", *names], log)
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
    if widths:
        print("  inner widths for equal parameters: " + ", ".join(f"{name} {width}" for name, width in widths.items()))
    comparison = Comparison(plan, counts, [], {})
    try:
        for case in missing(comparison):
            try:
                one = measure(out / "data-bin", out, plan, case, widths.get(case[0]))
            except (CommandFailed, ValueError) as error:
                print(f"  {error}", file=sys.stderr, flush=True)
                comparison.failed[case] = failure(error)
                continue
            comparison.measured.append(one)
            print(
                f"  {one.architecture} at {one.length:,}: perplexity {one.perplexity:.2f},"
                f" {plan.tokens_per_update / one.tokens_per_second:.3f} s per step, {one.parameters:,} parameters",
                flush=True,
            )
    except KeyboardInterrupt:
        print("\nInterrupted. The measurements so far follow.", file=sys.stderr)
    return comparison


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.flash.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, required=True, help="any text in UTF-8, from about 1 MB on")
    parser.add_argument("--out", type=Path, default=Path("work/flash/compare"), help="default: %(default)s")
    parser.add_argument(
        "--figure", type=int, choices=FIGURES, help="of the paper: its models and lengths, drawn as there"
    )
    parser.add_argument("--masked", action="store_true", help="masked language models, as in Figure 5")
    parser.add_argument("--lengths", type=numbers, help=f"default: {','.join(map(str, LENGTHS))}, or the figure's")
    parser.add_argument("--archs", type=architectures, help=f"of {', '.join(MODELS)}; or _mlm for _lm")
    parser.add_argument("--updates", type=positive_int, help=f"of every model; default: {UPDATES}")
    parser.add_argument("--seeds", type=positive_int, default=1, help="trainings of each model (%(default)s)")
    parser.add_argument(
        "--tokens-per-update",
        type=positive_int,
        help=f"default: {TOKENS_PER_UPDATE}, or the longest of --lengths if that is more",
    )
    for name, value in SHAPE._asdict().items():
        parser.add_argument(f"--{name}", type=positive_int, default=value, help="of every model (%(default)s)")
    parser.add_argument("--vocabulary", type=positive_int, default=VOCABULARY, help="subwords (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="only see that everything runs: nothing is learned")
    return parser


def numbers(text: str) -> list[int]:
    """Comma-separated lengths, none twice."""
    return sorted({positive_int(item) for item in text.split(",")})


def architectures(text: str) -> list[str]:
    """Comma-separated models, none twice; all causal or all masked."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in ALL_MODELS:
            raise argparse.ArgumentTypeError(f"{name}; allowed: {', '.join(ALL_MODELS)}")
    if len({ALL_MODELS[name].masked for name in names}) > 1:
        raise argparse.ArgumentTypeError(f"{text}; allowed: causal models alone, or masked ones (_mlm) alone")
    return names


def chosen_models(options: argparse.Namespace) -> list[str]:
    """The models that ``--archs``, or ``--figure`` and ``--masked``, name.

    Raises:
        ValueError: options that contradict each other.
    """
    if options.archs is not None:
        if options.figure is not None:
            raise ValueError(f"--archs is given; allowed: without --figure, which is {options.figure}")
        if options.masked and options.archs[0] in MODELS:
            raise ValueError(f"--archs has {options.archs[0]}; allowed with --masked: {', '.join(MASKED_MODELS)}")
        return list(options.archs)
    figure = FIGURES.get(options.figure)
    if options.masked and figure is not None and figure.masked is False:
        raise ValueError(f"--masked is given; allowed with --figure {options.figure}: not given")
    names = DEFAULT_MODELS if figure is None else figure.models
    masked = options.masked or (figure is not None and figure.masked)
    return [masked_name(name) if masked else name for name in names]


def chosen_plan(options: argparse.Namespace) -> Plan:
    """The plan of a command line.

    Raises:
        ValueError: options that contradict each other, or a value that is not allowed.
    """
    figure = FIGURES.get(options.figure)
    usual = QUICK_LENGTHS if options.quick else LENGTHS if figure is None else figure.lengths
    lengths = options.lengths or usual
    tokens = options.tokens_per_update or max(TOKENS_PER_UPDATE, lengths[-1])
    updates = options.updates or (QUICK_UPDATES if options.quick else UPDATES)
    shape = Shape(options.width, options.layers, options.heads)
    plan = Plan(
        chosen_models(options), lengths, updates, tokens, options.vocabulary, options.seeds, shape, options.figure
    )
    if lengths[-1] > tokens:
        raise ValueError(f"--lengths has {lengths[-1]}; allowed: at most --tokens-per-update, {tokens}")
    if plan.updates < 3:
        raise ValueError(f"--updates is {plan.updates}; allowed: at least 3, for a speed")
    if shape.width % (2 * shape.heads) or shape.width % 4:
        raise ValueError(f"--width is {shape.width}; allowed: a multiple of 4, and of twice --heads, {shape.heads}")
    return plan


@script("compare")
def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    plan = chosen_plan(options)
    out = options.out.absolute()
    started = time.monotonic()
    command = command_line(COMMAND, arguments)
    if not options.file.is_file():
        raise ValueError(f"--file is {options.file}, which is no file; allowed: a text file")
    with working_folder(out, COMMAND, whole={"data-bin": WRITER}):
        comparison = compare(out, plan, options.file)
        show(out, report(comparison), command, started)
    return 1 if missing(comparison) else 0


if __name__ == "__main__":
    sys.exit(main())
