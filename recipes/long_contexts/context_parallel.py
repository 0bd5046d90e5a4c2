"""Bytes that the processes of one sequence send for a layer, and their memory, by the number of tokens.

    python -m recipes.long_contexts.context_parallel --processes 1 2 4 --tokens 1024 4096 16384

A layer is an attention with 8 heads of 64 channels, or a gated attention unit of width 512 (``flash``). The batch has
one row, in float32. The processes run on this machine, over gloo, and are started again for each number of processes.
"""

import argparse
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from tqdm import tqdm

from common.attention import ATTENTIONS, build_attention
from common.modules import GatedAttentionUnit
from common.parallel import ContextGroup, context_parallel, part_length

from ..runs import peak_bytes

HEADS, CHANNELS = 8, 64
WIDTH = HEADS * CHANNELS
#: The gated attention unit, which is not in the registry of attentions.
FLASH = "flash"
LAYERS = (*(name for name, kind in ATTENTIONS.items() if "causal" in kind.supports and kind.linear_cost), FLASH)


class Layer(nn.Module):
    """An attention between projections of tokens."""

    def __init__(self, name: str) -> None:
        super().__init__()
        facts = {"num_heads": HEADS, "head_dim": CHANNELS, "max_tokens": 2**31}
        self.attention = build_attention(name, causal=True, **facts)
        widths = self.attention.projections(CHANNELS)
        self.projections = nn.ModuleDict({name: nn.Linear(WIDTH, HEADS * width) for name, width in widths.items()})

    def forward(self, x: Tensor) -> Tensor:
        """x (1, n, D) -> (1, n, D)."""
        heads = {name: proj(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for name, proj in self.projections.items()}
        q, k, v = (heads.get(name) for name in "qkv")
        return x + self.attention(q, k, v, **self.attention.inputs(x=x)).transpose(1, 2).flatten(2)


def measure(rank: int, processes: int, store: str, layers: Sequence[str], tokens: Sequence[int], results) -> None:
    """One of ``processes``: put its bytes sent and peak memory for each layer and number of tokens into ``results``."""
    torch.set_num_threads(1)
    files = dist.FileStore(store, processes)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=processes, timeout=timedelta(minutes=10))
    group = ContextGroup()
    for name in layers:
        torch.manual_seed(1)
        layer = GatedAttentionUnit(WIDTH, causal=True) if name == FLASH else Layer(name)
        for n in tokens:
            length = part_length(n, processes)
            x = torch.randn(1, length, WIDTH, requires_grad=True)
            group.bytes_sent = 0
            peak = peak_bytes(lambda layer=layer, x=x: step(layer, group, x))
            results.put((processes, name, n, group.bytes_sent, peak / 2**20))
    dist.destroy_process_group()


def step(layer: nn.Module, group: ContextGroup, x: Tensor) -> None:
    """A forward and a backward pass of this process's part x (1, n, D)."""
    with context_parallel(layer, group, torch.tensor([x.shape[1]])):
        layer(x).square().mean().backward()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the largest values of all processes: bytes sent, and memory beyond weights and input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], help="processes that hold a sequence")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096], help="tokens of a sequence")
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=LAYERS, help="attentions, and flash")
    options = parser.parse_args(arguments)
    rows = []
    for processes in tqdm(options.processes, "numbers of processes", leave=False):
        results = mp.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            parameters = (processes, str(Path(folder, "store")), options.layers, options.tokens, results)
            context = mp.spawn(measure, parameters, nprocs=processes, join=False)
            rows += [results.get() for _ in range(processes * len(options.layers) * len(options.tokens))]
            while not context.join():
                pass
    found = pd.DataFrame(rows, columns=["processes", "layer", "tokens", "bytes", "MiB"])
    found = found.groupby(["layer", "processes", "tokens"], sort=False).max().reset_index()
    found["cell"] = [f"{x.bytes:,} ({x.MiB:,.1f} MiB)" for x in found.itertuples()]
    table = found.pivot(index=["layer", "processes"], columns="tokens", values="cell")
    table.columns = [f"n = {n:,}" for n in table]
    print(table.reset_index().to_markdown(index=False))


if __name__ == "__main__":
    main()
