"""Messages are read as programs show them, and divided so that no part has nearly the same message as another."""

import json

import pytest
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import make_dataset

from recipes.translation import prepare
from recipes.translation.catalogues import Pair, cleaned, read_catalogue, read_messages, words
from recipes.translation.parts import split, without_near
from tests.recipes.translation.catalogue_files import write_catalogue, write_programs

MESSAGES = {
    "cannot open the file %s": "Datei %s läßt sich nicht öffnen",
    "menu\x04_Save all open files": "Sämtliche offenen Dateien _speichern",
    "use pg_dump for all databases": "pg_dump für jede Datenbank verwenden",
    "%d file was not copied\0%d files were not copied": "%d Datei wurde nicht kopiert\0%d Dateien wurden nicht kopiert",
    "  -a, --all\n     show every single entry\n": "  -a, --all\n     jeden einzelnen Eintrag zeigen\n",
    "this one is not translated": "",
    "this one is the same": "this one is the same",
    "too short": "zu kurz",
    "four words, one too long": f"vier Wörter, zu lang: {'½' * 210}",
    "%s: %s (%d): {0}": "%s, %s (%d): {0}",
}
READ = {
    "cannot open the file %s": "Datei %s läßt sich nicht öffnen",
    "Save all open files": "Sämtliche offenen Dateien speichern",
    "use pg_dump for all databases": "pg_dump für jede Datenbank verwenden",
    "%d file was not copied": "%d Datei wurde nicht kopiert",
    "-a, --all show every single entry": "-a, --all jeden einzelnen Eintrag zeigen",
}


@pytest.mark.parametrize("charset", ["UTF-8", "ISO-8859-1"])
def test_messages_are_read_as_a_user_sees_them(charset, tmp_path):
    """In any character set; contexts, keys of menus, plurals and lines; what is left out is counted."""
    write_catalogue(tmp_path, "editor", MESSAGES, charset=charset)
    read = read_messages([tmp_path], "en", "de")
    assert {pair.source: pair.target for pair in read.pairs} == READ and not read.skipped
    assert {pair.program for pair in read.pairs} == {"editor"}
    assert read.left_out == {
        "not translated": 2,
        "too short or too long": 2,
        "nothing but places to fill in": 1,
    }


def test_a_message_is_taken_once(tmp_path):
    """The first program has it; a program's catalogues in two folders are one."""
    first, second = tmp_path / "first", tmp_path / "second"
    same = {"no such file or directory": "Datei samt Verzeichnis fehlt hier"}
    write_catalogue(first, "b", same)
    write_catalogue(second, "a", same | {"the disk is full now": "die Platte wird jetzt voll"})
    write_catalogue(second, "b", {"no such file or directory": "etwas ganz anderes steht hier"})
    read = read_messages([first, second], "en", "de")
    assert {pair.program for pair in read.pairs} == {"a"}
    assert {pair.source: pair.target for pair in read.pairs} == read_catalogue(second / "de/LC_MESSAGES/a.mo")
    assert read.left_out == {"the same source again": 1}


def test_any_two_languages(tmp_path):
    """Two translations of a message are a pair, and a translation can be the source."""
    english = "the disk is full now"
    write_catalogue(tmp_path, "disk", {english: "die Platte wird jetzt voll"})
    write_catalogue(tmp_path, "disk", {english: "le disque est maintenant plein"}, language="fr")
    for languages, pair in (
        (("fr", "de"), ("le disque est maintenant plein", "die Platte wird jetzt voll")),
        (("de", "en"), ("die Platte wird jetzt voll", english)),
    ):
        assert [read[1:] for read in read_messages([tmp_path], *languages).pairs] == [pair]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("_Open", "Ö_ffnen", ("Open", "Öffnen")),
        ("E&xit", "&Beenden", ("Exit", "Beenden")),
        ("set LC_ALL now", "jetzt LC_ALL setzen", ("set LC_ALL now", "jetzt LC_ALL setzen")),
        ("_a and _b", "_c und _d", ("_a and _b", "_c und _d")),
        ("Save & quit", "Sichern & beenden", ("Save & quit", "Sichern & beenden")),
    ],
)
def test_only_the_keys_of_menus_go(source, target, expected):
    assert cleaned(source, target) == expected


def test_places_to_fill_in_are_no_words():
    assert words("Cannot open %-10s (%(error)s) in <FILE>: {0} 17") == {"cannot", "open", "in"}


def near(one: str, other: str) -> bool:
    """Whether two sources are nearly the same."""
    return not without_near([Pair("a", one, "")], [Pair("b", other, "")])


def test_what_is_nearly_the_same():
    """Three of four words; numbers, order and places do not count. Compared with all pairs by definition."""
    assert near("could not open file %s", 'file "%d" could NOT open')
    assert near("one two three four", "one two three") and near("one two three", "one two three four")
    assert not near("one two three four", "one two three five")
    texts = ["a b c d e f g h"[: 2 * n + 1] + tail for n in range(2, 8) for tail in ("", " x", " y z", " x y z w")]
    for one in texts:
        for other in texts:
            common, either = words(one) & words(other), words(one) | words(other)
            assert near(one, other) == (len(common) >= 0.75 * len(either)), (one, other)


