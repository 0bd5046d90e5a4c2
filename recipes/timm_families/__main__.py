"""``python -m recipes.timm_families``: try all of timm's models, and write ``timm_plugin/FAMILIES.md``.

About 40 minutes on one of two busy cores (2026-11-22). An interrupted run continues where it stopped; remove the file
of ``--records`` to start over.
"""

import logging
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from tqdm import tqdm

from common.command_parser import CommandParser
from recipes.shared.scripts import script
from recipes.shared.tables import check_document, describe_run, write_document

from .records import add_record, read_records
from .survey import Found, check_same_output, survey, timm_models
from .table import PATH, as_document

COMMAND = "recipes.timm_families"


@script("timm_families")
def main(arguments: list[str] | None = None) -> int:
    """Survey the models without a record, check one model of each kind, and write the table; returns 0."""
    parser = CommandParser(prog="python -m recipes.timm_families", description=__doc__.split("\n")[0])
    parser.add_argument("--records", type=Path, default=Path("work/timm_families.jsonl"), help="what is found so far")
    parser.add_argument("--output", type=Path, default=PATH, help="the table")
    options = parser.parse_args(arguments)
    check_document(options.output, COMMAND, "--output")
    logging.getLogger("timm_plugin").setLevel(logging.ERROR)  # the table has the reasons that it warns of
    torch.set_num_threads(1)
    start = time.monotonic()
    models, records = timm_models(), read_records(options.records)
    resumed = bool(records)
    for name in tqdm([name for name in models if name not in records], desc="models", unit=" models", disable=None):
        records[name] = survey(name, models[name])
        add_record(options.records, records[name])
    all_records = [records[name] for name in models]
    for name in tqdm(representatives(all_records), desc="whole models", unit=" models", disable=None):
        check_same_output(name)
    run = describe_run(f"python -m {COMMAND}", time.monotonic() - start)
    write_document(options.output, as_document(all_records, run, resumed), COMMAND, "--output")
    print(options.output)
    return 0


def representatives(records: Iterable[Found]) -> list[str]:
    """The smallest model for each pair of family and replaced class of attention."""
    smallest: dict[tuple[str, str], Found] = {}
    for record in sorted(records, key=lambda record: record.parameters):
        for kind in record.replaced:
            smallest.setdefault((record.family, kind), record)
    return sorted({record.model for record in smallest.values()})


if __name__ == "__main__":
    sys.exit(main())
