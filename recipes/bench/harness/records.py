"""The results of one run of the benchmark, and results.json."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from common.files.json_files import CHECKSUM, signed, typed

from ...shared.json_files import read_json
from ...shared.working_folder import write_text
from .noise import ALLOWED_SPREAD, spread
from .timing import quartiles, ratio

TIMED = "timed"
#: Unequal to its reference; ended with an error; not possible here (a package, a device, memory), which is no fault.
UNEQUAL, FAILED, NOT_RUN = "unequal", "failed", "not run"


class Record(NamedTuple):
    """One run of one candidate at one size, or the reason why there is none."""

    case: str
    size: int
    run: str  # "" where nothing was run
    form: str  # the name of the candidate
    status: str
    reason: str = ""
    seconds: tuple[float, ...] = ()  # of one call, by round; round i is the same for all candidates of a case and size
    units: float = 0.0  # tokens or images of one call
    extra_bytes: int | None = None  # peak memory beyond inputs, outputs and gradients; None: not measured
    input_bytes: int = 0  # of q, k and v, or of a decoding state
    load: float | None = None  # share of all cores that other programs used just before; None: not noted
    attempts: int = 1  # how often the rounds were measured; the quietest attempt is kept

    @property
    def median(self) -> float:
        """Seconds of one call."""
        return quartiles(self.seconds)[1]

    @property
    def per_second(self) -> float:
        """Tokens or images per second."""
        return self.units / self.median

    @property
    def noisy(self) -> bool:
        """Whether the times are further apart than ``ALLOWED_SPREAD``, probably by other work on the machine."""
        return self.status == TIMED and spread(self.seconds) > ALLOWED_SPREAD


class Machine(NamedTuple):
    """The machine, the versions and the date of a run of the benchmark."""

    command: str
    date: str
    commit: str
    processor: str
    cores: int
    threads: int
    memory_gib: float
    load: float  # load average of the minute before; other programs make times longer
    python: str
    versions: str
    device: str
    dtype: str
    minutes: float = 0.0


class Results(NamedTuple):
    """Everything that has been measured so far."""

    machine: Machine
    records: list[Record]
    complete: tuple[tuple[str, int], ...] = ()  # the cases and sizes that were measured to their end

    def find(self, case: str, size: int, run: str, form: str) -> Record | None:
        """The record of a measurement, None if there is none."""
        key = (case, size, run, form)
        return next(
            (record for record in self.timed() if (record.case, record.size, record.run, record.form) == key), None
        )

    def ratio(self, case: str, size: int, run: str, form: str, peer: str, peer_size: int | None = None) -> float | None:
        """How many times as long ``peer`` takes, at ``peer_size`` if given; None if one of them was not timed."""
        record, peer_record = self.find(case, size, run, form), self.find(case, peer_size or size, run, peer)
        return None if record is None or peer_record is None else ratio(record.seconds, peer_record.seconds)

    def faults(self) -> list[Record]:
        """The records of candidates that differed from their reference or ended with an error."""
        return [record for record in self.records if record.status in (UNEQUAL, FAILED)]

    def timed(self) -> list[Record]:
        """The records with times."""
        return [record for record in self.records if record.status == TIMED]

    def sizes(self, case: str, run: str, form: str) -> list[int]:
        """The sizes at which a candidate was timed, in order."""
        return sorted(
            record.size for record in self.timed() if (record.case, record.run, record.form) == (case, run, form)
        )


def save(results: Results, path: Path) -> None:
    """Write ``results`` as JSON, a line for each record."""
    content = {"machine": results.machine._asdict(), "records": [_as_json(record) for record in results.records]}
    checksum = json.dumps(signed({**content, "complete": results.complete})[CHECKSUM])
    lines = json.dumps(content["machine"], indent=1, ensure_ascii=False)
    records = ",\n".join(" " + json.dumps(record, ensure_ascii=False) for record in content["records"])
    metadata = f'"complete": {json.dumps(results.complete)},\n"{CHECKSUM}": {checksum}'
    write_text(path, f'{{"machine": {lines},\n{metadata},\n"records": [\n{records}\n]}}\n')


def _as_json(record: Record) -> dict:
    """A record with times of five digits, and whether they are noisy."""
    record = record._replace(seconds=tuple(float(f"{seconds:.5g}") for seconds in record.seconds))
    return {**record._asdict(), "noisy": record.noisy}


def _from_json(content: Any, where: str) -> Record:
    """The record that ``_as_json`` wrote; earlier versions noted neither the load nor the attempts."""
    fields = typed(content, dict[str, Any], where)
    return typed(
        {name: value for name, value in fields.items() if name != "noisy"}, Record, where
    )  # computed from the times


def load(path: Path) -> Results:
    """Read the results that ``save`` wrote.

    Raises:
        ValueError: the file is not one that ``save`` wrote.
    """
    allowed = "a file of results that recipes.bench wrote"
    content = read_json(path, allowed, machine=Machine, records=list)
    try:
        records = [_from_json(record, f"records[{number}]") for number, record in enumerate(content["records"])]
        complete = typed(
            content.get("complete", []), tuple[tuple[str, int], ...], "complete"
        )  # not in earlier versions
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; allowed: {allowed}") from error
    return Results(content["machine"], records, complete)
