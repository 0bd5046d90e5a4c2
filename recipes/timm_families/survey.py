"""The answers of one of timm's models to ``attn_layer=`` and to ``replace_attention``."""

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

#: The mechanism that is asked for; every other one is built in the same way.
ASKED = "flow"
#: The kinds of attention that were tried, with the reasons why they cannot be replaced; see ``attention_modules``.
_KNOWN: dict[Any, str] = {}


@dataclass(frozen=True)
class Found:
    """Result of the survey of a model: which of its attention can be replaced.

    ``attn_layer`` is "yes", "ignored", or the name of the exception that timm raises. ``replaced`` counts attention
    that can be replaced by its class, ``stays`` the rest by class and reason.
    """

    model: str
    family: str
    parameters: int
    attn_layer: str
    replaced: dict[str, int] = field(default_factory=dict)
    stays: dict[str, int] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """How much of its attention can be replaced."""
        if self.replaced:
            return "in part" if self.stays else "all"
        return "refused" if self.stays else "no attention"


def timm_models() -> dict[str, str]:
    """All of timm's own models, and of each the family: the file of timm that defines it."""
    modules = {name: model_entrypoint(name).__module__ for name in timm.list_models()}
    return {name: module.split(".")[-1] for name, module in modules.items() if module.startswith("timm.models.")}


def survey(name: str, family: str) -> Found:
    """Build the model ``name`` of ``family`` without memory, on the meta device, and look at its attention.

    Every class and shape of attention is compared with ours, with softmax, on random weights and tokens;
    ``timm_plugin.replace`` does that. Whether the whole model then computes the same is ``check_same_output``'s.
    """
    taken, model = _with_attn_layer(name), _on_meta(name)
    replaced, stays = Counter(), Counter()
    for path, reason in attention_modules(model, _KNOWN).items():
        kind = type(model.get_submodule(path)).__name__
        if reason:
            stays[f"{kind} {reason}"] += 1
        else:
            replaced[kind] += 1
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Found(name, family, parameters, taken, dict(replaced), dict(stays))


def check_same_output(name: str) -> None:
    """Build ``name`` with memory and random weights, and run it before and after ``replace_attention``.

    Raises:
        ValueError: the model computes something else with our softmax attention, or the same with Flow-Attention,
            which would mean that its attention has no part in the output.
    """
    torch.manual_seed(0)
    model = timm.create_model(name).double().eval()
    for parameter in model.requires_grad_(False).parameters():
        nn.init.normal_(parameter, std=0.1)  # layer scales and biases begin at 0 or close to it
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
    """Leaves out the drawing of first weights, which the meta device does slowly and for nothing."""

    DRAWING = frozenset({"add_", "clamp_", "div_", "erfinv_", "fill_", "mul_", "normal_", "uniform_", "zero_"})

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        drawn = next(iter((*args, *kwargs.values())), None)
        if getattr(func, "__name__", "") in self.DRAWING and drawn.is_meta:
            return drawn
        return func(*args, **kwargs)


def _on_meta(name: str, **arguments: Any) -> nn.Module:
    with torch.device("meta"), _WithoutValues():
        return timm.create_model(name, **arguments)


def _tensor(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else torch.cat(tuple(output))
