"""Data sets of time series: reading ``.ts`` files and zips; errors name the malformed line."""

from pathlib import Path

import numpy as np
import pytest

from fairseq_plugin.data.series_folder import read_description, read_split
from recipes.shared.sources import UEA
from recipes.time_series import prepare
from recipes.time_series.archives import ARCHIVES, read_archive
from recipes.time_series.published import MODELS, TABLE
from recipes.time_series.ts_files import read_ts
from tests.recipes.archive_files import zipped

HEADER = [
    "# a comment",
    "@problemName Toy",
    "@timeStamps false",
    "@missing true",
    "@univariate false",
    "@dimensions 2",
    "@equalLength false",
    "@classLabel true Up Down",
    "@data",
]
CASES = ["1.0,2.0,3.5:4,5,6:Up", "1e-1,?:-.5,+2.:Down", "3,?,?,6:1,1,1,?:Up"]


def write(path: Path, lines=None, header=None) -> Path:
    path.write_text("\n".join([*(header or HEADER), *(CASES if lines is None else lines)]) + "\n")
    return path


def write_zip(path: Path, names=("Toy_TRAIN.ts", "Toy_TEST.ts"), text=None) -> Path:
    content = (text or "\n".join([*HEADER, *CASES]) + "\n").encode()
    path.write_bytes(zipped({f"folder/{name}": content for name in names}))
    return path


def test_a_file_is_read(tmp_path: Path) -> None:
    """Labels keep their case; ? is interpolated; series are (steps, channels)."""
    series, labels = read_ts(write(tmp_path / "a.ts"))
    assert labels == ["Up", "Down", "Up"]
    expected = ([[1, 4], [2, 5], [3.5, 6]], [[0.1, -0.5], [0.1, 2]], [[3, 1], [4, 1], [5, 1], [6, 1]])
    assert all(np.allclose(actual, expected_series) for actual, expected_series in zip(series, expected, strict=True))


BROKEN = [
    (["1,2:3,4:Up", "1,2:Up"], "line 11 has 1 channels; allowed: 2"),
    (["1,2:3,4:Up", "1,2:3,4:5,6:Up"], "line 11 has 3 channels; allowed: 2"),
    (["1,2:3,4:Left"], "line 10 has the label 'Left'; allowed: 'Up', 'Down'"),
    (["1,2:3,4:Up", "", "1,2:3,nan:Up"], "line 12 has 'nan' in channel 1"),
    (["1,2:inf,4:Up"], "line 10 has 'inf' in channel 1"),
    (["1,2:3,x:Up"], "line 10 has 'x' in channel 1"),
    (["1,2:3,4:Up", "1,2.3.4:3,4:Up"], "line 11 has '2.3.4' in channel 0"),
    (["1,2:3,1e999:Up"], r"line 10 is inf at \(1, 1\)"),
    (["1,2:3:Up"], "line 10 .* 1 to 2 steps"),
    (["1,2::Up"], "line 10 has no value in channel 1"),
    (["?,?:1,2:Up"], "line 10: channel 0 has no value at all"),
    (["1,2:3,4:Up", "1,2:3,"], "line 11 has 1 channels; allowed: 2"),  # cut off in the middle of a line
    ([], "b.ts .*@data"),
]


@pytest.mark.parametrize("lines, message", BROKEN)
def test_a_broken_line_is_named(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")) as caught:
        read_ts(write(tmp_path / "b.ts", lines))
    assert "b.ts" in str(caught.value)


@pytest.mark.parametrize(
    "change, message",
    [
        (("@timeStamps false", "@timeStamps true"), "@timestamps is true; allowed: false"),
        (("@classLabel true Up Down", "@classLabel false"), "@classlabel is false; allowed: true"),
        (("@classLabel true Up Down", "@classLabel true"), "@classlabel lists no label"),
        (("@problemName Toy", "problemName Toy"), "line 2 is 'problemName Toy'; allowed before @data"),
        (("@dimensions 2", "@dimensions 3"), "line 10 has 2 channels; allowed: 3"),
        (("@dimensions 2", "@dimensions two"), "@dimensions is 'two'; allowed: one integer"),
        (("@dimensions 2", "@dimensions"), "@dimensions is ''; allowed: one integer"),
        (("@equalLength false", "@equalLength true\n@seriesLength 3"), "line 12 has 2 steps; allowed: 3"),
        (("@equalLength false", "@equalLength true\n@seriesLength -3"), "@serieslength is '-3'; allowed: one integer"),
        (("@univariate false", "@univariate perhaps"), "cannot be read: invalid univariate value"),
    ],
)
def test_a_broken_header_is_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    header = [change[1] if line == change[0] else line for line in HEADER]
    with pytest.raises(ValueError, match=message):
        read_ts(write(tmp_path / "c.ts", header=header))


def test_no_text_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "d.ts").write_bytes(b"@data\n\xff\xfe")
    with pytest.raises(ValueError, match="d.ts .*UTF-8"):
        read_ts(tmp_path / "d.ts")
    with pytest.raises(ValueError, match="e.ts cannot be read"):
        read_ts(tmp_path / "e.ts")


