"""The lists and tables of mechanisms in Markdown files match the mechanisms' declarations."""

import pytest

from common import mechanisms


@pytest.mark.parametrize("path", mechanisms.readmes(), ids=lambda path: str(path.relative_to(mechanisms.ROOT)))
def test_the_tables_of_a_readme_are_those_of_the_declarations(path):
    """If this fails, run make tables."""
    assert mechanisms.rewritten_readme(path) == path.read_text(encoding="utf-8")


def test_the_readme_of_each_package_shows_mechanisms():
    assert {path.parent.name for path in mechanisms.readmes()} == {"common", "fairseq_plugin", "timm_plugin"}
