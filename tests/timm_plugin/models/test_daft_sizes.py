"""DAFT-full at other image sizes: position biases are resampled as timm resamples positions, with a warning."""

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal

from tests.compare import assert_close, weights
from tests.timm_plugin.helpers.checkpoint_files import randomise
from tests.timm_plugin.helpers.models import build, images
from timm_plugin import replace_attention, tell_grid

#: Biases as factors, or a free matrix.
CASES = ("daft_full", "daft_full_free")


def _resampled(bias: Tensor, old: tuple, new: tuple, prefix: int) -> Tensor:
    """Positions (N, n) on the grid ``old`` resampled to ``new``; class token and registers are unchanged."""
    grid = bias[prefix:].T.reshape(1, -1, *old)  # (N, n) -> (1, n, Y, X)
    grid = F.interpolate(grid, size=new, mode="bicubic", antialias=True)
    return torch.cat([bias[:prefix], grid[0].flatten(1).T])


def _expected(name: str, bias: Tensor, old: tuple, new: tuple, prefix: int) -> Tensor:
    bias = _resampled(bias, old, new, prefix)
    return _resampled(bias.T, old, new, prefix).T if name == "w" else bias  # both ends of a pair


def _biases(model: nn.Module) -> dict:
    return {name: tensor.clone() for name, tensor in weights(model.state_dict()).items() if ".attn.attention." in name}


def _check(model: nn.Module, before: dict, old: tuple, new: tuple, prefix: int) -> None:
    """Check that the biases of ``model`` are ``before`` resampled, and that it runs at its size."""
    after = _biases(model)
    assert set(after) == set(before) and len(after) > 0
    for name, bias in before.items():
        assert_close(name, after[name], _expected(name.rsplit(".")[-1], bias, old, new, prefix))
    x = images(model)
    assert x.shape[2:] == (16 * new[0], 16 * new[1])
    assert model(x).shape == (2, 1000)


def _stock(case: str, **args) -> nn.Module:
    """A stock vision transformer with the attention of ``case``, with its grid set."""
    small = dict(img_size=64, embed_dim=48, depth=2, num_heads=2)
    model = timm.create_model("vit_tiny_patch16_224", **small, **args)
    bias_dim = dict(daft_full=16, daft_full_free=0)[case]
    return randomise(replace_attention(model, "daft_full", bias_dim=bias_dim))


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("make", [build, _stock])
def test_set_input_size_resamples_biases(make, case, prefix):
    """Biases are resampled like timm's positions; ``tell_grid`` does so in a stock model, once."""
    model = make(case, **{0: dict(class_token=False, global_pool="avg"), 1: {}, 3: dict(reg_tokens=2)}[prefix])
    old, before = (4, 4), _biases(model)
    for new in ((6, 2), (2, 6)):  # as many tokens, in another layout
        model.set_input_size((16 * new[0], 16 * new[1]))
        for _ in range(2):
            tell_grid(model)
            _check(model, before, old, new, prefix)
        old, before = new, _biases(model)
    with pytest.raises((ValueError, AssertionError), match="64.*32"):  # our message names both sizes, timm's one side
        model(images(model, size=(64, 64)))


def test_resampled_biases_stay_what_they_were():
    model = build("daft_full").to(torch.bfloat16)
    for parameter in model.blocks[1].attn.attention.parameters():
        parameter.requires_grad_(False)
    model.set_input_size(96)
    for i, block in enumerate(model.blocks):
        attention = block.attn.attention
        assert attention.max_tokens == 37
        for parameter in attention.parameters():
            assert isinstance(parameter, nn.Parameter) and parameter.is_leaf
            assert parameter.dtype == torch.bfloat16 and parameter.requires_grad == (i != 1)
            assert parameter.is_contiguous()


@pytest.mark.parametrize("case", CASES)
def test_another_patch_resamples_biases(case):
    model = build(case)
    before = _biases(model)
    model.set_input_size(patch_size=32)
    after = _biases(model)
    for name, bias in before.items():
        assert_close(name, after[name], _expected(name.rsplit(".")[-1], bias, (4, 4), (2, 2), 1))
    assert model(images(model)).shape == (2, 1000)


def test_parametrised_biases_are_refused():
    model = build("daft_full")
    orthogonal(model.blocks[1].attn.attention, "pe0")
    with pytest.raises(ValueError, match="pe0 of the attention is parametrised"):
        model.set_input_size(96)
    assert model(images(model, size=(64, 64))).shape == (2, 1000)  # nothing has changed


# ---- checkpoints


def _saved(tmp_path, case: str = "daft_full", wrapper: str = "", **args) -> nn.Module:
    """Save a model's state dict in ``tmp_path``, under the key ``wrapper`` ("model" or "state_dict") if given."""
    model = build(case, **args)
    state = model.state_dict()
    torch.save({wrapper: state} if wrapper else state, tmp_path / "full.pth")
    return model


def _loaded(tmp_path, input_size=None, **args) -> nn.Module:
    overlay = dict(file=str(tmp_path / "full.pth"), **(dict(input_size=input_size) if input_size else {}))
    small = {**dict(embed_dim=48, depth=3, bias_dim=16), **args}
    return timm.create_model("daft_full_s", pretrained=True, pretrained_cfg_overlay=overlay, **small).eval()


@pytest.mark.parametrize("case, wrapper", [("daft_full", "model"), ("daft_full_free", "state_dict")])
def test_checkpoint_of_another_size(tmp_path, case, wrapper):
    source = _saved(tmp_path, case, wrapper)
    args = dict(bias_dim=0, query=False) if case == "daft_full_free" else {}
    model = _loaded(tmp_path, img_size=(96, 32), **args)
    _check(model, _biases(source), (4, 4), (6, 2), 1)
    source.set_input_size((96, 32))
    assert_close("logits", model(images(model)), source(images(model)))


def test_non_square_source_needs_its_size(tmp_path):
    source = _saved(tmp_path, img_size=(32, 96))
    model = _loaded(tmp_path, input_size=(3, 32, 96), img_size=64)
    _check(model, _biases(source), (2, 6), (4, 4), 1)
    with pytest.raises(ValueError, match="12 positions .*input_size"):
        _loaded(tmp_path, img_size=64)


def test_as_many_tokens_elsewhere(tmp_path):
    source = _saved(tmp_path, img_size=(32, 96))
    model = _loaded(tmp_path, input_size=(3, 32, 96), img_size=(48, 64))
    _check(model, _biases(source), (2, 6), (3, 4), 1)
    # The checkpoint has another grid with the same number of tokens, and nothing records it.
    same = _loaded(tmp_path, img_size=(32, 96))
    assert_close("logits", same(images(same)), source(images(same)))


def test_checkpoint_of_another_patch(tmp_path):
    """The grid of a source is its own size divided by its own patch size."""
    source = _saved(tmp_path, img_size=(16, 48), patch_size=8)
    model = _loaded(tmp_path, input_size=(3, 16, 48), img_size=64)
    _check(model, _biases(source), (2, 6), (4, 4), 1)
