"""The tests of ``make quick`` and ``make quick-oldest``: files and folders, with patterns of test names."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: Every mechanism with its default options, causal and bidirectional; compiling and exporting them takes minutes.
CONTRACT = r"test_(?!.*(compile|export|graph)).*-(full|causal|full-image)\]$"
#: For the oldest torch: every mechanism forward, backward, compiled, exported and in compiled decoding steps.
TRANSFORMS = r"test_(it_compiles|it_exports|steps_of_decoding_compile)"

#: pytest option -> path -> regular expression for names of tests including their parameters.
SELECTIONS = {
    "--quick": {
        "tests/test_house_rules.py": "",
        "tests/common/test_imports.py": "",
        "tests/common/contract": CONTRACT,
        # A stored checkpoint of each family, then short trainings: gradients, an optimizer, a decreasing loss.
        "tests/fairseq_plugin/models/test_golden.py": r"test_a_golden_file_keeps_its_logits",
        "tests/fairseq_plugin/models/test_contract.py": r"test_it_learns_.*\[(combiner|daft_conv|flash|flowformer)_",
        "tests/timm_plugin/models/test_loading.py": r"test_a_stored_checkpoint_gives_its_logits",
        "tests/timm_plugin/models/test_conformance.py": r"test_backward_reaches_every_parameter",
        "tests/timm_plugin/models/test_training.py": r"test_digits_with_amp",
    },
    "--quick-oldest": {
        "tests/common/contract/test_transforms.py": TRANSFORMS,
        "tests/common/contract/test_copies.py": "",
        "tests/common/contract/test_growth.py": "",
        "tests/fairseq_plugin/models/test_golden.py": r"test_a_golden_file_keeps_its_logits",
        "tests/fairseq_plugin/models/test_contract.py": r"test_it_learns_.*\[flowformer_",
        "tests/timm_plugin/models/test_loading.py": r"test_a_stored_checkpoint_gives_its_logits",
        "tests/timm_plugin/models/test_training.py": r"test_digits_with_amp",
    },
}
HELP = {
    "--quick": "what one runs before each commit, in less than two minutes",
    "--quick-oldest": "what is run with the oldest versions after each run of the whole suite, in a few minutes",
}


class Selection:
    """The tests selected by one option in ``SELECTIONS``."""

    def __init__(self, option: str) -> None:
        self.option, self.places = option, SELECTIONS[option]

    def place_of(self, path: Path) -> str | None:
        """The selected path that a file or folder is in, or None."""
        return next((prefix for prefix in self.places if path.is_relative_to(ROOT / prefix)), None)

    def is_on_the_way(self, path: Path) -> bool:
        """Whether a file or folder is in a selected path, or contains one."""
        return self.place_of(path) is not None or any((ROOT / prefix).is_relative_to(path) for prefix in self.places)

    def has(self, path: Path, name: str) -> bool:
        """Whether the test ``name`` of the file ``path`` is selected."""
        selected = self.place_of(path)
        return selected is not None and re.match(self.places[selected], name) is not None
