"""The random chunks of BigBird: a choice among the real chunks of each sequence that never changes."""

import torch
from torch import Tensor

#: Rows of random numbers. Chunk g has row g mod ROWS: with chunks of 64 tokens a row serves twice beyond 65,536 tokens.
ROWS = 1024


def draw_numbers(random_chunks: int, seed: int | None = None) -> Tensor:
    """Integers (``ROWS``, r) from torch's generator or ``seed``, of which ``choose_chunks`` makes its choice."""
    if seed is None:
        return torch.randint(2**31, (ROWS, random_chunks))
    # On the CPU whatever torch's default device is: one seed gives the same numbers everywhere.
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**31, (ROWS, random_chunks), generator=generator, device="cpu")


def choose_chunks(numbers: Tensor, groups: int, last: Tensor) -> tuple[Tensor, Tensor]:
    """r different chunks for each of G = ``groups``, none of which it sees anyway, and whether there are as many.

    ``numbers`` (rows, r), ``last`` (B, 1) the last real chunk of each sequence -> (B, G, r) and bool (B, G, r). Chunk g
    chooses among those that are real and neither first, last, g nor beside g, in their order: of the E that are left
    for choice s, the one at place ``numbers[g mod rows, s]`` mod E. O(G r (r log r)).
    """
    chunk = torch.arange(groups, device=last.device)
    numbers = numbers[chunk % numbers.shape[0]]  # (G, r)
    here = chunk.expand(last.shape[0], groups)  # (B, G)
    taken = torch.stack([torch.zeros_like(here), here - 1, here, here + 1, last.expand_as(here)], dim=-1)
    taken = taken.sort(-1).values  # (B, G, 5)
    again = torch.cat([torch.zeros_like(taken[..., :1]), taken[..., 1:] == taken[..., :-1]], dim=-1) > 0
    nowhere = groups + numbers.shape[1] + 5  # beyond any place that is asked for
    taken = taken.masked_fill(again | (taken < 0) | (taken > last.unsqueeze(-1)), nowhere).sort(-1).values
    left = last + 1 - (taken < nowhere).sum(-1)  # (B, G)
    chosen: list[Tensor] = []
    valid: list[Tensor] = []
    for s in range(numbers.shape[1]):
        place = (numbers[:, s] % left.clamp(min=1)).unsqueeze(-1)  # (B, G, 1)
        # Before the i-th taken chunk t_i there are t_i - i free ones.
        free_before = taken - torch.arange(taken.shape[-1], device=taken.device)
        one = place.squeeze(-1) + (free_before <= place).sum(-1)
        chosen.append(one.clamp(max=groups - 1))
        valid.append(left > 0)
        taken = torch.cat([taken, one.masked_fill(left <= 0, nowhere).unsqueeze(-1)], dim=-1).sort(-1).values
        left = left - 1
    if len(chosen) == 0:
        none = here.new_zeros(here.shape[0], groups, 0)
        return none, none > 0
    return torch.stack(chosen, dim=-1), torch.stack(valid, dim=-1)
