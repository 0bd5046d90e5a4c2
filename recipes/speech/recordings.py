"""Recordings as fairseq's audio tasks read them: mono, at 16 kHz, with a list of the files and their lengths."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
from scipy.signal import resample_poly

from ..shared.text_files import write_lines
from ..shared.working_folder import atomic_write

#: Samples per second.
RATE = 16_000
#: Endings of the files of a folder that are read.
ENDINGS = (".wav", ".flac", ".ogg", ".mp3")
#: The same as patterns.
PATTERNS = tuple(f"**/*{ending}" for ending in (*ENDINGS, *map(str.upper, ENDINGS)))
_NOT_DAMAGED = "audio that is there and not damaged, as .wav"
_ALLOWED = f"mono audio of {RATE:,} samples per second, which python -m recipes.speech.prepare --recordings makes"


class Recording(NamedTuple):
    """A recording in a list of fairseq, and what is spoken."""

    path: str  # below the root of the list
    samples: int
    text: str = ""  # words in small letters


def resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """``samples`` (n,) or (n, channels) of ``rate`` per second as mono at ``RATE``."""
    mono = samples.mean(1) if samples.ndim == 2 else samples
    return mono if rate == RATE else resample_poly(mono, RATE, rate).astype(np.float32)


def write_audio(path: Path, samples: np.ndarray) -> None:
    """Write ``samples`` at ``RATE`` as a .wav file of 16 bits, completely or not at all."""
    with atomic_write(path) as part:
        soundfile.write(part, samples.clip(-1.0, 1.0), RATE, format="WAV", subtype="PCM_16")


def read_audio(path: Path) -> tuple[np.ndarray, int]:
    """Samples and rate of a file; ValueError if it is damaged."""
    try:
        return soundfile.read(path, dtype="float32")
    except soundfile.SoundFileError as error:
        raise ValueError(f"{path} cannot be read: {error}; allowed: {_NOT_DAMAGED}") from error


def find_audio(folder: Path) -> list[Path]:
    """The files in ``folder`` and below it that are audio by their names.

    Raises:
        ValueError: there is none, or one is empty or damaged.
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS and path.is_file())
    if not paths:
        raise ValueError(f"--recordings is {folder}, without audio; allowed: a folder with {', '.join(ENDINGS)} files")
    for path in paths:
        if not _about(path).frames:
            raise ValueError(f"{path} has no samples; allowed in --recordings: audio that is not empty")
    return paths


def _about(path: Path) -> Any:
    """soundfile's description of a file, without its samples; ValueError if it cannot be read."""
    try:
        return soundfile.info(path)
    except soundfile.SoundFileError as error:
        raise ValueError(f"{path} cannot be read: {error}; allowed: {_NOT_DAMAGED}") from error


def letters(text: str) -> str:
    """A transcript in fairseq's letters: ``one two`` -> ``O N E | T W O |``."""
    return " ".join("|".join(text.upper().split()) + "|")


def write_lists(folder: Path, split: str, recordings: list[Recording], transcripts: bool = True) -> None:
    """Write SPLIT.tsv, the root of the paths and then a recording in each line, and SPLIT.ltr with the transcripts."""
    rows = [f"{folder.absolute()}\n", *(f"{recording.path}\t{recording.samples}\n" for recording in recordings)]
    if transcripts:
        write_lines(folder / f"{split}.ltr", [letters(recording.text) + "\n" for recording in recordings])
    write_lines(folder / f"{split}.tsv", rows)


def check_lists(folder: Path) -> dict[str, int]:
    """Compare the lists in ``folder`` with the files that they name; returns the recordings of each split.

    fairseq names no file when a rate is wrong, and tries to read a damaged one again for seconds.

    Raises:
        ValueError: a file is missing, damaged, empty, not mono at ``RATE``, or has another length than in the list; a
            transcript is missing, or has a letter that dict.ltr.txt lacks; there is no list.
    """
    lists = sorted(folder.glob("*.tsv"))
    if not lists:
        raise ValueError(f"--check is {folder}, without lists; allowed: a folder with train.tsv and the like")
    counts = {}
    for path in lists:
        counts[path.stem] = sum(1 for _ in _checked(path))
        _check_transcripts(path, counts[path.stem])
    return counts


def _checked(path: Path) -> Iterator[Path]:
    """The files of a list, each after its check."""
    root, *rows = path.read_text(encoding="utf-8").splitlines() or [""]
    for number, row in enumerate(rows, 2):
        name, tab, samples = row.partition("\t")
        if not tab or not samples.isdecimal():
            raise ValueError(f"{path}, line {number}, is {row!r}; allowed: a path, a tab and its number of samples")
        file = Path(root) / name
        about = _about(file)
        if (about.samplerate, about.channels) != (RATE, 1) or not about.frames:
            raise ValueError(
                f"{file}, line {number} of {path}, has {about.frames:,} samples, {about.samplerate:,} per second, "
                f"channels: {about.channels}; allowed: {_ALLOWED}"
            )
        if about.frames != int(samples):
            raise ValueError(f"{path}, line {number}, has {samples} samples; allowed: {about.frames}, those of {file}")
        yield file


def _check_transcripts(path: Path, count: int) -> None:
    """Raise ValueError unless the transcripts beside the list ``path``, if there are any, fit it."""
    transcripts, dictionary = path.with_suffix(".ltr"), path.with_name("dict.ltr.txt")
    if not transcripts.exists():
        return
    lines = transcripts.read_text(encoding="utf-8").splitlines()
    if len(lines) != count:
        raise ValueError(f"{transcripts} has {len(lines)} lines; allowed: {count}, one for each recording of {path}")
    if not dictionary.exists():
        raise ValueError(f"{dictionary} is missing; allowed: with a letter and a number in each line")
    known = {line.split()[0] for line in dictionary.read_text(encoding="utf-8").splitlines() if line.strip()}
    for number, line in enumerate(lines, 1):
        if unknown := sorted(set(line.split()) - known):
            raise ValueError(
                f"{transcripts}, line {number}, has {unknown[0]}; allowed: the letters of {dictionary}, between spaces"
            )
