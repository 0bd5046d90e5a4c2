"""A voice for tests, so that they need no espeak-ng."""

import numpy as np
import pytest

from recipes.speech import espeak

#: Samples of each spoken sentence: half a second.
SAMPLES = 8_000


@pytest.fixture
def spoken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were spoken so far; each is half a second of a tone, which is higher for another voice."""
    said: list[str] = []

    def speak(text: str, voice: str, speed: int) -> np.ndarray:
        said.append(text)
        return 0.5 * np.sin(np.arange(SAMPLES) * (0.05 + 0.02 * len(voice)), dtype=np.float32)

    monkeypatch.setattr(espeak, "speak", speak)
    return said
