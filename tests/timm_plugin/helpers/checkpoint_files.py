"""Checkpoints for tests: of small stock models, and files that are not checkpoints."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

State = dict[str, Tensor]
#: The shape of the small stock transformers, and of our models that start from them.
STOCK = dict(img_size=64, embed_dim=48, depth=2)


def randomise(model: nn.Module, seed: int = 5) -> nn.Module:
    """Draw every parameter of ``model`` again, so that none is zero, one, or another model's initial value."""
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
    """Copy tensors, so that loading cannot change them."""
    return {name: tensor.clone() for name, tensor in state.items()}


def assert_same(actual: State, expected: State) -> None:
    """Check that both hold the same tensors, bit for bit; a failure names the first difference."""
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


class Hostile:
    """An object for pickle to execute: it leaves a file behind."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.system, (f"touch {self.trace}",)


def unusable_files(state: State, folder: Path) -> tuple[list[Path], Path]:
    """Files that hold no checkpoint, and the path that is created if the last of them is executed."""
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
