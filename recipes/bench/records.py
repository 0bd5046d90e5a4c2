"""What one run of the benchmark found, and as a file of JSON and back."""

import json
from pathlib import Path
from typing import NamedTuple

from .timing import quartiles, ratio

TIMED = "timed"
#: Unequal to its reference; ended with an error; not possible here (a package, a device, memory), which is no fault.
UNEQUAL, FAILED, NOT_RUN = "unequal", "failed", "not run"


class Record(NamedTuple):
    """One thing that was run of one form at one size, or why nothing was."""

    case: str
    size: int
    run: str  # "" where nothing was run
    form: str
    status: str
    reason: str = ""
    seconds: tuple[float, ...] = ()  # of one call, by round: the rounds of all forms of a case and size match
    units: float = 0.0  # tokens or images of one call
    extra_bytes: int | None = None  # peak memory beyond inputs, outputs and gradients; None: not measured
    input_bytes: int = 0  # of q, k and v

    @property
    def median(self) -> float:
        """Seconds of one call."""
        return quartiles(self.seconds)[1]

    @property
    def per_second(self) -> float:
        """Tokens or images per second."""
        return self.units / self.median


class Machine(NamedTuple):
    """Where, with what and when the benchmark ran."""

    command: str
    date: str
    commit: str
    processor: str
    cores: int
    threads: int
    memory_gib: float
    load: float  # processes that wanted a core in the minute before; those of others make times longer
    python: str
    versions: str
    device: str
    dtype: str
    minutes: float = 0.0


class Results(NamedTuple):
    """Everything that is known at some moment."""

    machine: Machine
    records: list[Record]

    def find(self, case: str, size: int, run: str, form: str) -> Record | None:
        """The record of a measurement, None if there is none."""
        wanted = (case, size, run, form)
        return next((one for one in self.timed() if (one.case, one.size, one.run, one.form) == wanted), None)

    def ratio(self, case: str, size: int, run: str, form: str, peer: str) -> float | None:
        """How many times as long ``peer`` takes, None where one of them was not timed."""
        ours, theirs = self.find(case, size, run, form), self.find(case, size, run, peer)
        return None if ours is None or theirs is None else ratio(ours.seconds, theirs.seconds)

    def faults(self) -> list[Record]:
        """What differed from its reference or ended with an error."""
        return [one for one in self.records if one.status in (UNEQUAL, FAILED)]

    def timed(self) -> list[Record]:
        """The records with times."""
        return [one for one in self.records if one.status == TIMED]

    def sizes(self, case: str, run: str, form: str) -> list[int]:
        """The sizes at which something was timed, in order."""
        return sorted(one.size for one in self.timed() if (one.case, one.run, one.form) == (case, run, form))


def save(results: Results, path: Path) -> None:
    """Write ``results`` as JSON."""
    content = {"machine": results.machine._asdict(), "records": [_rounded(one) for one in results.records]}
    lines = json.dumps(content["machine"], indent=1, ensure_ascii=False)
    records = ",\n".join(" " + json.dumps(record, ensure_ascii=False) for record in content["records"])
    path.write_text(f'{{"machine": {lines},\n"records": [\n{records}\n]}}\n', encoding="utf-8")


def _rounded(record: Record) -> dict:
    """A record with as many digits as a clock has."""
    return record._replace(seconds=[float(f"{seconds:.5g}") for seconds in record.seconds])._asdict()


def load(path: Path) -> Results:
    """What ``save`` wrote.

    Raises:
        ValueError: the file is no such results.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        records = [Record(**{**record, "seconds": tuple(record["seconds"])}) for record in content["records"]]
        return Results(Machine(**content["machine"]), records)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a file of results ({error}); allowed: one that recipes.bench wrote") from error
