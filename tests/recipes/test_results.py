"""Tables and pictures in the recipes' Markdown files match the stored records of comparisons."""

import functools
import json
import shutil
from pathlib import Path

import pytest

from recipes import results

RECIPES = Path(results.__file__).parent
README = "Before.\n\n<!-- results: speed -->\n\nold\n\n<!-- end of results -->\n\nAfter.\n"
HEAD = {"table": "speed", "columns": {"model": "model", "steps": "steps/s", "note": "note"}, "align": {"note": "right"}}
ROWS = [
    {"table": "speed", "model": "flow", "steps": 1234.5},
    {"table": "speed", "model": "softmax", "steps": [1.0, 2.0], "note": "of two"},
]
TABLE = """\
| model | steps/s | note |
| --- | ---: | ---: |
| flow | 1,234.5 |  |
| softmax | 1.50 ± 0.71 | of two |
"""


@pytest.fixture
def area(tmp_path: Path) -> Path:
    """An area's folder with one table."""
    (tmp_path / "area").mkdir()
    (tmp_path / "area" / "README.md").write_text(README, encoding="utf-8")
    write(tmp_path / "area", [HEAD, *ROWS])
    return tmp_path / "area"


def write(folder: Path, lines: list[dict]) -> None:
    """Write the records of an area."""
    (folder / results.RECORDS).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_nothing_differs_from_the_records():
    """If this fails, ``python -m recipes.results`` regenerates the files."""
    assert len(list(results.documents())) > 4 and len(list(results.pictures())) > 0
    assert not results.changed(write=False)


def test_every_table_of_records_is_shown_once():
    for folder in {path.parent for path in results.documents()}:
        lines = [line for path in folder.glob("*.md") for line in path.read_text(encoding="utf-8").splitlines()]
        for name in results.read_tables(folder):
            assert lines.count(f"<!-- results: {name} -->") == 1


def test_a_table_is_made_of_its_rows_and_the_rest_stays(area):
    assert results.changed(write=False, folder=area.parent) == [area / "README.md"]
    assert (area / "README.md").read_text(encoding="utf-8") == README
    assert results.changed(write=True, folder=area.parent) == [area / "README.md"]
    text = (area / "README.md").read_text(encoding="utf-8")
    assert text == README.replace("old\n", TABLE)
    assert not results.changed(write=True, folder=area.parent)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([HEAD | {"table": "other"}], "has a table speed; allowed: other"),
        ([*ROWS, HEAD], "line 1, is a row of speed"),
        ([{"columns": []}], "line 1: 'table'; allowed"),
    ],
)
def test_records_that_do_not_fit_are_refused(area, lines, said):
    write(area, lines)
    with pytest.raises(ValueError, match=said):
        results.changed(write=False, folder=area.parent)


def test_a_picture_is_of_its_results(tmp_path):
    """Changed results need a new picture, which the experiment draws."""
    folder = tmp_path / "time_series"
    folder.mkdir()
    for name in ("japanese_vowels.json", "japanese_vowels.png", results.RECORDS):
        shutil.copy(RECIPES / "time_series" / name, folder)
    assert not results.changed(write=False, folder=tmp_path)
    stored = folder / "japanese_vowels.json"
    stored.write_text(stored.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    picture = folder / "japanese_vowels.png"
    before = picture.read_bytes()
    assert results.changed(write=True, folder=tmp_path) == [picture]
    assert picture.read_bytes() != before and not results.changed(write=False, folder=tmp_path)


def test_the_command_says_what_differs(area, monkeypatch, capsys):
    """With --check it writes nothing, and its exit status is 1."""
    assert results.main(["--check"]) == 0 and not capsys.readouterr().out
    path = area / "README.md"
    monkeypatch.setattr(results, "changed", functools.partial(results.changed, folder=area.parent))
    assert results.main(["--check"]) == 1
    assert capsys.readouterr().out == f"{path} is not what its records make\n"
    assert path.read_text(encoding="utf-8") == README
    assert results.main([]) == 0
    assert capsys.readouterr().out == f"{path} is made anew\n" and TABLE in path.read_text(encoding="utf-8")
