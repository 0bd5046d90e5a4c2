"""FLASH for images: gated attention units as blocks of timm's vision transformer."""

import pytest
import timm
import torch
from timm.layers import DropPath, LayerScale

from common.modules.gated_attention_unit import GatedAttentionUnit
from tests.compare import assert_close
from tests.timm_plugin.helpers.models import build, images
from timm_plugin.layers.position_bias import GridBias

NAMES = ("flash_vit_s", "flash_quad_vit_s")


def test_shape_of_deit_s():
    for name in NAMES:
        model = timm.create_model(name, device="meta")
        assert model.embed_dim == 384 and len(model.blocks) == 24  # two units in place of each of DeiT-S's 12 blocks
        assert {(unit.expanded_dim, unit.query_dim, unit.heads) for unit in model.blocks} == {(768, 64, 1)}
    chunks = [unit.chunk_size for unit in timm.create_model("flash_vit_s", device="meta").blocks]
    assert chunks == [28] * 24  # two rows of 14 patches
    assert model.blocks[0].chunk_size is None


@pytest.mark.parametrize("case", ["flash", "flash_quad"])
def test_a_block_is_the_unit_on_the_rows_of_an_image(case):
    torch.manual_seed(0)
    block = build(case).blocks[0].double()
    kind = dict(chunk_size=8) if case == "flash" else dict(chunk_size=None, max_positions=16)
    unit = GatedAttentionUnit(48, query_dim=16, bias="none", **kind).double().eval()
    weights = {name: x for name, x in block.state_dict().items() if "bias.weight" not in name and "_extra" not in name}
    unit.load_state_dict({**unit.state_dict(), **weights})
    unit.norm = block.norm  # timm has another epsilon
    x = torch.randn(2, 16, 48, dtype=torch.float64)
    assert (block(x) - unit(x)).abs().max() > 1e-9
    block.bias.weight.data.zero_()
    assert_close("block", block(x), unit(x))


def test_bias_by_hand():
    bias = GridBias((2, 3), heads=2)
    for query in range(6):
        for key in range(6):
            down, right = query // 3 - key // 3, query % 3 - key % 3
            assert torch.equal(bias(6)[:, query, key], bias.weight[:, down + 1, right + 2])
    with pytest.raises(ValueError, match="x has 5 tokens; allowed by its relative bias: 2 x 3"):
        bias(5)


def test_bias_of_another_size_keeps_the_nearest_and_the_farthest():
    bias = GridBias((4, 4))
    before = bias.weight.detach().clone()
    bias.set_grid_size((4, 4))
    assert torch.equal(bias.weight, before)
    bias.set_grid_size((4, 10))
    assert bias.weight.shape == (1, 7, 19)
    assert_close("distances of three columns", bias.weight[:, :, ::9], before[:, :, ::3])


def test_chunks_are_rows_at_every_size():
    model = build("flash")
    assert {unit.chunk_size for unit in model.blocks} == {8}
    model.set_input_size((48, 160))
    assert {unit.chunk_size for unit in model.blocks} == {20}
    built = build("flash", img_size=(48, 160))
    built.load_state_dict(model.state_dict())
    x = images(built)
    assert_close("logits", model(x), built(x))


@pytest.mark.parametrize("case", ["flash", "flash_quad"])
def test_a_file_of_another_size_is_a_start_as_set_input_size(case):
    stored = build(case)
    weights = {name: x.clone() for name, x in stored.state_dict().items()}
    small = build(case, img_size=96, pretrained=True, pretrained_cfg_overlay=dict(state_dict=weights))
    stored.set_input_size(96)
    x = images(small)
    assert_close("logits", small(x), stored(x))


def test_drop_path_and_layer_scale_are_of_the_branch():
    model = build("flash", drop_path_rate=0.2, init_values=0.5, proj_drop_rate=0.1)
    rates = [part.drop_prob for unit in model.blocks for part in unit.modules() if isinstance(part, DropPath)]
    assert rates == pytest.approx([0.0, 0.1, 0.2])
    assert [unit.dropout.drop.p for unit in model.blocks] == [0.1] * 3
    assert all(isinstance(unit.dropout.ls, LayerScale) for unit in model.blocks)
    x = torch.randn(1, 16, 48)
    before = model.blocks[0](x)
    model.blocks[0].dropout.ls.gamma.data.zero_()
    assert_close("an empty branch", model.blocks[0](x), x)
    assert (before - x).abs().max() > 0


def test_a_file_of_another_meaning_is_said():
    stored = build("flash").state_dict()
    with pytest.warns(UserWarning, match="kernel='relu2'.*kernel='laplace'"):
        build("flash", kernel="laplace").load_state_dict(stored)
    with pytest.raises(ValueError, match="bias.weight"):
        build("flash", chunk_rows=1, pretrained=True, pretrained_cfg_overlay=dict(state_dict=dict(stored)))
