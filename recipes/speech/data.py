"""Write recordings for fairseq's audio tasks, sentences that espeak-ng speaks: ``python -m recipes.speech.data``.

An interrupted run goes on. ``--recordings`` adds recordings of your own to pretrain on, and ``--check`` compares lists
of any recordings with the files that they name.
"""

import argparse
import random
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile
from scipy.signal import resample_poly
from tqdm import tqdm

from .. import runs
from .sentences import split_sentences

#: Samples per second.
RATE = 16_000
#: Endings of the recordings that are read, and the shortest of them to pretrain on, in seconds.
ENDINGS, SHORTEST = (".wav", ".flac", ".ogg", ".mp3"), 1.0


class Recording(NamedTuple):
    """An audio file, and what is spoken, in small letters."""

    path: Path
    samples: int
    text: str = ""


def speak(text: str, voice: str, speed: int) -> np.ndarray:
    """``text`` spoken by ``voice`` at ``speed`` words per minute: samples at 16 kHz between -1 and 1."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "speech.wav"
        command = ["espeak-ng", "-v", voice, "-s", str(speed), "-w", str(path), "--", text]
        try:
            finished = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise SystemExit("espeak-ng is not installed; install it first, as by apt-get install espeak-ng") from error
        if finished.returncode or not path.exists():
            raise SystemExit(f"--voices has {voice}; allowed: what espeak-ng --voices lists: {finished.stderr.strip()}")
        return mono(*soundfile.read(path, dtype="float32"))


def mono(samples: np.ndarray, rate: int) -> np.ndarray:
    """``samples`` (n,) or (n, channels) of ``rate`` per second as one channel at ``RATE``."""
    samples = samples.mean(1) if samples.ndim == 2 else samples
    return samples if rate == RATE else resample_poly(samples, RATE, rate).astype(np.float32)


def write_audio(path: Path, samples: np.ndarray) -> None:
    """Write ``samples`` at ``RATE`` as a .wav file of 16 bits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples.clip(-1.0, 1.0), RATE, subtype="PCM_16")


def letters(text: str) -> str:
    """A transcript in fairseq's letters: ``one two`` -> ``O N E | T W O |``."""
    return " ".join("|".join(text.upper().split()) + "|")


def write_lists(folder: Path, split: str, recordings: Sequence[Recording], transcripts: bool = True) -> None:
    """Write SPLIT.tsv, the root of the paths and then a recording in each line, and SPLIT.ltr with the transcripts."""
    rows = [f"{recording.path.relative_to(folder).as_posix()}\t{recording.samples}\n" for recording in recordings]
    if transcripts:
        spelled = "".join(letters(recording.text) + "\n" for recording in recordings)
        (folder / f"{split}.ltr").write_text(spelled, encoding="utf-8")
    (folder / f"{split}.tsv").write_text("".join([f"{folder.absolute()}\n", *rows]), encoding="utf-8")


def spoken(folder: Path, texts: Sequence[str], voices: Sequence[str], speed: int) -> Iterator[Recording]:
    """Each of ``texts`` as a file, which is written unless an earlier run has."""
    for number, (text, voice) in enumerate(zip(tqdm(texts, f"speak {folder.name}", disable=None), voices)):
        path = folder / f"{number}.wav"
        if not path.exists() or not soundfile.info(path).frames:
            write_audio(path, speak(text, voice, speed))
        yield Recording(path, soundfile.info(path).frames, text)


def joined(
    folder: Path, sentences: Sequence[Recording], seconds: int, count: int, generator: random.Random
) -> Iterator[Recording]:
    """``count`` recordings of as many sentences as fit into ``seconds``; none comes twice before all have come once."""
    waiting: list[Recording] = []
    for number in tqdm(range(count), f"join {folder.name}", disable=None):
        chosen: list[Recording] = []
        while True:
            if not waiting:
                waiting = generator.sample(sentences, len(sentences))
            if sum(sentence.samples for sentence in chosen) + waiting[-1].samples > seconds * RATE:
                break
            chosen.append(waiting.pop())
        samples = np.concatenate([soundfile.read(sentence.path, dtype="float32")[0] for sentence in chosen])
        write_audio(folder / f"{number}.wav", samples)
        yield Recording(folder / f"{number}.wav", len(samples), " ".join(sentence.text for sentence in chosen))


