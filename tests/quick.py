"""The tests of ``make quick``, which is ``pytest --quick``: of some files and folders those whose names match."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: Every mechanism with its default options, causal and not; compiling and exporting them takes minutes.
CONTRACT = r"test_(?!.*(compile|export|graph)).*-(full|causal|full-image)\]$"
#: From a path to a regular expression for names of tests with their parameters.
QUICK = {
    "tests/test_house_rules.py": "",
    "tests/common/test_imports.py": "",
    "tests/common/contract": CONTRACT,
    # A stored checkpoint of each family, then a few trainings: gradients, an optimizer, a loss that falls.
    "tests/fairseq_plugin/models/test_golden.py": r"test_it_keeps_its_logits",
    "tests/fairseq_plugin/models/test_every_model.py": r"test_it_learns\[(combiner|daft_conv|flash|flowformer)_",
    "tests/timm_plugin/models/test_golden.py": r"test_loads_and_gives_the_logits",
    "tests/timm_plugin/models/test_conformance.py": r"test_backward_reaches_every_parameter",
    "tests/timm_plugin/models/test_training.py": r"test_digits_with_amp",
}


def place_of(path: Path) -> str | None:
    """The key of ``QUICK`` that a file or folder is in; None where there is none."""
    return next((place for place in QUICK if path.is_relative_to(ROOT / place)), None)


def is_on_the_way(path: Path) -> bool:
    """Whether a file or folder is in one of the places of ``QUICK``, or one of them is in it."""
    return place_of(path) is not None or any((ROOT / place).is_relative_to(path) for place in QUICK)


def is_quick(path: Path, name: str) -> bool:
    """Whether the test ``name`` of the file ``path`` is one of them."""
    place = place_of(path)
    return place is not None and re.match(QUICK[place], name) is not None
