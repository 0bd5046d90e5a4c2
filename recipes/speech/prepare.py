"""Make recordings for fairseq's audio tasks: sentences that espeak-ng speaks, with transcripts; or check some.

``python -m recipes.speech.prepare`` from the checkout's root. Another run continues where the last one stopped.
"""

import hashlib
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from common.command_parser import CommandParser

from ..shared.commands import shown_path
from ..shared.json_files import read_json, write_json
from ..shared.scripts import positive_int, script
from ..shared.settings import begun_with, given
from ..shared.text_files import cut_trial, write_lines
from ..shared.working_folder import working_folder
from . import espeak
from .recordings import (
    PATTERNS,
    RATE,
    Recording,
    check_lists,
    find_audio,
    letters,
    read_audio,
    resampled,
    write_audio,
    write_lists,
)
from .sentences import split_sentences

COMMAND = "recipes.speech.prepare"
VOICES, LENGTHS = ("en-us", "en-gb"), (5, 30, 120, 600)
#: Help of the options that the comparison has too.
HELP = {
    "file": "text in UTF-8 to speak; default: commands to a house, which are put together here",
    "voices": "of espeak-ng; each sentence is spoken by one of them, drawn at random (%(default)s)",
    "speed": "words per minute (%(default)s)",
    "sentences": "of the text, at most: 90 %% to train on, 5 %% valid, 5 %% test (%(default)s)",
    "seconds": "of a recording to train on, at most (%(default)s)",
    "lengths": "seconds of the recordings to test on, at most (%(default)s)",
    "train": "recordings to train on (%(default)s)",
    "test_seconds": "of each length to test on; at least one recording (%(default)s)",
    "recordings": "folder of any audio, without transcripts, to pretrain on",
}
#: Shorter recordings to pretrain on are left out, in seconds.
_SHORTEST = 1.0


