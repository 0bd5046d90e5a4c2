"""Bytes that the processes of one sequence send for a layer, and the memory of each, by the number of tokens.

    python -m recipes.long_contexts.context_parallel --processes 1 2 4 --tokens 1024 4096 16384

A layer is an attention of 8 heads of 64 channels, or a gated attention unit of width 512 (``flash``), with one row and
in float32. Every number of processes starts anew, over gloo, on this machine.
"""

import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from tqdm import tqdm

from common.attention import ATTENTIONS, build_attention
from common.command_parser import CommandParser
from common.modules import GatedAttentionUnit
from common.parallel import ContextGroup, context_parallel, part_length
from recipes.bench.harness.memory import peak_beyond
from recipes.shared.scripts import script

HEADS, CHANNELS = 8, 64
WIDTH = HEADS * CHANNELS
#: The gated attention unit, which is no attention of the registry.
FLASH = "flash"
LAYERS = (*(name for name, kind in ATTENTIONS.items() if "causal" in kind.supports and kind.linear_cost), FLASH)


class Layer(nn.Module):
    """An attention between projections of tokens, x (1, n, D) -> (1, n, D); or a gated attention unit."""

    def __init__(self, name: str) -> None:
        super().__init__()
        if name == FLASH:
            self.unit = GatedAttentionUnit(WIDTH, causal=True)
            return
        self.unit = None
        facts = {"num_heads": HEADS, "head_dim": CHANNELS, "max_tokens": 2**31}
        self.attention = build_attention(name, causal=True, **facts)
        widths = self.attention.projections(CHANNELS)
        self.projections = nn.ModuleDict({name: nn.Linear(WIDTH, HEADS * width) for name, width in widths.items()})

    def forward(self, x: Tensor) -> Tensor:
        """x (1, n, D) -> (1, n, D)."""
        if self.unit is not None:
            return self.unit(x)
        heads = {name: proj(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for name, proj in self.projections.items()}
        q, k, v = (heads.get(name) for name in "qkv")
        return x + self.attention(q, k, v, **self.attention.inputs(x=x)).transpose(1, 2).flatten(2)


def measure(rank: int, processes: int, store: str, layers: Sequence[str], tokens: Sequence[int], results) -> None:
    """In one of ``processes``: the bytes that it sends for each layer and number of tokens, and its peak of memory."""
    torch.set_num_threads(1)
    files = dist.FileStore(store, processes)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=processes, timeout=timedelta(minutes=10))
    group = ContextGroup()
    for name in layers:
        torch.manual_seed(1)
        layer = Layer(name)
        for n in tokens:
            length = part_length(n, processes)
            x = torch.randn(1, length, WIDTH, requires_grad=True)
            group.bytes_sent = 0
            peak = peak_beyond(partial(step, layer, group, x), "cpu")
            results.put((processes, name, n, group.bytes_sent, peak))
    dist.destroy_process_group()


def step(layer: Layer, group: ContextGroup, x: Tensor) -> list[Tensor]:
    """A forward and a backward pass of this process's part x (1, n, D)."""
    with context_parallel(layer, group, torch.tensor([x.shape[1]])):
        layer(x).square().mean().backward()
    return []


def table(rows: Sequence[tuple[int, str, int, int, int]], tokens: Sequence[int]) -> str:
    """Markdown: of each layer and number of processes the most of any process, by the number of tokens.

    Bytes sent, and in brackets the peak of memory in MiB, beyond the weights and the input.
    """
    lines = ["| layer | processes | " + " | ".join(f"n = {n:,}" for n in tokens) + " |"]
    lines.append("| --- | ---: |" + " ---: |" * len(tokens))
    for name, processes in dict.fromkeys((row[1], row[0]) for row in rows):
        every = [[row[3:] for row in rows if row[:3] == (processes, name, n)] for n in tokens]
        cells = [f"{max(x[0] for x in n):,} ({max(x[1] for x in n) / 2**20:,.1f} MiB)" for n in every]
        lines.append(f"| {name} | {processes} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


@script("context_parallel")
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit status."""
    parser = CommandParser(description=__doc__.split("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], help="processes that hold a sequence")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096], help="tokens of a sequence")
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=LAYERS, help="attentions, and flash")
    given = parser.parse_args(arguments)
    for name in ("processes", "tokens"):
        if min(getattr(given, name)) < 1:
            raise ValueError(f"--{name} is {min(getattr(given, name))}; allowed: at least 1")
    rows = []
    for processes in tqdm(given.processes, desc="numbers of processes", unit="", leave=False, disable=None):
        results = mp.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            parameters = (processes, str(Path(folder, "store")), given.layers, given.tokens, results)
            context = mp.spawn(measure, parameters, nprocs=processes, join=False)
            rows += [results.get() for _ in range(processes * len(given.layers) * len(given.tokens))]
            while not context.join():
                pass
    print(table(rows, given.tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