def test_prepare_from_a_zip_and_from_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Both give the same folder; files of any data set are accepted."""
    write(tmp_path / "Toy_TRAIN.ts"), write(tmp_path / "Toy_TEST.ts", CASES[:2])
    files = {name: (tmp_path / name).read_bytes() for name in ("Toy_TRAIN.ts", "Toy_TEST.ts")}
    (tmp_path / "Toy.zip").write_bytes(zipped(files))
    for file, out in (("Toy.zip", "one"), ("Toy_TRAIN.ts", "two")):
        arguments = ["--dataset", "Toy", "--file", str(tmp_path / file), "--out", str(tmp_path / out)]
        assert prepare.main(arguments) == 0
    assert read_description(tmp_path / "one") == read_description(tmp_path / "two")
    assert read_split(tmp_path / "two", "test").labels == ["Up", "Down"]
    assert "2 channels, 2 labels: Down, Up" in capsys.readouterr().out


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda path: write_zip(path, ["Toy_TRAIN.ts"]), "Toy.zip .*Toy_TEST.ts; allowed: .*Toy_TRAIN.ts"),
        (lambda path: write_zip(path, text="\n".join([*HEADER, "1:2:Up", "1:Up"])), "Toy.zip: Toy_TRAIN.ts, line 11"),
    ],
)
def test_a_bad_file_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture, make, message: str) -> None:
    """One line on stderr, and no folder."""
    make(tmp_path / "Toy.zip")
    arguments = ["--dataset", "Toy", "--file", str(tmp_path / "Toy.zip"), "--out", str(tmp_path / "out")]
    assert prepare.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("prepare: ") and error.count("\n") == 1
    with pytest.raises(ValueError, match=message):
        read_archive("Toy", tmp_path, tmp_path / "Toy.zip")
    assert not (tmp_path / "out").exists()


def test_a_known_data_set_must_be_whole(tmp_path: Path) -> None:
    """Truncation between two lines is detected by the paper's counts only."""
    path = write_zip(tmp_path / "Heartbeat.zip", ["Heartbeat_TRAIN.ts", "Heartbeat_TEST.ts"])
    with pytest.raises(ValueError, match="Heartbeat has train 3; allowed: 204"):
        read_archive("Heartbeat", tmp_path, path)
    with pytest.raises(ValueError, match="^--dataset is Toy; allowed.*--file.*JapaneseVowels"):
        read_archive("Toy", tmp_path)
    with pytest.raises(ValueError, match="Toy_TEST.ts.*allowed: .*_TRAIN.ts"):
        read_archive("Toy", tmp_path, write(tmp_path / "Toy_TEST.ts"))


def test_data_sets_that_come_with_sktime(tmp_path: Path) -> None:
    """BasicMotions as in the archive: labels with capitals, 40 and 40 series of 100 steps."""
    splits = read_archive("BasicMotions", tmp_path)
    assert [len(splits[name].series) for name in ("train", "test")] == [40, 40]
    assert splits["train"].series[0].shape == (100, 6) and splits["train"].labels[0] == "Standing"
    assert list(tmp_path.iterdir()) == []


def test_tables_of_the_paper() -> None:
    """Ten data sets and fourteen models; the two data sets of sktime are not downloaded."""
    assert set(ARCHIVES) == {*TABLE, "BasicMotions"}
    assert all(len(row) == len(MODELS) for row in TABLE.values())
    averages = [round(sum(row[i] for row in TABLE.values()) / 10, 1) for i in range(len(MODELS))]
    assert averages[MODELS.index("Flowformer")] == 73.0 and averages[MODELS.index("Transformer")] == 71.9
    assert set(ARCHIVES) - set(UEA) == {"JapaneseVowels", "BasicMotions"} and set(UEA) < set(ARCHIVES)
