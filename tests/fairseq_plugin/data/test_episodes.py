"""Windows of episodes: which are drawn, and what their steps hold."""

import numpy as np
import pytest

from fairseq_plugin.data.episodes import EpisodeDataset, remaining_returns
from tests.fairseq_plugin.helpers.episodes import described, episodes

SCALE, COUNT = 10.0, 600


@pytest.mark.parametrize("context", [5, None], ids=["windows", "whole episodes"])
def test_every_beginning_is_equally_likely(context: int | None) -> None:
    """A window ends with its episode at the latest, and holds the steps of the data."""
    made = episodes(3)
    windows = EpisodeDataset(made, described(), context=context, return_scale=SCALE, count=COUNT, seed=1)
    firsts = [(n, t) for n, one in enumerate(made) for t in range(len(one.rewards) if context else 1)]
    counts = dict.fromkeys(firsts, 0)
    for i in range(len(windows)):
        window = windows[i]
        first = int(window["timesteps"][0])
        (n,) = (n for n, one in enumerate(made) if np.isclose(one.states[:, 0], window["states"][0, 0]).any())
        steps = slice(first, min(first + (context or 99), len(made[n].rewards)))
        assert window["timesteps"].tolist() == list(range(steps.start, steps.stop))
        assert np.allclose(window["states"], made[n].states[steps])
        assert np.allclose(window["actions"], made[n].actions[steps])
        left = [made[n].rewards[t:].sum() / SCALE for t in range(steps.start, steps.stop)]
        assert np.allclose(window["returns"][:, 0], left)
        assert windows.num_tokens(i) >= 3 * len(window["timesteps"])
        counts[n, first] += 1
    expected = COUNT / len(firsts)
    assert sum((count - expected) ** 2 for count in counts.values()) / expected < 2 * len(firsts)  # chi-squared


def test_returns_that_remain_are_exact() -> None:
    """Also the sum of a million rewards in float32."""
    assert remaining_returns(np.array([1.0, 2.0, 4.0], dtype=np.float32)).tolist() == [7.0, 6.0, 4.0]
    assert remaining_returns(np.full(10**6, 0.1, dtype=np.float32))[0] == pytest.approx(1e5, rel=1e-6)
