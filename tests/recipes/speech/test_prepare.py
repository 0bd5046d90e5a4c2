"""From sentences to fairseq's lists: transcripts, lengths, going on after an interruption, and what is refused."""

import os
from pathlib import Path

import numpy as np
import pytest
import soundfile

from recipes.speech import espeak, prepare
from recipes.speech.sentences import read_sentences, split_sentences

ARGUMENTS = "--sentences 40 --seconds 2 --lengths 2 5 --train 6 --test-seconds 5".split()
TEXT = """The first line, and more of it!
Only 3 words. One
Don't stop—never; it's the last one, my friend.
the first line
' '
a ' sign"""


def main(out: Path, *more: object) -> int:
    """The command with small sizes."""
    return prepare.main([*ARGUMENTS, "--out", str(out), *map(str, more)])


def rows(folder: Path, split: str) -> list[tuple[Path, int, list[str]]]:
    """File, samples and words of each recording in a list."""
    root, *lines = (folder / f"{split}.tsv").read_text().splitlines()
    transcripts = (folder / f"{split}.ltr").read_text().splitlines()
    assert len(lines) == len(transcripts)
    words = [line.replace(" ", "").strip("|").split("|") for line in transcripts]
    parts = [line.split("\t") for line in lines]
    return [(Path(root) / name, int(samples), text) for (name, samples), text in zip(parts, words)]


