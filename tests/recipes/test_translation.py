"""Translation: messages as programs show them, marked passages, and the whole comparison of both."""

import json
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import make_dataset

from recipes.translation import compare, data
from recipes.translation.messages import Pair, cleaned, divide, read_messages, without_near, words

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


def write_catalogue(folder: Path, program: str, messages: Mapping[str, str], charset: str = "UTF-8") -> None:
    """Write a German catalogue in gettext's binary format; forms of a plural are separated by NUL."""
    path = folder / "de" / "LC_MESSAGES" / f"{program}.mo"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = f"Content-Type: text/plain; charset={charset}\nPlural-Forms: nplurals=2; plural=(n != 1);\n"
    texts = [text.encode(charset) for entry in sorted({"": head, **messages}.items()) for text in entry]
    begin, places = 28 + 8 * len(texts), []
    for text in texts:
        places.append((len(text), begin))
        begin += len(text) + 1
    count = len(texts) // 2
    tables = b"".join(struct.pack("<2I", *place) for place in [*places[::2], *places[1::2]])
    numbers = struct.pack("<7I", 0x950412DE, 0, count, 28, 28 + 8 * count, 0, 0)
    path.write_bytes(numbers + tables + b"".join(text + b"\0" for text in texts))


def write_programs(folder: Path) -> None:
    """24 programs of 12 messages without common words but one; a word of a message is its translation reversed."""
    spelled = {
        number: ["the", *("x".join(chr(97 + int(digit)) for digit in f"{number:03d}{place}") for place in range(5))]
        for number in range(24 * 12)
    }
    for program in range(24):
        lines = [spelled[number] for number in range(program * 12, program * 12 + 12)]
        translated = {" ".join(line): " ".join(word[::-1] for word in line) for line in lines}
        write_catalogue(folder, f"program{program:02d}", translated)


@pytest.mark.parametrize("charset", ["UTF-8", "ISO-8859-1"])
def test_messages_are_read_as_a_user_sees_them(charset, tmp_path):
    """In any character set; without contexts, keys of menus and other forms of a plural; a damaged file is left out."""
    write_catalogue(tmp_path, "editor", MESSAGES, charset)
    (tmp_path / "de" / "LC_MESSAGES" / "damaged.mo").write_bytes(b"no catalogue")
    pairs, left_out = read_messages([tmp_path], "en", "de")
    assert {pair.source: pair.target for pair in pairs} == READ
    assert sum(left_out.values()) == len(MESSAGES) - len(READ)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("E&xit", "&Beenden", ("Exit", "Beenden")),
        ("set LC_ALL now", "jetzt LC_ALL setzen", ("set LC_ALL now", "jetzt LC_ALL setzen")),
        ("_a and _b", "_c und _d", ("_a and _b", "_c und _d")),
    ],
)
def test_only_the_keys_of_menus_go(source, target, expected):
    assert cleaned(source, target) == expected


def test_no_part_has_nearly_the_same_message_as_another():
    """Three of four words; numbers, order and places to fill in do not count. Compared with all pairs of texts."""
    texts = ["a b c d e f g h"[: 2 * n + 1] + tail for n in range(2, 8) for tail in ("", " x", " y %s 17", " x y z w")]
    for one in texts:
        for other in texts:
            common, either = words(one) & words(other), words(one) | words(other)
            assert (not without_near([Pair("a", one, "")], [Pair("b", other, "")])) == (
                len(common) >= 0.75 * len(either)
            )
    parts = divide(
        [Pair(f"program{n % 40}", f"w{chr(97 + n % 26)} {text}", "") for n, text in enumerate(texts * 20)], 1
    )
    programs = [{pair.program for pair in part} for part in parts.values()]
    assert not any(one & other for one in programs for other in programs if one is not other)


