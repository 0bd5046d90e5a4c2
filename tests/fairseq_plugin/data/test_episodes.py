"""Windows of episodes: sampling, the fields of a step, and padding."""

import numpy as np
import pytest
import torch

from fairseq_plugin.data.episodes import EpisodeDataset, remaining_returns
from tests.fairseq_plugin.helpers.episodes import LONGEST, described, episodes


def dataset(context: int | None, count: int = 600, seed: int = 1) -> EpisodeDataset:
    """A dataset of three episodes."""
    return EpisodeDataset(episodes(3), described(), context=context, return_scale=10.0, count=count, seed=seed)


def test_every_step_is_equally_likely_to_begin_a_window() -> None:
    """A window does not extend past its episode, and holds the steps of the data."""
    all_episodes, windows = episodes(3), dataset(5)
    begins = np.concatenate([[0], windows.ends])
    counts = np.zeros(windows.ends[-1])
    for i in range(len(windows)):
        window = windows[i]
        first = int(window["timesteps"][0])
        (number,) = (
            n
            for n, episode in enumerate(all_episodes)
            if np.isclose(episode.states[:, 0], window["states"][0, 0]).any()
        )
        episode = all_episodes[number]
        steps = slice(first, min(first + 5, len(episode.rewards)))
        assert len(window["timesteps"]) == steps.stop - first
        assert np.allclose(window["actions"], episode.actions[steps])
        assert np.allclose(window["returns"][:, 0], remaining_returns(episode.rewards)[steps] / 10.0)
        counts[begins[number] + first] += 1
    expected = len(windows) / len(counts)
    assert (counts > 0).all() and np.square(counts - expected).sum() / expected < 2 * len(counts)  # chi-squared


def test_the_draw_follows_from_seed_and_epoch() -> None:
    """The samples depend on seed and epoch only."""

    def drawn(seed: int, epoch: int) -> list[float]:
        windows = dataset(5, seed=seed)
        windows.set_epoch(epoch)
        return [float(windows[i]["states"].sum()) for i in range(20)]

    assert drawn(1, 1) == drawn(1, 1)
    assert drawn(1, 1) != drawn(1, 2) != drawn(2, 2)


def test_whole_episodes() -> None:
    """Every sample is a whole episode, and all episodes are equally likely."""
    windows, all_episodes = dataset(None), episodes(3)
    lengths = {len(episode.rewards) for episode in all_episodes}
    samples = [windows[i] for i in range(90)]
    assert {len(window["timesteps"]) for window in samples} == lengths and all(
        window["timesteps"][0] == 0 for window in samples
    )
    counts = [sum(len(window["timesteps"]) == length for window in samples) for length in lengths]
    assert min(counts) > 15 and windows.num_tokens(0) == 3 * LONGEST


def test_a_batch_is_padded_at_the_end() -> None:
    windows = dataset(8)
    samples = [windows[i] for i in range(12)]
    batch = windows.collater(samples)
    lengths = torch.tensor([len(sample["timesteps"]) for sample in samples])
    assert len(set(lengths.tolist())) > 1
    assert torch.equal((~batch["net_input"]["padding_mask"]).sum(1), lengths)
    assert batch["ntokens"] == 3 * int(lengths.sum()) and batch["nsentences"] == 12
    assert batch["target"] is batch["net_input"]["actions"]
    assert not batch["net_input"]["states"][batch["net_input"]["padding_mask"]].any()
    assert windows.collater([]) == {}


def test_returns_that_remain() -> None:
    assert remaining_returns(np.array([1.0, 2.0, 4.0], dtype=np.float32)).tolist() == [7.0, 6.0, 4.0]
    assert remaining_returns(np.full(10**6, 0.1, dtype=np.float32))[0] == pytest.approx(1e5, rel=1e-6)