def test_sentences_have_words_of_letters_alone(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    assert read_sentences(path) == [
        *("the first line", "and more of it", "don't stop", "it's the last one", "my friend")
    ]
    splits = split_sentences(None, 200, seed=1)
    assert sum(map(len, splits.values())) == 200 == len({text for texts in splits.values() for text in texts})
    assert splits == split_sentences(None, 200, seed=1) != split_sentences(None, 200, seed=2)


def test_recordings_are_whole_sentences_of_their_split(tmp_path: Path, spoken: list[str]) -> None:
    """As many as fit; a letter of the dictionary is a letter of a transcript."""
    assert main(tmp_path / "out") == 0
    data = tmp_path / "out" / "data"
    sentences = split_sentences(None, 40, seed=1)
    assert set(spoken) == {text for texts in sentences.values() for text in texts} | {"one"}
    for split, count, seconds in (("train", 6, 2), ("valid", 1, 2), ("test_2", 2, 2), ("test_5", 1, 5)):
        recordings = rows(data, split)
        assert len(recordings) == count
        allowed = [text.upper() for text in sentences[split.partition("_")[0]]]
        for path, samples, words in recordings:
            about = soundfile.info(path)
            assert (about.frames, about.samplerate, about.channels) == (samples, 16_000, 1)
            assert samples == seconds * 16_000  # sentences of half a second fill it
            text = " ".join(words)
            for _ in range(2 * seconds):
                text = next(text.removeprefix(x).strip() for x in allowed if text.startswith(x))
            assert not text
    letters = {line.split()[0] for line in (data / "dict.ltr.txt").read_text().splitlines()}
    assert letters == {"|"} | {x for _, _, words in rows(data, "train") for word in words for x in word}
    assert prepare.main(["--check", str(data)]) == 0


def test_an_interrupted_run_goes_on(tmp_path: Path, spoken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was spoken is not spoken again, and a complete folder is only read; other settings are refused."""
    out, speak = tmp_path / "out", espeak.speak

    def interrupted(*arguments: object) -> np.ndarray:
        if len(spoken) == 10:
            raise KeyboardInterrupt
        return speak(*arguments)

    monkeypatch.setattr(espeak, "speak", interrupted)
    assert main(out) == 130
    monkeypatch.setattr(espeak, "speak", speak)
    first = spoken.copy()
    assert main(out) == 0
    assert len(set(first) & set(spoken[len(first) :])) == 1  # the word that tries a voice
    assert len(spoken) == 40 + 2 * 2
    monkeypatch.setattr(espeak, "speak", None)
    assert main(out) == 0
    assert main(out, "--speed", 99) == 1


def test_recordings_to_pretrain_on_are_copied_at_one_rate(tmp_path: Path, spoken: list[str]) -> None:
    """Of two channels at 8 kHz; those below a second are left out. Other recordings are refused in the same folder."""
    folder = tmp_path / "recordings"
    (folder / "more").mkdir(parents=True)
    for number in range(20):
        soundfile.write(folder / "more" / f"{number}.flac", np.full((12_000, 2), 0.25), 8_000)
    soundfile.write(folder / "short.wav", np.zeros(7_000), 8_000)
    assert main(tmp_path / "out", "--recordings", folder) == 0
    lists = tmp_path / "out" / "recordings"
    names = []
    for split, count in (("train", 18), ("valid", 1)):
        root, *lines = (lists / f"{split}.tsv").read_text().splitlines()
        assert len(lines) == count and all(line.endswith("\t24000") for line in lines)
        names += [Path(root) / line.partition("\t")[0] for line in lines]
    samples, rate = soundfile.read(names[0])
    assert rate == 16_000 and samples.shape == (24_000,) and abs(samples[12_000] - 0.25) < 1e-3
    assert prepare.main(["--check", str(lists)]) == 0
    (folder / "notes.txt").write_text("no recording")
    assert main(tmp_path / "out", "--recordings", folder) == 0
    soundfile.write(folder / "more" / "3.flac", np.full((12_000, 2), 0.5), 8_000)
    assert main(tmp_path / "out", "--recordings", folder) == 1


def damaged(folder: Path) -> None:
    (folder / "a.wav").write_bytes(b"RIFF no audio")


def empty(folder: Path) -> None:
    soundfile.write(folder / "a.wav", np.zeros(0), 16_000)


def nothing(folder: Path) -> None:
    (folder / "text.txt").write_text("no audio")


@pytest.mark.parametrize(("write", "said"), [(damaged, "a.wav"), (empty, "a.wav"), (nothing, "--recordings is")])
def test_recordings_that_cannot_be_used_are_named(write, said, tmp_path, spoken, capsys) -> None:
    folder = tmp_path / "recordings"
    folder.mkdir()
    write(folder)
    assert main(tmp_path / "out", "--recordings", folder) == 1
    error = capsys.readouterr().err.strip()
    assert said in error and "allowed" in error and "\n" not in error
    assert not (tmp_path / "out").exists() and not spoken


#: What is wrong with lists -> how it becomes so, in a folder with a list of one second of audio.
WRONG = {
    "8,000 per second": lambda x: soundfile.write(x / "a.wav", np.ones(16_000), 8_000),
    "channels: 2": lambda x: soundfile.write(x / "a.wav", np.ones((16_000, 2)), 16_000),
    "has 0 samples": empty,
    "cannot be read": damaged,
    "allowed: 9": lambda x: soundfile.write(x / "a.wav", np.ones(9), 16_000),
    "a.wav cannot be read": lambda x: (x / "a.wav").unlink(),
    "without lists": lambda x: (x / "train.tsv").unlink(),
    "has 2 lines": lambda x: (x / "train.ltr").write_text("A |\nA |\n"),
    "has B": lambda x: (x / "train.ltr").write_text("A B |\n"),
    "dict.ltr.txt is missing": lambda x: (x / "dict.ltr.txt").unlink(),
    "line 2, is": lambda x: (x / "train.tsv").write_text(f"{x}\na.wav 16000\n"),
}


@pytest.mark.parametrize("said", WRONG)
def test_lists_that_do_not_fit_their_recordings_are_refused(said: str, tmp_path: Path, capsys) -> None:
    soundfile.write(tmp_path / "a.wav", np.ones(16_000), 16_000)
    (tmp_path / "train.tsv").write_text(f"{tmp_path}\na.wav\t16000\n")
    (tmp_path / "train.ltr").write_text("A |\n")
    (tmp_path / "dict.ltr.txt").write_text("| 1\nA 1\n")
    assert prepare.main(["--check", str(tmp_path)]) == 0
    WRONG[said](tmp_path)
    capsys.readouterr()
    assert prepare.main(["--check", str(tmp_path)]) == 1
    error = capsys.readouterr().err.strip()
    assert said in error and "allowed" in error and "\n" not in error


SCRIPT = """\
#!/bin/sh
case "$2" in none) echo "Error: The specified voice does not exist." >&2; exit 1;; esac
cp "$(dirname "$0")/tone.wav" "$6"
"""


def test_the_program_speaks_at_16_kilohertz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """espeak-ng writes 22,050 samples per second; a missing program and a voice that it lacks are named."""
    program = tmp_path / espeak.PROGRAM
    program.write_text(SCRIPT)
    program.chmod(0o755)
    soundfile.write(tmp_path / "tone.wav", np.full(22_050, 0.5), 22_050)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    samples = espeak.speak("two words", "en-us", 160)
    assert samples.shape == (16_000,) and samples.dtype == np.float32 and abs(samples[8_000] - 0.5) < 1e-3
    assert main(tmp_path / "out", "--voices", "en-us", "none") == 1
    assert "--voices has none" in (error := capsys.readouterr().err) and "does not exist" in error
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert main(tmp_path / "out") == 1
    assert "apt-get install espeak-ng" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_sentences_must_be_enough_and_short_enough(tmp_path: Path, spoken: list[str], capsys) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    assert main(tmp_path / "out", "--file", path) == 1
    assert "5 sentences" in capsys.readouterr().err
    assert main(tmp_path / "out", "--sentences", 3) == 1
    assert "--sentences is 3" in capsys.readouterr().err


def test_too_few_recordings_do_not_bind_the_folder(tmp_path: Path, spoken: list[str], capsys) -> None:
    """They are refused before anything is spoken; the same folder then takes other arguments."""
    folder = tmp_path / "recordings"
    folder.mkdir()
    soundfile.write(folder / "a.wav", np.ones(32_000), 16_000)
    assert main(tmp_path / "out", "--recordings", folder) == 1
    assert "--recordings has 1 files of at least 1 s" in capsys.readouterr().err
    assert set(spoken) == {"one"}  # the word that tries a voice
    assert main(tmp_path / "out") == 0
    assert not list((tmp_path / "out").glob("recordings/**/*.wav"))


def test_a_sentence_must_fit_into_the_shortest_recording(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(espeak, "speak", lambda text, *_: np.zeros(20_000 if "turn" in text else 8_000))
    assert main(tmp_path / "out", "--lengths", 1) == 0
    transcripts = [path.read_text() for path in (tmp_path / "out" / "data").glob("*.ltr")]
    assert len(transcripts) == 3 and not any("T U R N" in text for text in transcripts)
    monkeypatch.setattr(espeak, "speak", lambda *_: np.zeros(20_000))
    assert main(tmp_path / "other", "--lengths", 1) == 1
    assert "--lengths is 1" in capsys.readouterr().err
    assert main(tmp_path / "other", "--lengths", 2) == 0


def test_letters_that_only_a_test_recording_has_are_in_the_dictionary(tmp_path: Path, spoken: list[str]) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"word {chr(number)}" for number in range(ord("а"), ord("а") + 30)), encoding="utf-8")
    assert main(tmp_path / "out", "--file", path) == 0
    data = tmp_path / "out" / "data"
    texts = {split: (data / f"{split}.ltr").read_text(encoding="utf-8") for split in ("train", "test_5")}
    transcripts = {split: set(text.split()) for split, text in texts.items()}
    counts = dict(line.split() for line in (data / "dict.ltr.txt").read_text(encoding="utf-8").splitlines())
    assert transcripts["test_5"] - transcripts["train"]
    assert {letter for letter, count in counts.items() if count != "0"} == transcripts["train"]
    assert prepare.main(["--check", str(data)]) == 0


def test_a_speed_that_no_voice_has_is_refused(tmp_path: Path, spoken: list[str], capsys) -> None:
    assert main(tmp_path / "out", "--speed", 79) == 1
    assert "--speed is 79" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not spoken
