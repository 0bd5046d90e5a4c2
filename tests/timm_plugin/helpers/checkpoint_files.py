"""Checkpoints as tests need them: of small stock models, and files that are none."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

State = dict[str, Tensor]
#: The shape of the small stock transformers, and of ours that start from them.
STOCK = dict(img_size=64, embed_dim=48, depth=2)


def randomise(model: nn.Module, seed: int = 5) -> nn.Module:
    """Draw every parameter of ``model`` anew, so that none is zero, one, or what another model begins with."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return model.eval()


def stock_state(name: str = "deit_tiny_patch16_224", **kwargs: Any) -> State:
    """The state dict of a small stock vision transformer."""
    return randomise(timm.create_model(name, **{**STOCK, "num_heads": 4, **kwargs})).state_dict()


def copy_of(state: State) -> State:
    """Tensors that loading cannot change."""
    return {name: tensor.clone() for name, tensor in state.items()}


def assert_same(actual: State, expected: State) -> None:
    """Fail, naming the first that differs, unless both hold the same tensors, to the bit."""
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


class Hostile:
    """What pickle would run: it leaves a file behind."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.system, (f"touch {self.trace}",)


def unusable_files(state: State, folder: Path) -> tuple[list[Path], Path]:
    """Files that hold no checkpoint, and the path that appears if the last of them is run."""
    whole, trace = folder / "whole.pth", folder / "trace"
    torch.save({"state_dict": state}, whole)
    content = whole.read_bytes()
    files = {
        "truncated.pth": content[: len(content) // 2],
        "empty.pth": b"",
        "text.pth": b"a text\n" * 100,
        "text.safetensors": b"a text\n" * 100,
        "empty.safetensors": b"",
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    torch.save({"state_dict": state, "extra": Hostile(trace)}, folder / "hostile.pth")
    return [folder / name for name in (*files, "hostile.pth")], trace
