"""Speech: sentences, recordings and lists as fairseq reads them, and the whole comparison."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from recipes.speech import compare, data
from recipes.speech.checkpoints import write_converted, write_joined, write_teacher
from recipes.speech.recognise import collapsed, recognise
from recipes.speech.sentences import read_sentences, split_sentences
from tests.compare import weights

SIZES = "--sentences 40 --seconds 2 --lengths 2 5 --train 6 --test-seconds 5".split()
#: A program that speaks every text as half a second of a tone, at another rate than fairseq's, as espeak-ng does.
PROGRAM = """\
#!/bin/sh
case "$2" in none) echo "The specified voice does not exist." >&2; exit 1;; esac
echo "$8" >> "$(dirname "$0")/spoken"
cp "$(dirname "$0")/tone.wav" "$6"
"""


@pytest.fixture
def spoken(tmp_path, monkeypatch) -> Path:
    """A stand-in for espeak-ng on PATH; the file that it appends each text to."""
    folder = tmp_path / "bin"
    folder.mkdir()
    soundfile.write(folder / "tone.wav", 0.5 * np.sin(np.arange(11_025) * 0.05), 22_050)
    (folder / "espeak-ng").write_text(PROGRAM)
    (folder / "espeak-ng").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder / "spoken"


def run(command, *arguments: object) -> None:
    """A command of the recipe, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["command", *map(str, arguments)])
        command.main()


def rows(folder: Path, split: str) -> list[tuple[Path, int, str]]:
    """File, samples and words of each recording in a list."""
    root, *lines = (folder / f"{split}.tsv").read_text().splitlines()
    transcripts = (folder / f"{split}.ltr").read_text().splitlines()
    parts = [line.split("\t") for line in lines]
    texts = [" ".join(line.replace(" ", "").strip("|").split("|")) for line in transcripts]
    return [(Path(root) / name, int(samples), text) for (name, samples), text in zip(parts, texts, strict=True)]


def test_sentences_have_words_of_letters_alone(tmp_path):
    text = (
        "The first line, and more of it!\nOnly 3 words. One\nDon't stop—never; it's the last one.\nthe first line\n' '"
    )
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    assert read_sentences(tmp_path / "text.txt") == "the first line/and more of it/don't stop/it's the last one".split(
        "/"
    )
    splits = split_sentences(None, 200, seed=1)
    assert sum(map(len, splits.values())) == 200 == len({text for texts in splits.values() for text in texts})
    with pytest.raises(SystemExit, match="4 sentences.*at least 20"):
        run(data, "--file", tmp_path / "text.txt", "--out", tmp_path / "out")


def test_recordings_are_whole_sentences_of_their_split(tmp_path, spoken):
    """As many as fit, mono at 16 kHz; a second call speaks nothing, and other settings are refused."""
    run(data, *SIZES, "--out", tmp_path / "out")
    folder, sentences = tmp_path / "out" / "data", split_sentences(None, 40, seed=1)
    assert sorted(spoken.read_text().splitlines()) == sorted(text for texts in sentences.values() for text in texts)
    for split, count, seconds in (("train", 6, 2), ("valid", 1, 2), ("test_2", 2, 2), ("test_5", 1, 5)):
        recordings = rows(folder, split)
        assert len(recordings) == count
        for path, samples, words in recordings:
            about = soundfile.info(path)
            assert (about.frames, about.samplerate, about.channels) == (samples, 16_000, 1)
            assert samples == seconds * 16_000  # sentences of half a second fill it
            for _ in range(2 * seconds):
                known = (text.upper() for text in sentences[split.partition("_")[0]])
                words = next(words.removeprefix(text).strip() for text in known if words.startswith(text))
            assert not words
    letters = {line.split()[0] for line in (folder / "dict.ltr.txt").read_text().splitlines()}
    assert letters >= {"|"} | {letter for _, _, text in rows(folder, "test_5") for letter in text.replace(" ", "|")}
    run(data, "--check", folder)
    before = spoken.read_text()
    run(data, *SIZES, "--out", tmp_path / "out")
    assert spoken.read_text() == before
    for wrong, said in (("--speed 99", "begun with"), (f"--voices none --out {tmp_path / 'new'}", "--voices has none")):
        with pytest.raises(SystemExit, match=said):
            run(data, *SIZES, "--out", tmp_path / "out", *wrong.split())


def test_an_interrupted_run_goes_on(tmp_path, spoken):
    """What was spoken is not spoken again."""
    out = tmp_path / "out"
    run(data, *SIZES, "--out", out)
    for path in [out / "data" / "dict.ltr.txt", *out.glob("sentences/train/1*.wav")]:
        path.unlink()
    spoken.write_text("")
    run(data, *SIZES, "--out", out)
    assert len(spoken.read_text().splitlines()) == 11
    run(data, "--check", out / "data")


