"""Train models of CTC on 5 seconds of speech with several attentions; print their errors, time and memory by length.

``python -m recipes.speech.compare --seeds 3`` from the checkout's root, through fairseq-train. Another run continues
where the last one stopped.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib import pyplot as plt

from ..shared.comparison import MODEL, SEEDS, Column, Results, by_length, of_model, table
from ..shared.experiment import MINUTES, PARAMETERS, Data, Experiment, Record
from ..shared.plots import STYLE, lines_by_length, save
from ..shared.tables import MISSING, Table, spread
from . import prepare
from .trainings import STAGES, STOCK, Speech, Trainings

#: Character errors in per cent that an exchange of attentions must cost before shares of them are shown.
LEAST = 1.0


def make_data(options: Speech) -> Data:
    """The speech; the facts are the size of each part, and of the recordings to pretrain on.

    Raises:
        ValueError: the teacher of a transfer is not trained; see also ``prepare.prepare``.
    """
    if options.transfer and STOCK not in options.models:
        raise ValueError(
            f"--models lacks {STOCK}, the teacher of --transfer; allowed: with it, or --transfer without names"
        )
    manifest = prepare.prepare(options.out, options.data)
    facts = {"parts": manifest["parts"], "recordings": manifest.get("recordings")}
    return Data(options.out / "data", facts)


def cer(length: int) -> Callable[[Sequence[Record]], str]:
    """A cell: mean and deviation over seeds of the character errors at ``length``."""

    def cell(records: Sequence[Record]) -> str:
        return spread([x["cer"] for record in records for x in record["read"] if x["length"] == length], 1)

    return cell


def columns(options: Speech, facts: Record) -> list[Column]:
    """The size of a model, and its character errors by length."""
    lengths = [Column(f"{length} s", cer(length)) for length in options.lengths]
    return [MODEL, PARAMETERS, *lengths, SEEDS, MINUTES]


def notes(options: Speech, facts: Record) -> list[str]:
    """Notes below the table."""
    parts = ", ".join(
        f"{x}: {about['recordings']} of {about['seconds'] / 60:.1f} min" for x, about in facts["parts"].items()
    )
    source = "commands" if options.file is None else Path(options.file).name
    pretrained = "the speech to train on" if facts["recordings"] is None else "--recordings"
    return [
        f"character errors in per cent, spaces included, of the most probable symbol of each frame; mean ± standard "
        f"deviation over seeds; {source} spoken by espeak-ng, voices: {', '.join(options.voices)}",
        f"recordings, {parts}",
        f"{options.updates:,} updates of at most {options.batch_seconds} s, highest learning rate {options.lr:g}, "
        f"{options.layers} layers of width {options.width}, {options.heads} heads; the checkpoint with the fewest "
        f"errors on valid; all models of a seed begin with one wav2vec 2.0, {options.pretraining_updates} updates on "
        f"{pretrained}",
        f"{STOCK} is fairseq's own; minutes: one thread of this machine, with whatever else it did",
    ]


def measured_by_length(name: str, digits: int, scale: float = 1.0) -> Callable[[list[Record]], str]:
    """A cell: the median over seeds of ``name`` in what models read."""

    def cell(outcomes: list[Record]) -> str:
        values = [scale * x[name] for x in outcomes if x[name] is not None]
        return f"{statistics.median(values):,.{digits}f}" if values else MISSING

    return cell


def flat(records: Sequence[Record]) -> list[Record]:
    """The results at each length, each with its model."""
    return [{"model": record["model"], **x} for record in records for x in record.get("read", ())]


def extra_tables(options: Speech, facts: Record, records: list[Record]) -> list[Table]:
    """Time and memory by length, and what transfer recovers."""
    by_length_of = Results(flat(records), {})
    time = "the forward pass of one recording, of the processor on one thread; median over seeds"
    memory = "of a recording, beyond the model and its input: what torch allocates; seed 1"
    tables = [
        table(title, [MODEL, *by_length(options.lengths, cell)], options.models, by_length_of, [note])
        for title, cell, note in (
            (
                "Milliseconds for a second of audio, by seconds of the recording",
                measured_by_length("milliseconds", 1),
                time,
            ),
            ("Peak memory in MiB, by seconds of the recording", measured_by_length("peak_bytes", 0, 2**-20), memory),
        )
    ]
    return [*tables, transfer_table(options, records)] if transfers(records) else tables


def transfers(records: Sequence[Record]) -> list[str]:
    """The models in the records of transfers."""
    return list(dict.fromkeys(record["model"] for record in records if "cer" in record))


def transfer_table(options: Speech, records: list[Record]) -> Table:
    """Character errors of the stock model with another attention, by stage, and the share that is recovered."""
    shortest = min(options.lengths)
    teachers = {
        x["seed"]: next(y["cer"] for y in x["read"] if y["length"] == shortest) for x in of_model(records, STOCK)
    }

    def errors(stage: str) -> Callable[[Sequence[Record]], str]:
        return lambda outcomes: spread([x["cer"][stage] for x in outcomes], 1)

    def recovered(stage: str) -> Callable[[Sequence[Record]], str]:
        def cell(outcomes: Sequence[Record]) -> str:
            pairs = [(x["cer"], teachers[x["seed"]]) for x in outcomes if x["seed"] in teachers]
            ahead = [(x, teacher) for x, teacher in pairs if x["exchanged"] - teacher >= LEAST]
            return spread([100 * (x["exchanged"] - x[stage]) / (x["exchanged"] - teacher) for x, teacher in ahead], 1)

        return cell

    made = [Column(title, errors(stage)) for stage, title in STAGES.items()]
    shares = [Column(f"recovered {title}, %", recovered(x)) for x, title in STAGES.items() if x != "exchanged"]
    notes = [
        f"character errors in per cent at {shortest} s; exchanged: the trained {STOCK} with another attention, before "
        f"any update; then attention transfer of {options.transfer_updates} updates, and as many of CTC with a "
        f"learning rate of {options.tuning_lr:g}",
        f"recovered: (exchanged - after) / (exchanged - {STOCK}), where the exchange costs at least {LEAST:g} per cent",
    ]
    return table(
        "From the trained softmax model",
        [MODEL, *made, *shares, SEEDS],
        transfers(records),
        Results(records, {}),
        notes,
    )


def draw(options: Speech, facts: Record, records: Sequence[Record], path: Path) -> None:
    """Draw character errors and time by length, means over seeds."""
    labels = {"cer": "character errors, %", "milliseconds": "ms for a second of audio, one thread"}
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 2, figsize=(13, 4.4), layout="constrained")
        for axes, (name, label) in zip(panels, labels.items()):
            points = {}
            for model in options.models:
                values: dict[int, list[float]] = {}
                for read in of_model(flat(records), model):
                    values.setdefault(read["length"], []).append(read[name])
                points[model] = [(length, statistics.mean(of_length)) for length, of_length in values.items()]
            lines_by_length(axes, points)
            axes.set(xlabel="seconds of the recording", ylabel=label)
        panels[0].set(yscale="linear", ylim=(0.0, None), title=f"Trained on {options.seconds} seconds")
        save(figure, path, dpi=130)


EXPERIMENT = Experiment(
    command="recipes.speech.compare",
    about=__doc__.splitlines()[0],
    options=Speech,
    title="Character errors by seconds of the recording",
    columns=columns,
    notes=notes,
    prepare=make_data,
    train=lambda options, data: Trainings(options, data).run(),
    extra_tables=extra_tables,
    picture=draw,
    lacking="failed",
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
