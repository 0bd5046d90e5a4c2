"""The lists and tables of mechanisms in Markdown files match the mechanisms' declarations."""

import pytest

from recipes import mechanisms


@pytest.mark.parametrize("path", mechanisms.readmes(), ids=lambda path: str(path.relative_to(mechanisms.ROOT)))
def test_the_tables_of_a_readme_are_those_of_the_declarations(path):
    """If this fails, run make tables."""
    assert mechanisms.rewritten_readme(path) == path.read_text(encoding="utf-8")


def test_parts_are_made_again_and_the_rest_stays(tmp_path):
    """Parts of several lines too; every README with such parts is compared above."""
    assert {path.parent.name for path in mechanisms.readmes()} >= {"common", "fairseq_plugin", "timm_plugin"}
    path = tmp_path / "README.md"
    path.write_text("Before <!-- mechanisms: names forget -->\nold\nnames\n<!-- end of mechanisms --> after\n")
    made = mechanisms.rewritten_readme(path)
    assert made.startswith("Before <!-- mechanisms: names forget -->`") and "old" not in made and "`linear`" in made
    assert made.endswith("`<!-- end of mechanisms --> after\n")


def test_a_fact_or_a_table_that_is_not_there_is_refused(tmp_path):
    path = tmp_path / "README.md"
    for words in ("names forgets", "prices"):
        path.write_text(f"<!-- mechanisms: {words} -->old<!-- end of mechanisms -->")
        with pytest.raises(ValueError, match=f"{words.split()[-1]}; allowed"):
            mechanisms.rewritten_readme(path)
