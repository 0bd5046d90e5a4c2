"""The table of timm's families matches the survey for a sample, and no family is missing."""

from collections import Counter

import pytest
import timm

from recipes.shared.tables import Run, check_document, write_document
from recipes.timm_families import table
from recipes.timm_families.__main__ import representatives
from recipes.timm_families.records import add_record, read_records
from recipes.timm_families.survey import Found, check_same_output, survey, timm_models

PATH = table.PATH
TEXT = PATH.read_text()
ROWS = table.read_rows(TEXT)
OTHERS = table.read_others(TEXT)

same_timm = pytest.mark.skipif(
    table.timm_version(TEXT) != timm.__version__, reason=f"the table is of timm {table.timm_version(TEXT)}"
)


@same_timm
def test_no_family_and_no_model_is_missing():
    counts = Counter({family: int(row["models"]) for family, row in ROWS.items()})
    for families in OTHERS.values():
        assert not families.keys() & ROWS.keys()
        counts.update(families)
    assert counts == Counter(timm_models().values())


@same_timm
@pytest.mark.parametrize(
    "name, attn_layer, outcome",
    [
        ("test_vit", "yes", "all"),
        ("vit_pwee_patch16_reg1_gap_256", "ignored", "refused"),
        ("convit_tiny", "TypeError", "in part"),
        ("mobilevit_xxs", "AssertionError", "all"),
    ],
)
def test_a_row_is_what_is_found(name, attn_layer, outcome):
    record = survey(name, timm_models()[name])
    assert (record.attn_layer, record.outcome) == (attn_layer, outcome)
    row = ROWS[record.family]
    assert f"{attn_layer}: " in row["`attn_layer=`"]
    assert f"{outcome}: " in row["`replace_attention`"]
    assert all(kind in row["replaced"] for kind in record.replaced)
    assert all(reason in row["stays, because it"] for reason in record.stays)


@same_timm
@pytest.mark.parametrize("name", ["efficientformer_l1", "tiny_vit_5m_224", "eva02_tiny_patch14_224", "resnet10t"])
def test_a_model_of_another_family_is_listed_with_its_reason(name):
    record = survey(name, timm_models()[name])
    assert record.attn_layer == "TypeError" and not record.replaced
    assert record.family in OTHERS[table.why_not(record)]


def test_a_whole_model_computes_the_same():
    check_same_output("test_vit")
    with pytest.raises(ValueError, match="GlobalContextVit whose attention cannot be replaced"):
        check_same_output("gcvit_xxtiny")


def test_the_survey_goes_on_where_it_was_cut_off(tmp_path):
    path = tmp_path / "records" / "found.jsonl"
    first, second = Found("a", "f", 2, "yes", {"Attention": 1}), Found("b", "f", 1, "yes", {"Attention": 1})
    assert read_records(path) == {}
    add_record(path, first)
    with path.open("a") as file:
        file.write('{"timm": "1.0')
    assert read_records(path) == {"a": first}
    add_record(path, second)
    assert read_records(path) == {"a": first, "b": second}
    path.write_text(path.read_text().replace(timm.__version__, "0.9"))
    assert read_records(path) == {}
    assert representatives([first, second]) == ["b"]


def test_a_file_of_others_is_neither_added_to_nor_replaced(tmp_path):
    """Neither as records nor as the table; the survey replaces its own tables."""
    notes = tmp_path / "notes.txt"
    notes.write_text("years of work\n")
    with pytest.raises(ValueError, match="notes.txt, line 1.*allowed"):
        read_records(notes)
    with pytest.raises(ValueError, match=r"--output is .*notes\.txt.*allowed"):
        write_document(notes, "a table\n", "recipes.timm_families", "--output")
    assert notes.read_text() == "years of work\n"
    for text in ("first", "second"):
        content = f"{text}\n\n`python -m recipes.timm_families`, 1 minute\n"
        write_document(tmp_path / "table.md", content, "recipes.timm_families", "--output")
        assert (tmp_path / "table.md").read_text() == content
    with pytest.raises(ValueError, match="table.md"):
        check_document(tmp_path / "table.md", "recipes.bench.kernels", "--out")
    check_document(PATH, "recipes.timm_families", "--output")  # the table in the checkout


def test_others_are_read_as_they_are_written():
    """Under the reason for most of a model's attention, however long the lines are."""
    records = [Found(f"m{i}", f"family_{i // 2}", 1, "TypeError", {}, {"A has b of its own": 1}) for i in range(60)]
    records += [Found("n", "family_0", 1, "TypeError", {}, {"A is called with x as well": 2, "B has b of its own": 1})]
    records += [Found("o", "family_0", 1, "TypeError"), Found("p", "p", 1, "yes", {"A": 1})]
    text = table.as_document(records, Run("python -m x", "a machine", "timm 1.0", "today", 1.0), went_on=False)
    assert list(table.read_rows(text)) == ["p"] and "B has" not in text
    assert list(table.read_others(text).values()) == [
        {f"family_{i}": 2 for i in sorted(range(30), key=str)},
        {"family_0": 1},
        {"family_0": 1},
    ]


def test_rows_are_read_as_they_are_written():
    reason = "Block has no projections"
    ignored = Found("a", "f", 1, "ignored", {}, {reason: 2})
    cells = table.row("f", [ignored, Found("b", "f", 1, "yes", {"Attention": 3})])
    assert cells == (
        "`f`",
        "2",
        "ignored: 1, yes: 1",
        "refused: 1, all: 1",
        "Attention: 1",
        "Block has no projections: 1",
    )