class Settings(NamedTuple):
    """The text, how it is spoken, and the sizes of the data."""

    file: Path | None = None
    voices: Sequence[str] = VOICES
    speed: int = 160
    sentences: int = 2_400
    seconds: int = 5
    lengths: Sequence[int] = LENGTHS
    train: int = 800
    test_seconds: int = 300
    recordings: Path | None = None
    seed: int = 1

    @property
    def valid(self) -> int:
        """The number of recordings to validate on."""
        return max(1, self.train // 20)


class Sound(NamedTuple):
    """A spoken sentence."""

    text: str
    path: Path
    samples: int


def prepare(out: Path, settings: Settings) -> dict[str, Any]:
    """Make ``out``/data and, of recordings, ``out``/recordings, unless they exist; returns their manifest.

    Raises:
        ValueError: espeak-ng or a voice is missing, the text or the recordings cannot be read or are too few, a
            sentence is longer than a recording may be, or ``out`` has data of other settings.
    """
    with working_folder(out, COMMAND):
        spoken = split_sentences(settings.file, settings.sentences, settings.seed)
        digest = hashlib.sha256("\n".join(text for texts in spoken.values() for text in texts).encode()).hexdigest()
        names = {"file": settings.file and settings.file.name, **given("recordings", settings.recordings, PATTERNS)}
        about = {**settings._asdict(), **names, "sentences_sha256": digest}
        complete, audio = (out / "manifest.json").exists(), []
        if not complete:  # before anything is written
            audio = [] if settings.recordings is None else find_audio(settings.recordings)
            espeak.check_voices(settings.voices, settings.speed)
        with begun_with(out / "data.json", about, ("recordings", "sentences", "data")):
            if not complete:
                copied = _copy_recordings(out / "recordings", audio) if audio else {}
                write_json(out / "manifest.json", _write(out, spoken, settings) | copied)
        return read_json(out / "manifest.json", parts=dict[str, dict], left_out=int)


def _write(out: Path, spoken: dict[str, list[str]], settings: Settings) -> dict[str, Any]:
    """Speak all sentences, and join them to recordings; returns the manifest."""
    sounds, left_out, longest = {}, 0, min(settings.seconds, *settings.lengths)
    for number, (split, texts) in enumerate(spoken.items()):
        generator = random.Random(f"{settings.seed} {number}")
        voices = [generator.choice(settings.voices) for _ in texts]
        every = list(_speak(out / "sentences" / split, texts, voices, settings.speed))
        sounds[split] = [sound for sound in every if sound.samples <= longest * RATE]
        left_out += len(every) - len(sounds[split])
        if not sounds[split]:
            raise ValueError(
                f"the shortest of --seconds and --lengths is {longest}; allowed: more, since no sentence of {split} is "
                "so short"
            )
    plan = {"train": (settings.seconds, settings.train), "valid": (settings.seconds, settings.valid)}
    plan |= {split_of_length(length): (length, max(1, settings.test_seconds // length)) for length in settings.lengths}
    parts, dictionary = {}, {}
    for split, (seconds, count) in plan.items():
        generator = random.Random(f"{settings.seed} {split}")
        recordings = list(_join(out / "data", split, sounds[split.partition("_")[0]], seconds, count, generator))
        write_lists(out / "data", split, recordings)
        samples = sum(recording.samples for recording in recordings)
        parts[split] = {"recordings": len(recordings), "seconds": samples / RATE}
        counts = Counter(" ".join(letters(recording.text) for recording in recordings).split())
        for letter, n in counts.most_common():  # those that are not trained too, or fairseq reads them as "<unk>"
            dictionary.setdefault(letter, n if split == "train" else 0)
    write_lines(out / "data" / "dict.ltr.txt", [f"{letter} {n}\n" for letter, n in dictionary.items()])
    return {"parts": parts, "left_out": left_out}


def split_of_length(length: int) -> str:
    """The name of the split with recordings of ``length`` seconds."""
    return f"test_{length}"


def _speak(folder: Path, texts: Sequence[str], voices: Sequence[str], speed: int) -> Iterator[Sound]:
    """Each of ``texts`` as a file, which is written unless an earlier run has."""
    bar = tqdm(list(zip(texts, voices)), desc=f"speak {folder.name}", unit=" sentences", leave=False, disable=None)
    for number, (text, voice) in enumerate(bar):
        path = folder / f"{number}.wav"
        if not path.exists():
            write_audio(path, espeak.speak(text, voice, speed))
        yield Sound(text, path, len(read_audio(path)[0]))


def _join(
    folder: Path, split: str, sounds: Sequence[Sound], seconds: int, count: int, generator: random.Random
) -> Iterator[Recording]:
    """``count`` recordings of as many sentences as fit into ``seconds``; none comes twice before all have come once."""
    waiting: list[Sound] = []
    for number in tqdm(range(count), desc=f"join {split}", unit=" recordings", leave=False, disable=None):
        chosen: list[Sound] = []
        while True:
            if not waiting:
                waiting = generator.sample(sounds, len(sounds))
            if sum(sound.samples for sound in chosen) + waiting[-1].samples > seconds * RATE:
                break
            chosen.append(waiting.pop())
        samples = np.concatenate([read_audio(sound.path)[0] for sound in chosen])
        path = folder / "audio" / split / f"{number}.wav"
        write_audio(path, samples)
        text = " ".join(sound.text for sound in chosen)
        yield Recording(path.relative_to(folder).as_posix(), len(samples), text)


def _copy_recordings(folder: Path, paths: Sequence[Path]) -> dict[str, Any]:
    """Write the audio of ``paths``, mono at ``RATE``, with lists of it; returns its part of the manifest."""
    copies: list[Recording] = []
    for path in tqdm(paths, desc="copy recordings", unit=" files", leave=False, disable=None):
        samples = resampled(*read_audio(path))
        if len(samples) >= _SHORTEST * RATE:
            target = folder / "audio" / f"{len(copies)}.wav"
            write_audio(target, samples)
            copies.append(Recording(target.relative_to(folder).as_posix(), len(samples)))
    parts = cut_trial(len(copies), f"--recordings has {len(copies)} files of at least {_SHORTEST:g} s")
    random.Random(1).shuffle(copies)
    for split in ("train", "valid"):
        write_lists(folder, split, [copies[i] for i in parts[split]], transcripts=False)
    seconds = sum(recording.samples for recording in copies) / RATE
    about = {"files": len(copies), "seconds": seconds, "too_short": len(paths) - len(copies)}
    return {"recordings": about}


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog=f"python -m {COMMAND}", description=__doc__.splitlines()[0])
    defaults = Settings()
    for name in ("file", "recordings"):
        parser.add_argument(f"--{name}", type=Path, help=HELP[name])
    parser.add_argument("--voices", nargs="+", default=list(VOICES), metavar="VOICE", help=HELP["voices"])
    parser.add_argument(
        "--lengths", nargs="+", type=positive_int, default=list(LENGTHS), metavar="SECONDS", help=HELP["lengths"]
    )
    for name in ("speed", "sentences", "seconds", "train", "test_seconds"):
        option, default = f"--{name.replace('_', '-')}", getattr(defaults, name)
        parser.add_argument(option, type=positive_int, default=default, help=HELP[name])
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("work/speech"), help="default: %(default)s")
    parser.add_argument("--check", type=Path, metavar="DIR", help="only check the lists and recordings of this folder")
    return parser


@script("prepare")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    if options.check is not None:
        for split, count in check_lists(options.check).items():
            print(f"  {split}: {count:,} recordings, as fairseq reads them")
        return 0
    manifest = prepare(options.out.absolute(), Settings(*(getattr(options, name) for name in Settings._fields)))
    for split, about in manifest["parts"].items():
        print(f"  {split:<10}  {about['recordings']:6,d} recordings, {about['seconds'] / 60:.1f} minutes")
    print(f"  left out: {manifest['left_out']} sentences that are longer than the shortest recordings may be")
    if "recordings" in manifest:
        about = manifest["recordings"]
        print(f"  to pretrain on: {about['files']:,} files, {about['seconds'] / 60:.1f} minutes", end="")
        print(f"; left out: {about['too_short']} shorter than {_SHORTEST:g} s")
    print(f"Ready: {shown_path(options.out / 'data')}. How to train is in recipes/speech/README.md.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
