"""The random chunks of BigBird: a fixed choice among the real chunks of each sequence."""

import torch
from torch import Tensor

#: Rows of random numbers. Chunk g uses row g mod ROWS: with chunks of 64 tokens, rows repeat after 65,536 tokens.
ROWS = 1024


def draw_numbers(random_chunks: int, seed: int | None = None) -> Tensor:
    """Integers (``ROWS``, r) from torch's generator or ``seed``, from which ``choose_chunks`` selects chunks."""
    if seed is None:
        return torch.randint(2**31, (ROWS, random_chunks))
    # Always on the CPU, whatever torch's default device is, so that a seed gives the same numbers everywhere.
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**31, (ROWS, random_chunks), generator=generator, device="cpu")


def choose_chunks(numbers: Tensor, groups: int, last: Tensor) -> tuple[Tensor, Tensor]:
    """r different random chunks for each of G = ``groups`` chunks, and whether each of them exists.

    ``numbers`` (rows, r), ``last`` (B, 1) the last real chunk of each sequence -> (B, G, r) and bool (B, G, r). Chunk g
    chooses among the real chunks that it does not see anyway: not the first, the last, g or a neighbour of g. If E of
    them are left for choice s, it takes number ``numbers[g mod rows, s]`` mod E of them in order. O(G r (r log r)).
    """
    chunk = torch.arange(groups, device=last.device)
    numbers = numbers[chunk % numbers.shape[0]]  # (G, r)
    current = chunk.expand(last.shape[0], groups)  # (B, G)
    excluded = torch.stack(
        [torch.zeros_like(current), current - 1, current, current + 1, last.expand_as(current)], dim=-1
    )
    excluded = excluded.sort(-1).values  # (B, G, 5)
    repeated = torch.cat([torch.zeros_like(excluded[..., :1]), excluded[..., 1:] == excluded[..., :-1]], dim=-1) > 0
    nowhere = groups + numbers.shape[1] + 5  # larger than any requested index
    excluded = (
        excluded.masked_fill(repeated | (excluded < 0) | (excluded > last.unsqueeze(-1)), nowhere).sort(-1).values
    )
    left = last + 1 - (excluded < nowhere).sum(-1)  # (B, G)
    chosen: list[Tensor] = []
    valid: list[Tensor] = []
    for s in range(numbers.shape[1]):
        rank = (numbers[:, s] % left.clamp(min=1)).unsqueeze(-1)  # (B, G, 1)
        # There are t_i - i free chunks before the i-th excluded chunk t_i.
        free_before = excluded - torch.arange(excluded.shape[-1], device=excluded.device)
        choice = rank.squeeze(-1) + (free_before <= rank).sum(-1)
        chosen.append(choice.clamp(max=groups - 1))
        valid.append(left > 0)
        excluded = torch.cat([excluded, choice.masked_fill(left <= 0, nowhere).unsqueeze(-1)], dim=-1).sort(-1).values
        left = left - 1
    if len(chosen) == 0:
        empty = current.new_zeros(current.shape[0], groups, 0)
        return empty, empty > 0
    return torch.stack(chosen, dim=-1), torch.stack(valid, dim=-1)
