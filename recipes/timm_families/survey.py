"""Test whether one of timm's models supports ``attn_layer=`` and ``replace_attention``."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
from timm.models import model_entrypoint
from torch import nn
from torch.overrides import TorchFunctionMode

from timm_plugin import replace_attention
from timm_plugin.layers.attention import SelfAttention
from timm_plugin.replace import attention_modules

#: The mechanism that the survey requests; all others are built in the same way.
ASKED = "flow"
#: Cache of ``attention_modules``: kinds of attention that were tried, and why they cannot be replaced.
_KNOWN: dict[Any, str] = {}


@dataclass(frozen=True)
class Found:
    """Result of the survey of a model: which of its attention can be replaced.

    ``attn_layer`` is "yes", "ignored", or the name of the exception that timm raises. ``replaced`` counts the layers
    that can be replaced, by class; ``stays`` counts the others, by class and reason.
    """

    model: str
    family: str
    parameters: int
    attn_layer: str
    replaced: dict[str, int] = field(default_factory=dict)
    stays: dict[str, int] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """How much of the model's attention can be replaced."""
        if self.replaced:
            return "in part" if self.stays else "all"
        return "refused" if self.stays else "no attention"


def timm_models() -> dict[str, str]:
    """All of timm's own models -> their families: the file of timm that defines the model."""
    modules = {name: model_entrypoint(name).__module__ for name in timm.list_models()}
    return {name: module.split(".")[-1] for name, module in modules.items() if module.startswith("timm.models.")}


def survey(name: str, family: str) -> Found:
    """Build the model ``name`` of ``family`` on the meta device, without memory, and inspect its attention.

    ``timm_plugin.replace`` compares every class and shape of attention with our softmax attention on random weights and
    tokens. ``check_same_output`` compares the output of a whole model.
    """
    attn_layer, model = _with_attn_layer(name), _on_meta(name)
    replaced, stays = Counter(), Counter()
    for path, reason in attention_modules(model, _KNOWN).items():
        kind = type(model.get_submodule(path)).__name__
        if reason:
            stays[f"{kind} {reason}"] += 1
        else:
            replaced[kind] += 1
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Found(name, family, parameters, attn_layer, dict(replaced), dict(stays))


def check_same_output(name: str) -> None:
    """Build ``name`` with random weights, and run it before and after ``replace_attention``.

    Raises:
        ValueError: our softmax attention changes the output, or Flow-Attention does not change it, so that attention
            has no influence on the output.
    """
    torch.manual_seed(0)
    model = timm.create_model(name).double().eval()
    for parameter in model.requires_grad_(False).parameters():
        nn.init.normal_(parameter, std=0.1)  # timm initialises layer scales and biases to 0 or close to it
    cfg = model.default_cfg
    size = cfg["input_size"] if cfg.get("fixed_input_size") else [min(side, 256) for side in cfg["input_size"]]
    images = torch.randn(1, *size, dtype=torch.float64)
    with torch.no_grad():
        before = _tensor(model(images))
        after = _tensor(replace_attention(model, "softmax")(images))
        other = _tensor(replace_attention(model, ASKED)(images))
    if not torch.isfinite(before).all() or not torch.allclose(before, after, rtol=1e-6):
        raise ValueError(f"{name} does not compute the same with softmax attention of ours")
    if torch.allclose(before, other, rtol=1e-6):
        raise ValueError(f"{name} computes the same with attention {ASKED!r}")


def _with_attn_layer(name: str) -> str:
    try:
        model = _on_meta(name, attn_layer=ASKED)
    except (TypeError, AssertionError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        return type(error).__name__
    return "yes" if any(isinstance(module, SelfAttention) for module in model.modules()) else "ignored"


class _WithoutValues(TorchFunctionMode):
    """Skips the random initialisation of weights, which is slow and useless on the meta device."""

    DRAWING = frozenset({"add_", "clamp_", "div_", "erfinv_", "fill_", "mul_", "normal_", "uniform_", "zero_"})

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        tensor = next(iter((*args, *kwargs.values())), None)
        if getattr(func, "__name__", "") in self.DRAWING and tensor.is_meta:
            return tensor
        return func(*args, **kwargs)


def _on_meta(name: str, **arguments: Any) -> nn.Module:
    with torch.device("meta"), _WithoutValues():
        return timm.create_model(name, **arguments)


def _tensor(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else torch.cat(tuple(output))
