"""ListOps: rules, equal bytes for any number of processes, resumption, released and damaged tables."""

import itertools
import random
import statistics

import pytest
from fairseq.data import Dictionary, data_utils

from common.files.output_files import MARK
from recipes.lra import listops, listops_blocks
from recipes.lra.listops_blocks import Plan
from recipes.lra.listops_rules import MAX_ARGUMENTS, MAX_DEPTH, OPERATORS, SYMBOLS, apply, draw, evaluate

SMALL = Plan(seed=1, train=600, valid=30, test=20, min_length=4, max_length=40)


@pytest.mark.parametrize(
    ("operator", "arguments", "value"),
    [
        ("[MIN", (4, 2, 9), 2),
        ("[MAX", (4, 2, 9), 9),
        ("[SM", (9, 9, 5), 3),
        ("[MED", (1, 9, 4), 4),
        ("[MED", (9, 4), 6),
    ],
)
def test_operators(operator, arguments, value):
    """The median of an even number of digits, 6.5, is rounded down."""
    assert apply(operator, arguments) == value


def test_nested_expression():
    assert evaluate("[MAX 2 9 [MIN 4 7 ] 0 ]".split()) == 9
    assert evaluate("[SM [MED 3 8 5 ] [MAX 6 7 ] 9 ]".split()) == 1


@pytest.mark.parametrize("text", ["", "3 4", "[MAX 3", "3 ]", "[MAX ]", "[MAX 3 4 ] ]", "[AVG 3 4 ]", "( 3 )"])
def test_what_is_no_expression(text):
    with pytest.raises(ValueError, match="allowed"):
        evaluate(text.split())


def test_drawn_expressions_follow_the_rules():
    """Values, lengths, depth, numbers of arguments, and frequencies of operators and of digits at the root."""
    rng = random.Random(3)
    expressions = [draw(rng, 0, 2000) for _ in range(4000)]
    assert statistics.fmean(len(symbols) == 1 for symbols, _ in expressions) == pytest.approx(0.75, abs=0.03)
    arguments, operators = [], []
    for symbols, value in expressions[:1000]:
        assert evaluate(symbols) == value
        counts: list[int] = [0]
        for symbol in symbols:
            if symbol in OPERATORS:
                operators.append(symbol)
                counts[-1] += 1
                counts.append(0)
                assert len(counts) <= MAX_DEPTH
            elif symbol == "]":
                arguments.append(counts.pop())
            else:
                counts[-1] += 1
    assert set(arguments) == set(range(2, MAX_ARGUMENTS + 1))
    assert all(operators.count(name) / len(operators) == pytest.approx(0.25, abs=0.05) for name in OPERATORS)


def test_lengths_are_strict_limits():
    lengths = {len(draw(random.Random(seed), 4, 12).symbols) for seed in range(300)}
    assert lengths == set(range(5, 12))