def run(command, *arguments: object) -> None:
    """A command of the recipe, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["command", *map(str, arguments)])
        command.main()


def test_marked_characters_are_the_target(tmp_path):
    """In order, one passage in each equal part of a source; the three parts of the text are apart."""
    text = "".join(chr(97 + i % 26) for i in range(400)) + " ▁\n" + "".join(chr(913 + i % 17) for i in range(45))
    (tmp_path / "text.txt").write_text(text + "0123456789" * 5, encoding="utf-8")
    sizes = "--source-tokens 16 --spans 4 --span-tokens 2 --train 6 --valid 3 --test 3".split()
    run(data, "copy", "--file", tmp_path / "text.txt", "--out", tmp_path / "out", *sizes)
    folder = tmp_path / "out" / "data-bin"
    symbols = Dictionary.load(str(folder / "dict.source.txt"))
    for split, allowed in {"train": set("abcdefghijklmnopqrstuvwxyz▁"), "test": set("0123456789") | {"U+000A"}}.items():
        sides = [make_dataset(str(folder / f"{split}.source-target.{side}"), "mmap") for side in ("source", "target")]
        assert len(sides[0]) == (6 if split == "train" else 3)
        for source, target in zip(*sides):
            source, target = ([symbols[i] for i in side] for side in (source, target))
            assert source[-1] == target[-1] == "</s>" and len(source) == 17
            marked = [(i, x.removeprefix("<mark>")) for i, x in enumerate(source) if x.startswith("<mark>")]
            assert [x for _, x in marked] == target[:-1] and [i // 4 for i, _ in marked] == [0, 0, 1, 1, 2, 2, 3, 3]
            assert set(target[:-1]) <= allowed
    for wrong in ("--source-tokens 7", "--source-tokens 60", "--file missing.txt"):
        with pytest.raises(SystemExit, match="allowed"):
            run(data, "copy", "--file", tmp_path / "text.txt", *sizes, *wrong.split(), "--out", tmp_path / "new")


@pytest.mark.parametrize("kind", ["messages", "copy"])
def test_from_data_to_the_table(kind, tmp_path, imported_already):
    """A second call runs nothing; other arguments in the same folder are refused; translations can be timed."""
    write_programs(tmp_path)
    (tmp_path / "text.txt").write_text("to be, or not to be, that is the question:\n" * 200, encoding="utf-8")
    arguments = ["--data", kind, "--folder", tmp_path, "--file", tmp_path / "text.txt", "--out", tmp_path / "out"]
    arguments += "--quick --seeds 1 --subwords 400 --width 8 --heads 2 --layers 1 --models flow+forget/linear".split()
    arguments += ["transformer"] if kind == "messages" else []
    run(compare, *arguments)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [result["model"] for result in results] == arguments[arguments.index("--models") + 1 :]
    for score in ("next", *(("BLEU", "chrF") if kind == "messages" else ("exact", "passages", "tokens"))):
        assert all(0 <= result[score] <= 100 for result in results)
    assert (tmp_path / "out" / "results.png").exists()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.log")}
    run(compare, *arguments)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.log")} == before
    for wrong in ("--lr 0.5", "--data-seed 2"):
        with pytest.raises(SystemExit, match="begun with"):
            run(compare, *arguments, *wrong.split())
    if kind == "messages":
        run(compare, *arguments, "--speed")
        timed = json.loads((tmp_path / "out" / "speed" / "results.json").read_text())
        assert {row["model"] for row in timed} == {"flow+forget/linear", "transformer"}


def test_scores_of_generated_texts(tmp_path):
    """The best hypothesis of each source counts, in the order of the messages; characters count in their places."""
    log = tmp_path / "log"
    lines = ["T-1\tc d e f", "H-1\t-0.1\tc d x f", "H-1\t-0.2\tc d e f", "T-0\ta b", "H-0\t-0.1\ta b a"]
    log.write_text("\n".join([*lines, "x | Translated 2 sentences (9 tokens) in 0.5s (4.00 sentences/s)"]))
    pairs, milliseconds = compare.generated(log)
    assert pairs == [("a b", "a b a"), ("c d e f", "c d x f")] and milliseconds == 250
    options = compare.argparse.Namespace(span_tokens=2)
    assert compare.copied(options, pairs) == {"exact": 0, "passages": 100 * 2 / 3, "tokens": 100 * 5 / 6}