def test_parts_have_whole_programs_and_no_message_in_common(tmp_path):
    """A message that all programs have is in one part; parts depend on the seed."""
    write_programs(tmp_path)
    pairs = read_messages([tmp_path], "en", "de").pairs
    shared = [Pair(f"program{i:02d}", f"memory was all used up {i}", "Speicher wird ganz voll") for i in range(24)]
    parts = split(pairs + shared, 1)
    divided = [parts.train, parts.valid, parts.test]
    programs = [{pair.program for pair in part} for part in divided]
    assert all(programs) and not (programs[0] & programs[1] | programs[0] & programs[2] | programs[1] & programs[2])
    for i, part in enumerate(divided):
        rest = [pair for j, other in enumerate(divided) if j != i for pair in other]
        assert without_near(part, rest) == part
    having = [sum("memory" in pair.source for pair in part) for part in divided]
    assert having[:2] == [0, 0] and having[2] == len(programs[2])
    assert sum(map(len, divided)) + parts.near == len(pairs + shared)
    assert split((pairs + shared)[::-1], 1).test == parts.test[::-1]
    assert {pair.program for pair in split(pairs + shared, 2).test} != programs[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Catalogues of small programs."""
    folder = tmp_path_factory.mktemp("catalogues")
    write_programs(folder)
    return folder


def test_from_catalogues_to_a_data_set(folder, tmp_path, imported_already, capsys):
    """Both sides decode to the messages; catalogues that cannot be read are named; a second call writes nothing."""
    broken = write_catalogue(tmp_path, "broken", {"a message in another set": "größer noch wie es sein kann"})
    broken.write_bytes(broken.read_bytes().replace("ö".encode(), b"\xf6\xf6"))
    truncated = write_catalogue(tmp_path, "cut", MESSAGES)
    truncated.write_bytes(truncated.read_bytes()[:200])
    unknown = write_catalogue(tmp_path, "unknown", MESSAGES)
    unknown.write_bytes(unknown.read_bytes().replace(b"charset=UTF-8", b"charset=UTF-0"))
    command = ["--folder", str(folder), str(tmp_path), "--subwords", "400", "--out", str(tmp_path / "out")]
    assert prepare.main(command) == 0
    said = capsys.readouterr().err
    assert all(str(path) in said for path in (broken, truncated, unknown))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["skipped"].keys() == {str(path) for path in (broken, truncated, unknown)}
    pairs = {part: about["pairs"] for part, about in manifest["parts"].items()}
    assert sum(pairs.values()) == 24 * 12 and all(pairs.values())
    assert all(about["pairs"] == sum(about["programs"].values()) for about in manifest["parts"].values())
    data_bin = tmp_path / "out" / "data-bin"
    dictionary = Dictionary.load(str(data_bin / "dict.de.txt"))
    assert (data_bin / "dict.de.txt").read_bytes() == (data_bin / "dict.en.txt").read_bytes()
    for part, count in pairs.items():
        for language in ("en", "de"):
            tokens = make_dataset(str(data_bin / f"{part}.en-de.{language}"), "mmap")
            read = [dictionary.string(tokens[i], "sentencepiece") for i in range(len(tokens))]
            text = (tmp_path / "out" / "text" / f"{part}.{language}").read_text(encoding="utf-8").splitlines()
            assert len(text) == count and read == text
            assert sum(map(len, (tokens[i] for i in range(len(tokens))))) == manifest["parts"][part]["tokens"][language]
    written = {path: path.stat().st_mtime_ns for path in data_bin.iterdir()}
    assert prepare.main(command) == 0
    assert {path: path.stat().st_mtime_ns for path in data_bin.iterdir()} == written
    capsys.readouterr()
    for change, said in ((["--subwords", "390"], "subwords is 390"), (["--seed", "7"], "seed is 7")):
        assert prepare.main([*command, *change]) == 1
        assert f"{said}; allowed in" in capsys.readouterr().err
    write_catalogue(tmp_path, "later", {"one message more than before": "eine Meldung mehr wie vorher"})
    assert prepare.main(command) == 1 and "messages is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--target", "xx"], "--folder is {folder}, without catalogues xx/"),
        (["--target", "en"], "--source and --target are both en"),
        (["--subwords", "5"], "--subwords is 5; allowed for this text: at least"),
        (["--subwords", "90000"], "--subwords is 90000; allowed for this text: at most"),
    ],
)
def test_what_cannot_be_made_is_one_line(more, said, folder, tmp_path, capsys):
    command = ["--folder", str(folder), "--out", str(tmp_path / "out"), *more]
    assert prepare.main(command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said.format(folder=folder) in line and "allowed" in line
    assert not (tmp_path / "out").exists()  # or other settings would be refused there


def test_too_few_programs(tmp_path, capsys):
    write_programs(tmp_path / "catalogues", programs=3)
    assert prepare.main(["--folder", str(tmp_path / "catalogues"), "--out", str(tmp_path / "out")]) == 1
    assert "3 programs" in capsys.readouterr().err and not (tmp_path / "out").exists()