def contents(folder):
    """The bytes of each file except the list of made files, whose order depends on the processes."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MARK]
    return {path.relative_to(folder): path.read_bytes() for path in files}


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    listops.generate(SMALL, tmp_path / "one", processes=1)
    listops.generate(SMALL, tmp_path / "two", processes=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    listops.generate(SMALL._replace(seed=2), tmp_path / "other", processes=1)
    assert contents(tmp_path / "one").keys() == contents(tmp_path / "other").keys()
    assert (tmp_path / "one" / "train.tsv").read_bytes() != (tmp_path / "other" / "train.tsv").read_bytes()
    lines = [(tmp_path / "one" / f"{split}.tsv").read_text().splitlines() for split in ("train", "valid", "test")]
    assert [len(split_lines) for split_lines in lines] == [601, 31, 21]
    assert all(split_lines[0] == "Source\tTarget" for split_lines in lines)
    rows = [line.split("\t") for split_lines in lines for line in split_lines[1:]]
    assert len({source for source, _ in rows}) == 650
    assert all(evaluate(source.split()) == int(target) for source, target in rows)
    # fairseq reads the table's content.
    data_bin = tmp_path / "one" / "data-bin"
    symbols = Dictionary.load(str(data_bin / "input0" / "dict.txt"))
    labels = Dictionary.load(str(data_bin / "label" / "dict.txt"))
    assert len(symbols) == len(Dictionary()) + 15
    sequences = data_utils.load_indexed_dataset(str(data_bin / "input0" / "test"), symbols)
    targets = data_utils.load_indexed_dataset(str(data_bin / "label" / "test"), labels)
    assert [symbols.string(sequences[i]) for i in range(20)] == [row[0] for row in rows[-20:]]
    assert [labels.string(targets[i]) for i in range(20)] == [row[1] for row in rows[-20:]]


def test_an_interrupted_generation_goes_on(tmp_path, monkeypatch):
    """The second block fails once; the first is not drawn again, and the result equals an uninterrupted run."""
    listops.generate(SMALL, tmp_path / "whole", processes=1)
    blocks, modified = tmp_path / "out" / "blocks", []
    draw, calls = listops_blocks.draw, itertools.count()

    def fail(*arguments):
        if next(calls) == listops_blocks.BLOCK:
            raise OSError("no more")
        return draw(*arguments)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="no more"):
        patched.setattr(listops_blocks, "draw", fail)
        listops.generate(SMALL, tmp_path / "out", processes=1)
    assert not (tmp_path / "out" / "train.tsv").exists() and (blocks / "000000.tsv").is_file()
    before = (blocks / "000000.tsv").stat().st_mtime_ns
    original = listops_blocks.read_lines
    monkeypatch.setattr(
        listops_blocks, "read_lines", lambda path: modified.append(path.stat().st_mtime_ns) or original(path)
    )
    listops.generate(SMALL, tmp_path / "out", processes=1)
    assert modified[0] == before
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_refusal_after_an_interruption_keeps_what_was_drawn(tmp_path, monkeypatch):
    """The first run ends after a block, as if interrupted; what the second one is refused for costs no block."""
    draw, calls = listops_blocks.draw, itertools.count()

    def draw_a_block(*arguments):
        if next(calls) == listops_blocks.BLOCK:
            raise OSError("no more")
        return draw(*arguments)

    def refuse(*arguments):
        raise ValueError("refused")

    for replacement, error in ((draw_a_block, OSError), (refuse, ValueError)):
        monkeypatch.setattr(listops_blocks, "draw", replacement)
        with pytest.raises(error, match="no more|refused"):
            listops.generate(SMALL, tmp_path / "out", processes=1)
        assert (tmp_path / "out" / "blocks" / "000000.tsv").is_file()
    assert (tmp_path / "out" / "settings.json").is_file()


def test_another_plan_in_the_same_folder_is_refused(tmp_path):
    listops.generate(SMALL, tmp_path, processes=1)
    with pytest.raises(ValueError, match="max_length is 41; allowed in .*: 40"):
        listops.generate(SMALL._replace(max_length=41), tmp_path, processes=1)


@pytest.mark.parametrize(("least", "most"), [(1, 4), (500, 501), (0, 1)])
def test_lengths_without_an_expression_are_refused(tmp_path, least, most, capsys):
    assert listops.main(["--out", str(tmp_path / "x"), "--min-length", str(least), "--max-length", str(most)]) == 1
    assert f"--max-length {most}" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_more_expressions_than_there_are(tmp_path):
    """There are only ten expressions of one symbol: the digits."""
    with pytest.raises(ValueError, match=r"ask for 30 .*allowed: about 10,"):
        listops.generate(Plan(1, 10, 10, 10, 0, 2), tmp_path, processes=1)
    assert not list(tmp_path.iterdir())
    listops.generate(Plan(1, 2, 2, 2, 0, 2), tmp_path, processes=1)  # what was refused binds nothing


RELEASED = "Source\tTarget\n( ( ( [MAX 2 ) 9 ) ] )\t9\n( ( ( ( [MED 1 ) 4 ) 8 ) ] )\t4\n"


def write_released(folder, **replaced):
    folder.mkdir()
    for split, name in listops.RELEASED.items():
        (folder / name).write_text(replaced.get(split, RELEASED))


def test_released_tables(tmp_path):
    write_released(tmp_path / "released")
    assert listops.main(["--file", str(tmp_path / "released"), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "valid.tsv").read_text() == "Source\tTarget\n[MAX 2 9 ]\t9\n[MED 1 4 8 ]\t4\n"
    assert (tmp_path / "out" / "data-bin" / "label" / "test.bin").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (RELEASED.replace("\t4", "\t5"), "line 3.*'5'.*allowed: 4"),
        (RELEASED.replace("MAX", "AVG"), r"line 2.*\[AVG"),
        (RELEASED.replace("Source", "Text"), "line 1.*header"),
        (RELEASED[:-1], "line 3.*cut off"),
        (RELEASED + "\t3\n", "line 4.*empty"),
        (RELEASED + "3 3\n", "line 4.*1 columns"),
        ("Source\tTarget\n", "1 lines"),
    ],
)
def test_damaged_tables(tmp_path, capsys, text, said):
    write_released(tmp_path / "released", valid=text)
    assert listops.main(["--file", str(tmp_path / "released"), "--out", str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert "basic_val.tsv" in message and "allowed" in message
    with pytest.raises(ValueError, match=said):
        listops.take_released(tmp_path / "released", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_mistyped_folder_does_not_bind_the_output(tmp_path):
    with pytest.raises(ValueError, match="basic_train.tsv does not exist"):
        listops.take_released(tmp_path / "missing", tmp_path / "out")
    write_released(tmp_path / "released")
    listops.take_released(tmp_path / "released", tmp_path / "out")


def test_own_table_with_a_symbol_that_is_none(tmp_path):
    listops.generate(SMALL, tmp_path, processes=1)
    path = tmp_path / "test.tsv"
    path.write_text("Source\tTarget\n[MAX 1 x ]\t1\n")
    with pytest.raises(ValueError, match=r"test.tsv, line 2 has the symbol 'x'.*\[MIN"):
        listops.binarise(tmp_path, None)
    assert len(SYMBOLS) == 15
