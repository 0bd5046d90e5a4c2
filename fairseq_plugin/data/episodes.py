"""Recorded episodes as a fairseq dataset: randomly drawn windows of steps, or whole episodes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fairseq.data import FairseqDataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .episode_folder import Episode, EpisodeDescription
from .stored_arrays import as_float32

#: The number of tokens per step: return, state, action.
TOKENS = 3
Window = dict[str, Tensor]


class EpisodeDataset(FairseqDataset):
    """``count`` windows per epoch, drawn with replacement.

    Every step of every episode is equally likely to be the first of a window, which ends after ``context`` steps or
    with the episode (Chen et al., *Decision Transformer*, 2021). With ``context`` None, a window is a whole episode,
    and all episodes are equally likely. The draw depends only on the seed, the epoch and the index in the epoch.

    A step has the return to go divided by ``return_scale``, the standardised state, the action scaled to -1 to 1, and
    its number in the episode. A batch has ``net_input`` (see ``collate``) and ``target``, the actions.
    """

    #: Loaders are rebuilt for each epoch, since persistent workers would not learn about a new epoch.
    can_reuse_epoch_itr_across_epochs = False

    def __init__(
        self,
        episodes: Sequence[Episode],
        described: EpisodeDescription,
        *,
        context: int | None,
        return_scale: float,
        count: int,
        seed: int,
    ) -> None:
        lengths = np.array([len(episode.rewards) for episode in episodes])
        self.ends = np.cumsum(lengths)
        self.context, self.count, self.seed, self.epoch = context, count, seed, 1
        self.longest = int(lengths.max() if context is None else min(context, lengths.max()))
        remaining = np.concatenate([remaining_returns(episode.rewards) for episode in episodes])
        scaled = as_float32("the return that remains, over --return-scale,", remaining / return_scale, remaining)
        self.returns = torch.from_numpy(scaled)[:, None]
        self.states = torch.from_numpy(described.standardise(np.concatenate([episode.states for episode in episodes])))
        self.actions = torch.from_numpy(described.scale(np.concatenate([episode.actions for episode in episodes])))

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng((self.seed, self.epoch, int(index)))
        if self.context is None:
            episode = int(rng.integers(len(self.ends)))
            first = begin = self._begin(episode)
            last = int(self.ends[episode])
        else:
            first = int(rng.integers(self.ends[-1]))
            episode = int(np.searchsorted(self.ends, first, side="right"))
            begin, last = self._begin(episode), min(first + self.context, int(self.ends[episode]))
        steps = {name: getattr(self, name)[first:last] for name in ("returns", "states", "actions")}
        return {"id": int(index), **steps, "timesteps": torch.arange(first - begin, last - begin)}

    def __len__(self) -> int:
        return self.count

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """fairseq's hook: a batch of ``samples``."""
        if not samples:
            return {}
        net_input = collate(samples)
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "nsentences": len(samples),
            "ntokens": TOKENS * sum(len(sample["timesteps"]) for sample in samples),
            "net_input": net_input,
            "target": net_input["actions"],
        }

    def num_tokens(self, index: int) -> int:
        """fairseq's hook: the tokens of the longest window."""
        return TOKENS * self.longest

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        """fairseq's hook: the tokens of the longest window, for several windows."""
        return np.full(len(indices), TOKENS * self.longest)

    def size(self, index: int) -> int:
        """fairseq's hook: the tokens of the longest window."""
        return TOKENS * self.longest

    def set_epoch(self, epoch: int) -> None:
        """fairseq's hook: draw other windows in another epoch."""
        self.epoch = epoch

    def _begin(self, episode: int) -> int:
        return int(self.ends[episode - 1]) if episode else 0


def remaining_returns(rewards: np.ndarray) -> np.ndarray:
    """The undiscounted sum of rewards (T,) from each step to the end, (T,) in float64."""
    return np.cumsum(rewards[::-1], dtype=np.float64)[::-1]


def collate(windows: Sequence[Window]) -> Window:
    """Collate windows to one batch, padded at the end.

    ``returns`` (B, K, 1), ``states`` (B, K, S), ``actions`` (B, K, A) and ``timesteps`` (B, K), zeros in padding, and
    ``padding_mask`` (B, K), True = padding.
    """
    names = ("returns", "states", "actions", "timesteps")
    batch = {name: pad_sequence([window[name] for window in windows], batch_first=True) for name in names}
    lengths = torch.tensor([len(window["timesteps"]) for window in windows])
    return {**batch, "padding_mask": torch.arange(batch["timesteps"].shape[1]) >= lengths[:, None]}