def write(options: argparse.Namespace, out: Path) -> None:
    """Write ``out``/data with its lists, and of recordings to pretrain on ``out``/recordings, unless they exist."""
    names = ("file", "voices", "speed", "sentences", "seconds", "lengths", "train", "test_seconds", "recordings")
    runs.begin(out, ["recipes.speech.data", *(f"{name}={getattr(options, name)}" for name in names)])
    dictionary = out / "data" / "dict.ltr.txt"  # written last
    if dictionary.exists():
        return
    texts = split_sentences(options.file, options.sentences, seed=1)
    if options.recordings is not None:
        copy_recordings(options.recordings, out / "recordings")
    sentences, longest = {}, min(options.seconds, *options.lengths)
    for number, split in enumerate(texts):
        generator = random.Random(f"1 {number}")
        voices = [generator.choice(options.voices) for _ in texts[split]]
        read = spoken(out / "sentences" / split, texts[split], voices, options.speed)
        sentences[split] = [sentence for sentence in read if sentence.samples <= longest * RATE]
        if not sentences[split]:
            raise ValueError(
                f"the shortest of --seconds and --lengths is {longest}; no sentence of {split} is so short"
            )
    plan = {"train": (options.seconds, options.train), "valid": (options.seconds, max(1, options.train // 20))}
    plan |= {f"test_{length}": (length, max(1, options.test_seconds // length)) for length in options.lengths}
    counts: dict[str, int] = {}
    for split, (seconds, count) in plan.items():
        folder, generator = out / "data" / "audio" / split, random.Random(f"1 {split}")
        recordings = list(joined(folder, sentences[split.partition("_")[0]], seconds, count, generator))
        write_lists(out / "data", split, recordings)
        print(f"{split}: {count} recordings, {sum(x.samples for x in recordings) / RATE / 60:.1f} minutes")
        for letter, n in Counter(" ".join(letters(x.text) for x in recordings).split()).most_common():
            counts.setdefault(letter, n if split == "train" else 0)  # others too, or fairseq reads them as "<unk>"
    dictionary.write_text("".join(f"{letter} {n}\n" for letter, n in counts.items()), encoding="utf-8")


def copy_recordings(source: Path, folder: Path) -> None:
    """Write the audio below ``source``, mono at ``RATE``, with lists of it: 90 % to train on, and 5 % valid."""
    copies: list[Recording] = []
    for path in tqdm(sorted(x for x in source.rglob("*") if x.suffix.lower() in ENDINGS), "copy", disable=None):
        samples = mono(*soundfile.read(path, dtype="float32"))
        if len(samples) >= SHORTEST * RATE:
            target = folder / "audio" / f"{len(copies)}.wav"
            write_audio(target, samples)
            copies.append(Recording(target, len(samples)))
    if len(copies) < 20:
        raise ValueError(
            f"--recordings is {source}, with {len(copies)} recordings of at least {SHORTEST:g} s; allowed: at least "
            f"20, as {', '.join(ENDINGS)}"
        )
    random.Random(1).shuffle(copies)
    first, second = round(0.9 * len(copies)), round(0.95 * len(copies))
    write_lists(folder, "train", copies[:first], transcripts=False)
    write_lists(folder, "valid", copies[first:second], transcripts=False)


def check(folder: Path) -> None:
    """Compare the lists in ``folder`` with the files that they name, which fairseq names in none of its errors.

    Raises:
        ValueError: a file is damaged, empty, not mono at ``RATE``, or has another length than in the list; transcripts
            are more or fewer, or have a letter that dict.ltr.txt lacks; there is no list.
    """
    lists = sorted(folder.glob("*.tsv"))
    if not lists:
        raise ValueError(f"--check is {folder}, without lists; allowed: a folder with train.tsv and the like")
    for path in lists:
        root, *rows = path.read_text(encoding="utf-8").splitlines()
        for number, (name, samples) in enumerate((row.split("\t") for row in rows), 2):
            about = soundfile.info(Path(root) / name)
            if not about.frames or (about.samplerate, about.channels, about.frames) != (RATE, 1, int(samples)):
                raise ValueError(
                    f"{path}, line {number}: {name} has {about.frames:,} samples, {about.samplerate:,} per second, "
                    f"channels: {about.channels}; allowed: {samples} samples as listed, {RATE:,} per second, mono"
                )
        transcripts = path.with_suffix(".ltr")
        if transcripts.exists():
            lines = transcripts.read_text(encoding="utf-8").splitlines()
            if len(lines) != len(rows):
                raise ValueError(f"{transcripts} has {len(lines)} lines; allowed: {len(rows)}, one for each recording")
            known = {line.split()[0] for line in (folder / "dict.ltr.txt").read_text(encoding="utf-8").splitlines()}
            for number, line in enumerate(lines, 1):
                if unknown := sorted(set(line.split()) - known):
                    raise ValueError(
                        f"{transcripts}, line {number}, has {unknown[0]}; allowed: letters of dict.ltr.txt"
                    )
        print(f"{path.stem}: {len(rows):,} recordings, as fairseq reads them")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the data, which the comparison has too."""
    parser.add_argument("--file", type=Path, help="text in UTF-8 to speak; default: commands to a house")
    parser.add_argument("--voices", nargs="+", default=["en-us", "en-gb"], help="of espeak-ng; drawn for each sentence")
    parser.add_argument("--speed", type=int, default=160, help="words per minute, from 80")
    parser.add_argument("--sentences", type=int, default=2_400, help="of the text, at most; 90 %% to train on")
    parser.add_argument("--seconds", type=int, default=5, help="of a recording to train on, at most")
    parser.add_argument("--lengths", type=int, nargs="+", default=[5, 30, 120, 600], help="seconds of test recordings")
    parser.add_argument("--train", type=int, default=800, help="recordings to train on")
    parser.add_argument("--test-seconds", type=int, default=300, help="of each length to test on")
    parser.add_argument("--recordings", type=Path, help="folder of any audio, without transcripts, to pretrain on")


def main() -> None:
    """Write the data, or check some."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--out", type=Path, default=Path("work/speech"))
    parser.add_argument("--check", type=Path, metavar="DIR", help="only check the lists and recordings of this folder")
    options = parser.parse_args()
    try:
        check(options.check) if options.check else write(options, options.out)
    except (ValueError, soundfile.SoundFileError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