def test_recordings_to_pretrain_on_are_copied_at_one_rate(tmp_path, spoken):
    """Of two channels at 8 kHz; those below a second are left out; too few are refused."""
    folder = tmp_path / "recordings"
    (folder / "more").mkdir(parents=True)
    soundfile.write(folder / "short.wav", np.zeros(7_000), 8_000)
    with pytest.raises(SystemExit, match="0 recordings.*at least 20"):
        run(data, *SIZES, "--out", tmp_path / "out", "--recordings", folder)
    for number in range(20):
        soundfile.write(folder / "more" / f"{number}.flac", np.full((12_000, 2), 0.25), 8_000)
    run(data, *SIZES, "--out", tmp_path / "out", "--recordings", folder)
    root, *lines = (tmp_path / "out" / "recordings" / "train.tsv").read_text().splitlines()
    assert len(lines) == 18 and all(line.endswith("\t24000") for line in lines)
    samples, rate = soundfile.read(Path(root) / lines[0].partition("\t")[0])
    assert rate == 16_000 and samples.shape == (24_000,) and abs(samples[12_000] - 0.25) < 1e-3
    run(data, "--check", root)


#: A part of the error -> what is wrong, in a folder with a list of one second of audio.
WRONG = {
    "8,000 per second": lambda x: soundfile.write(x / "a.wav", np.ones(16_000), 8_000),
    "channels: 2": lambda x: soundfile.write(x / "a.wav", np.ones((16_000, 2)), 16_000),
    "has 9 samples": lambda x: soundfile.write(x / "a.wav", np.ones(9), 16_000),
    "a.wav": lambda x: (x / "a.wav").write_bytes(b"RIFF no audio"),
    "without lists": lambda x: (x / "train.tsv").unlink(),
    "has 2 lines": lambda x: (x / "train.ltr").write_text("A |\nA |\n"),
    "has B": lambda x: (x / "train.ltr").write_text("A B |\n"),
}


@pytest.mark.parametrize("said", WRONG)
def test_lists_that_do_not_fit_their_recordings_are_refused(said, tmp_path):
    soundfile.write(tmp_path / "a.wav", np.ones(16_000), 16_000)
    (tmp_path / "train.tsv").write_text(f"{tmp_path}\na.wav\t16000\n")
    (tmp_path / "train.ltr").write_text("A |\n")
    (tmp_path / "dict.ltr.txt").write_text("| 1\nA 1\n")
    run(data, "--check", tmp_path)
    WRONG[said](tmp_path)
    with pytest.raises(SystemExit, match=said):
        run(data, "--check", tmp_path)


def test_symbols_of_frames_become_a_text():
    """Repetitions are one symbol unless a blank stands between them."""
    assert collapsed(torch.tensor([0, 0, 5, 5, 0, 5, 6, 6, 0, 0]), blank=0).tolist() == [5, 5, 6]


def test_from_sentences_to_the_table(tmp_path, spoken, imported_already):
    """Five trainings, from pretraining to the transfer; a second call runs nothing; a transfer needs its teacher.

    Our softmax attention in the trained model reads what the model reads, and all weights but maps are its own.
    """
    out = tmp_path / "out"
    arguments = "--quick --seeds 1 --models wav2vec2 hedgehog --transfer hedgehog --width 16 --layers 1".split()
    arguments += ["--batch-seconds", 8, "--out", out]
    run(compare, *arguments)
    results = json.loads((out / "results.json").read_text())
    assert [(row["model"], row["length"]) for row in results] == [
        (name, length) for name in ("wav2vec2", "hedgehog") for length in (5, 10)
    ]
    assert all(row["ms"] > 0 and row["MiB"] > 0 and row["cer"] >= 0 for row in results)
    assert "after fine-tuning" in (out / "results.md").read_text() and (out / "results.png").exists()
    logs = {path: path.stat().st_mtime_ns for path in out.rglob("train.log")}
    run(compare, *arguments)
    assert len(logs) == 5 and {path: path.stat().st_mtime_ns for path in out.rglob("train.log")} == logs
    for wrong, said in (("--lr 0.5", "begun with"), ("--models linear", "2")):
        with pytest.raises(SystemExit, match=said):
            run(compare, *arguments, *wrong.split())
    runs, checked = out / "runs", tmp_path
    tuned = runs / "wav2vec2.1" / compare.BEST
    write_teacher(runs / "start.1" / compare.LAST, tuned, checked / "teacher.pt")
    write_converted(checked / "teacher.pt", checked / "softmax.pt", "softmax_wav2vec2", {})
    write_joined(tuned, runs / "teacher.1.pt", checked / "softmax.pt", checked / "joined.pt")
    one, other = (recognise(path, out / "data" / "data", [5]) for path in (tuned, checked / "joined.pt"))
    assert one[0]["cer"] == other[0]["cer"]
    stages = [tuned, checked / "joined.pt", *(runs / f"hedgehog.{stage}.1.pt" for stage in ("untrained", "joined"))]
    trained, joined, untrained, transferred = (
        weights(torch.load(path, weights_only=False)["model"]) for path in stages
    )
    assert trained.keys() == joined.keys() and all(torch.equal(x, joined[name]) for name, x in trained.items())
    maps = untrained.keys() - trained.keys()
    assert maps and all(".inner." in name for name in maps)
    assert all(torch.equal(x, untrained[name]) for name, x in trained.items())
    assert {name for name, x in untrained.items() if not torch.equal(x, transferred[name])} == maps
