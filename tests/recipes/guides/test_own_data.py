"""Every task has a command in a document, and the files that the pages on own data show exist in the layouts.

tests/test_readmes.py runs the commands on these files.
"""

import re
from pathlib import Path

import pytest
from fairseq.tasks import TASK_REGISTRY

import fairseq_plugin
from tests.processes import CHECKOUT
from tests.readmes import blocks, readmes
from tests.recipes.guides import layouts

ALL = {page: blocks(CHECKOUT / page) for page in layouts.PAGES}
#: Tasks of fairseq itself that models of the plugin train with.
OF_FAIRSEQ = {"language_modeling", "masked_lm", "sentence_prediction", "translation"}
#: Files that tests/test_readmes.py writes for every page.
FOR_EVERY_PAGE = {"train.txt", "valid.txt", "train.de", "train.en", "valid.de", "test.de"}


def test_every_task_has_a_command() -> None:
    own = {name for name, task in TASK_REGISTRY.items() if task.__module__.startswith(fairseq_plugin.__name__)}
    assert len(own) >= 8
    code = "\n".join(block.code for page in readmes() for block in blocks(page) if block.language == "shell")
    assert own | OF_FAIRSEQ <= set(re.findall(r"--task (\w+)", code))


@pytest.mark.parametrize("page", layouts.PAGES[1:])
def test_the_files_that_a_page_shows_are_there_for_its_commands(page: str, tmp_path: Path) -> None:
    layouts.write(tmp_path)
    shown = [line.split()[0] for block in ALL[page] if block.language == "text" for line in block.code.splitlines()]
    files = {name for name in shown if re.fullmatch(r"[\w./-]+\.\w+", name)}
    assert {name for name in files - FOR_EVERY_PAGE if not (tmp_path / name).is_file()} == set()
