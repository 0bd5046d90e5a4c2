"""Attention transfer in both hosts: the same mechanisms can learn with the same losses."""

from pathlib import Path

import pytest
import torch
from fairseq.models import MODEL_REGISTRY
from torch import nn

import fairseq_plugin  # noqa: F401  registers the architectures
from common.attention import ATTENTIONS
from fairseq_plugin.modules.converted import converted_attentions
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.transfer import make_pair, make_sample
from timm_plugin.layers.attention import attention_layer, usable_mechanisms
from timm_plugin.transfer import AttentionImitation

WIDTH, HEADS, LENGTH = 16, 2, 64
#: The mechanisms that both hosts can use in place of softmax attention.
NAMES = [
    name
    for name in usable_mechanisms()
    if name != "softmax" and getattr(MODEL_REGISTRY.get(f"{name}_mlm"), "stock_model", None)
]


def _layer_of(name: str, attention: nn.Module) -> nn.Module:
    """timm's layer with the weights of a fairseq layer."""
    inner = getattr(attention, "inner", None)
    options = {} if inner is None else inner.options.as_dict()
    layer = attention_layer(name, max_tokens=LENGTH, grid_size=(1, LENGTH), **options)(WIDTH, HEADS, qkv_bias=True)
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    with torch.no_grad():
        for kind in ("weight", "bias"):
            getattr(layer.qkv, kind).copy_(torch.cat([getattr(x, kind) for x in projections]))
    if inner is not None:
        layer.attention.load_state_dict(inner.state_dict())
    return layer.eval()


@pytest.mark.parametrize("name", NAMES)
def test_both_hosts_have_the_same_loss(name: str, tmp_path: Path) -> None:
    """Compares the first layer of a masked model, without padding; both refuse a mechanism without such weights."""
    one_layer = ("--encoder-layers", "1")
    pair = make_pair(tmp_path, "mlm", f"{name}_mlm", one_layer, lineartime_trained_parameters="attention")
    sample = make_sample("mlm", length=LENGTH)
    ((path, student),) = converted_attentions(pair.student.eval()).items()
    for loss in ("outputs", "weights"):
        criterion, inputs = pair.transfer(loss), []
        teacher = criterion.teacher.read().get_submodule(path)
        teacher.register_forward_pre_hook(lambda _, args, given, x=inputs: x.append(given["query"]), with_kwargs=True)
        layers = _layer_of("softmax", teacher), _layer_of(name, student)
        if loss == "weights" and not ATTENTIONS[name].weighted_mean:
            with pytest.raises(ValueError, match=f"--transfer-loss is weights and {path} is {name} attention"):
                criterion(pair.student, sample)
            with pytest.raises(ValueError, match=f"loss is weights and .* {name} attention"):
                AttentionImitation(*layers, loss)
            continue
        total, size, _ = criterion(pair.student, sample)
        imitation = AttentionImitation(*layers, loss)
        imitation(inputs[0].transpose(0, 1))
        assert_close(loss, imitation.collect()[0], (total / size).detach(), floor=1.0)  # 0 if a window has all
