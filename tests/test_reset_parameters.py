"""Parameters that a host initialises after a model is built are drawn as the constructor draws them."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import timm
import torch
from torch import nn

import timm_plugin
from common.attention import ATTENTIONS, supporting
from common.modules.forget_gate import ForgetGate
from common.modules.gated_attention_unit import GatedAttentionUnit
from common.modules.sinusoids import ScaledSin
from fairseq_plugin.modules.cross_attention import CrossDesign, InnerCrossAttention
from fairseq_plugin.modules.multihead_attention import InnerMultiheadAttention, LayerDesign
from fairseq_plugin.modules.positions import SinusoidalPositions
from tests.compare import assert_drawn_alike, on_cpu
from tests.timm_plugin.helpers import CASES

_MODES = {False: "bidirectional", True: "causal"}
_VIT = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3, "class_token": False, "global_pool": "avg"}


def _attentions() -> dict[str, Callable[[], nn.Module]]:
    """The attentions of fairseq's layers, with every mechanism."""
    made: dict[str, Callable[[], nn.Module]] = {}
    for causal, name in [(causal, name) for causal, what in _MODES.items() for name in supporting(what)]:
        dim = None if "x" in ATTENTIONS[name].needs else 32
        design = LayerDesign(name, attention_dim=dim, attention_gate=True, max_tokens=48)
        made[f"{name} {_MODES[causal]}"] = partial(InnerMultiheadAttention, 64, 4, design, causal)
    for name in supporting("source"):
        made[f"{name} of a source"] = partial(InnerCrossAttention, 64, 4, 64, CrossDesign(name, max_tokens=48))
    return made


MODULES: dict[str, Callable[[], nn.Module]] = {
    **_attentions(),
    "unit": partial(GatedAttentionUnit, 64, chunk_size=8, norm="scalenorm", gate=False, separate_ffn=True),
    "quadratic unit": partial(GatedAttentionUnit, 64, max_positions=32, bias="rotary"),
    "gate": partial(ForgetGate, "head", 64, 4, 16),
    "sines": partial(ScaledSin, 32),
    "table of sines": partial(SinusoidalPositions, 32, 1, 64),
}


@pytest.mark.parametrize("name", MODULES)
def test_reset_parameters_of_a_module_and_its_parts(name: str) -> None:
    """In torch's order for ``apply``, parts first."""
    torch.manual_seed(0)
    module = on_cpu(MODULES[name])
    module.apply(lambda part: part.reset_parameters() if hasattr(part, "reset_parameters") else None)
    assert_drawn_alike(module, MODULES[name]())


def _models() -> dict[str, Callable[[], nn.Module]]:
    """timm's models of ours, and a vision transformer with every attention."""
    made = {}
    for case, (name, arguments) in CASES.items():
        create = timm_plugin.create_model if "attn_layer" in arguments else timm.create_model
        made[case] = partial(create, name, **arguments)
    for name in supporting("bidirectional", images=True):
        made[f"vit of {name}"] = partial(timm_plugin.create_model, "vit_tiny_patch16_224", attn_layer=name, **_VIT)
    return made


MODELS = _models()


@pytest.mark.parametrize("name", MODELS)
def test_init_weights_of_timms_models(name: str) -> None:
    """After ``to_empty``, ``init_weights`` is enough."""
    torch.manual_seed(0)
    model = on_cpu(MODELS[name])
    model.init_weights()
    assert_drawn_alike(model, MODELS[name]())


@pytest.mark.parametrize("name", MODELS)
def test_new_classifiers_of_timms_models(name: str) -> None:
    """``reset_classifier`` with other classes and another pooling, without a classifier, and with one again."""
    pools = ("max", "avg") if name != "deit_distilled" else (None, None)  # it reads two tokens
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    images = torch.randn(2, model.in_chans, *model.patch_embed.img_size)
    for classes, pool in zip((7, 0, 5, 3), (None, None, *pools)):
        model.reset_classifier(classes, pool)
        out = model(images)
        assert out.shape == (2, classes or model.head_hidden_size) and torch.isfinite(out).all()
        heads = [x for head in _classifiers(model) for x in head.parameters()]
        assert all(x.abs().max() <= 1 / math.sqrt(model.head_hidden_size) + 0.1 for x in heads)
        assert bool(heads) == bool(classes)


def _classifiers(model: nn.Module) -> list[nn.Module]:
    heads = model.get_classifier()
    return list(heads) if isinstance(heads, tuple) else [heads]
