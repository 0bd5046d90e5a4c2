"""Processor time of torch.compile for language models: ``python -m recipes.bench.compile_time flash_lm linear_lm``.

2 layers of width 256 and 2 sequences of 64, 100 and 130 tokens in turn, then the backward pass of the last, on one
thread; each model in a process of its own with an empty cache.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch import Tensor, nn

from common.attention import ATTENTIONS

from . import models
from .attentions import is_causal
from .measure import ALLOWED_OF_MODELS, error

LENGTHS, ROWS = (64, 100, 130), 2


def results(model: nn.Module, compiled: nn.Module) -> Tensor:
    """Logits of each length and the gradients of the last, in one vector, with the model's random numbers fixed."""
    torch.manual_seed(3)
    logits = [compiled(models.tokens(length, ROWS))[0] for length in LENGTHS]
    gradients = torch.autograd.grad(logits[-1].square().mean(), list(model.parameters()), allow_unused=True)
    return torch.cat([x.detach().flatten() for x in (*logits, *gradients) if x is not None])


def seconds() -> float:
    """Processor time so far of this process and of the compilers that it called."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def compile_one(name: str) -> None:
    """Compile a model in this process, print its seconds, and compare it with the model without torch.compile."""
    torch.set_num_threads(1)
    layers = 1 if name in models.UNITS else 2  # two gated attention units count as one layer
    model = models.language_model(name, 256, layers, 2 * max(LENGTHS)).train()
    # torch's own random numbers, so that random features draw the same directions as without torch.compile.
    options = {"fx_graph_cache": False, "compile_threads": 1, "fallback_random": True}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        with inductor.patch(options), functorch.patch(enable_autograd_cache=False):
            before = seconds()
            actual = results(model, torch.compile(model))
            print(f"{name:<24}{seconds() - before:.1f} s", flush=True)
    far, allowed = error(actual, results(model, model)), ALLOWED_OF_MODELS[torch.float32]
    if not far <= allowed:
        raise SystemExit(f"{name} differs by {far:.1e} under torch.compile; allowed: {allowed}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile one model here, or several in processes of their own; 1 if one of them failed."""
    names = ["transformer_lm", "flash_lm", *(f"{name}_lm" for name in ATTENTIONS if is_causal(name))]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=names, help="architectures of language models (default: all)")
    chosen = parser.parse_args(arguments).models
    if len(chosen) == 1:
        compile_one(chosen[0])
        return 0
    return max(subprocess.run([sys.executable, "-m", "recipes.bench.compile_time", name]).returncode for name in chosen)


if __name__ == "__main__":
    sys.exit(main())
