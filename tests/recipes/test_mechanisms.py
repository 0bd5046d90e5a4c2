"""The lists and tables of mechanisms in Markdown files match the mechanisms' declarations."""

import pytest

from recipes import mechanisms


@pytest.mark.parametrize("path", mechanisms.readmes(), ids=lambda path: str(path.relative_to(mechanisms.ROOT)))
def test_the_tables_of_a_readme_are_those_of_the_declarations(path):
    """If this fails, run make tables."""
    assert mechanisms.rewritten_readme(path) == path.read_text(encoding="utf-8")


def test_a_fact_or_a_table_that_is_not_there_is_refused(tmp_path):
    path = tmp_path / "README.md"
    for words in ("names forgets", "prices"):
        path.write_text(f"<!-- mechanisms: {words} -->old<!-- end of mechanisms -->")
        with pytest.raises(ValueError, match=f"{words.split()[-1]}; allowed"):
            mechanisms.rewritten_readme(path)
