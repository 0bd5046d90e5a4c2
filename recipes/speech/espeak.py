"""Speech from espeak-ng, a program that reads text aloud."""

import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import soundfile

from .recordings import resampled

PROGRAM = "espeak-ng"
#: The lowest speed in words per minute; espeak-ng speaks at this one when a lower one is asked for.
SLOWEST = 80


def speak(text: str, voice: str, speed: int) -> np.ndarray:
    """``text`` spoken by ``voice`` at ``speed`` words per minute: samples at 16 kHz between -1 and 1.

    Raises:
        ValueError: espeak-ng is missing, or has no such voice.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "speech.wav"
        command = [PROGRAM, "-v", voice, "-s", str(speed), "-w", str(path), "--", text]
        try:
            finished = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise ValueError(
                f"{PROGRAM} is not installed; allowed: to install it first, as by apt-get install {PROGRAM}"
            ) from error
        if finished.returncode or not path.exists():
            reason = " ".join(finished.stderr.split())
            raise ValueError(
                f"--voices has {voice}, with which {PROGRAM} failed: {reason}; allowed: those that {PROGRAM} --voices "
                "lists"
            )
        return resampled(*soundfile.read(path, dtype="float32"))


def check_voices(voices: Iterable[str], speed: int) -> None:
    """Raise ValueError unless espeak-ng speaks with each of ``voices`` at ``speed``."""
    if speed < SLOWEST:
        raise ValueError(f"--speed is {speed}; allowed: from {SLOWEST}, the slowest of {PROGRAM}")
    for voice in voices:
        speak("one", voice, speed)
