"""Models whose layers have several kinds of attention: by a repeating pattern, or by module paths."""

import copy
import pickle

import pytest
import timm
import torch
from timm.layers import Attention

from tests.compare import assert_close
from tests.timm_plugin.helpers.logs import warnings_of
from tests.timm_plugin.helpers.models import images
from timm_plugin import attention_layer, create_model, replace_attention
from timm_plugin.layers.attention import SelfAttention
from timm_plugin.layers.layer_spec import LayerSpec, check_stack, stack

SMALL = dict(img_size=32, depth=5, embed_dim=48, num_heads=3, num_classes=3)
HIER = dict(img_size=64, num_classes=3)
PATTERN = "flow*3,softmax"
VIT, HIER_NAME = "vit_tiny_patch16_224", "flowformer_hier_test"


def mechanisms(model: torch.nn.Module) -> list[str]:
    return [getattr(x, "mechanism", "stock") for x in model.modules() if isinstance(x, (SelfAttention, Attention))]


@pytest.mark.parametrize("name", [VIT, "flowformer_deit_ti"])
def test_a_pattern_repeats_over_the_blocks(name):
    model = create_model(name, attn_layer=PATTERN, **SMALL).eval()
    assert mechanisms(model) == ["flow", "flow", "flow", "softmax", "flow"]
    replaced = replace_attention(timm.create_model(VIT, **SMALL).eval(), PATTERN)
    replaced.load_state_dict(model.state_dict())
    assert_close("logits", replaced(images(model)), model(images(model)))


def test_timms_own_create_model_takes_patterns_for_our_models_and_refuses_them_for_its_own():
    model = timm.create_model("flowformer_deit_ti", attn_layer="flow, hedgehog", form="paper", rows=5, **SMALL)
    assert mechanisms(model) == ["flow", "hedgehog", "flow", "hedgehog", "flow"]
    assert model.blocks[2].attn.options.form == "paper" and model.blocks[1].attn.options.rows == 5
    with pytest.raises(AssertionError, match="Unknown attn_layer"):
        timm.create_model(VIT, attn_layer=PATTERN, **SMALL)


def test_mechanisms_that_must_know_the_tokens_are_told():
    model = create_model(VIT, attn_layer="cosformer,daft_full,softmax", **SMALL)
    assert [x.attn.max_tokens for x in model.blocks[:2]] == [5, 5]
    on_grid = dict(SMALL, class_token=False, global_pool="avg", img_size=(32, 64))
    for model in (
        create_model(VIT, attn_layer="daft_conv,flow", **on_grid),
        replace_attention(timm.create_model(VIT, **on_grid), {"blocks.0": ("daft_conv", {"window": 3})}),
    ):
        assert model.blocks[0].attn.grid_size == (2, 4)
        model(images(model))


def test_a_pattern_repeats_over_the_stages_of_a_hierarchical_flowformer():
    args = dict(HIER, form="paper", ratio=2)
    model = timm.create_model(HIER_NAME, attn_layer="soft,flow*2,cosformer", **args).eval()
    assert mechanisms(model) == ["soft", "flow", "flow", "flow", "cosformer"]  # the third stage has two blocks
    assert model.stages[0].blocks[0].attn.options.ratio == 2 and model.stages[1].blocks[0].attn.options.form == "paper"
    built = create_model(HIER_NAME, attn_layer="soft,flow*2,cosformer", **HIER).eval()
    assert built.stages[0].blocks[0].attn.options.ratio == 8  # SOFT's own options, by stage
    replaced = replace_attention(timm.create_model(HIER_NAME, **HIER).eval(), "soft,flow*2,cosformer")
    replaced.load_state_dict(built.state_dict())
    assert torch.equal(replaced(images(built)), built(images(built)))
    for changed in (built, replaced):
        changed.set_input_size(96)
    assert torch.equal(replaced(images(built)), built(images(built)))


def test_flow_in_a_pattern_has_the_released_form_in_the_released_model():
    with torch.device("meta"):
        model = timm.create_model("flowformer_hier_s_12h", attn_layer=PATTERN)
    assert model.stages[0].blocks[0].attn.options.form == "released_vision"


def test_places(caplog):
    torch.manual_seed(0)
    model = timm.create_model(VIT, **SMALL).eval()
    before = model.blocks[3].attn
    layer = attention_layer("lolcats", window=3)
    replace_attention(model, {"blocks.0-1": "flow", "blocks.2.attn": ("hedgehog", {"rows": 7}), "blocks.4": layer})
    assert mechanisms(model) == ["flow", "flow", "hedgehog", "stock", "lolcats"]
    assert model.blocks[3].attn is before
    assert model.blocks[2].attn.attention.query_weight.shape[1] == 7 and type(model.blocks[4].attn) is layer
    (line,) = warnings_of(caplog)
    assert "4 attentions are others now: 'flow' (2), 'hedgehog' (1), 'lolcats' (1)" in line
    assert "python -m timm_plugin.transfer" in line and "stay" not in line
    assert torch.isfinite(model(images(model))).all()


def test_places_of_stages_know_their_grids():
    model = replace_attention(
        timm.create_model(HIER_NAME, **HIER).eval(), {"stages.0-1": "soft", "stages.3": "softmax"}
    )
    assert mechanisms(model) == ["soft", "soft", "flow", "flow", "softmax"]
    assert [model.stages[i].blocks[0].attn.grid_size for i in (0, 1)] == [(16, 16), (8, 8)]
    assert [layer.options.ratio for layer in (model.stages[0].blocks[0].attn, model.stages[1].blocks[0].attn)] == [8, 4]
    assert torch.isfinite(model(images(model))).all()


def test_what_stays_outside_of_the_places_is_no_warning(caplog):
    model = timm.create_model("davit_tiny", depths=(1, 1, 1, 1), num_classes=3)
    inside = next(path for path, module in model.named_modules() if "SpatialBlock" in type(module).__name__)
    replace_attention(model, {inside: "flow"})
    assert warnings_of(caplog) == []


def test_a_place_without_attention_that_can_be_replaced_is_refused():
    model = timm.create_model("davit_tiny", depths=(1, 1, 1, 1), num_classes=3)
    inside = next(path for path, module in model.named_modules() if "ChannelBlock" in type(module).__name__)
    with pytest.raises(ValueError, match=f"attention in {inside} cannot be replaced: ChannelAttention"):
        replace_attention(model, {inside: "flow"})


@pytest.mark.parametrize(
    ("name", "pattern", "said"),
    [
        (VIT, "flow*9,softmax", "attn_layer is .*a pattern of 10 layers; allowed: of at most 5"),
        ("flowformer_deit_ti", "flow*9,softmax", "attn_layer is .*of at most 5"),
        (HIER_NAME, "flow*9,softmax", "attn_layer is .*of at most 4"),
        (VIT, "flow,attn", "with 'attn'"),  # timm's own: softmax is ours
        ("vit_base_patch16_xp_224", PATTERN, "attn_layer is 'flow.*does not use it"),
        ("resnet18", PATTERN, "attn_layer is 'flow.*resnet18"),
    ],
)
def test_patterns_that_do_not_fit_a_model(name, pattern, said):
    args = {VIT: SMALL, "flowformer_deit_ti": SMALL, "vit_base_patch16_xp_224": dict(depth=1)}.get(name, {})
    with torch.device("meta"), pytest.raises(ValueError, match=said):
        create_model(name, attn_layer=pattern, **args)


def test_a_model_that_builds_its_attentions_in_another_order_is_refused():
    layer = stack(LayerSpec("flow,softmax*2"))
    model = timm.models.vision_transformer.VisionTransformer(attn_layer=layer, **dict(SMALL, depth=3))
    check_stack(layer, model)
    model.blocks = torch.nn.Sequential(*reversed(model.blocks))
    with pytest.raises(ValueError, match="VisionTransformer does not build its attentions in their order"):
        check_stack(layer, model)


def test_copies_pickles_and_files_keep_the_mechanisms():
    model = create_model(VIT, attn_layer="flow,hedgehog*2", **SMALL).eval()
    expected = model(images(model))
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert mechanisms(same) == mechanisms(model)
        assert torch.equal(same(images(model)), expected)
    again = create_model(VIT, attn_layer="flow,hedgehog*2", **SMALL).eval()
    again.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(again(images(model)), expected)
    other = create_model(VIT, attn_layer="hedgehog,flow*2", **SMALL)
    with pytest.raises(RuntimeError, match="attention.query_weight"):
        other.load_state_dict(model.state_dict())


def test_a_stack_of_other_kinds_is_a_warning():
    """Only the record distinguishes flow's weights from those of linear attention."""
    weights = create_model(VIT, attn_layer="flow,linear", **SMALL).state_dict()
    with pytest.warns(UserWarning, match="attention='linear'.*attention='flow'"):
        create_model(VIT, attn_layer="linear,flow", **SMALL).load_state_dict(weights)


def test_blocks_are_pruned_from_the_end():
    model = create_model(VIT, attn_layer=PATTERN, **SMALL).eval()
    model.prune_intermediate_layers([3])
    assert mechanisms(model) == ["flow", "flow", "flow", "softmax"]
    features = create_model(VIT, attn_layer=PATTERN, features_only=True, out_indices=(1,), **SMALL)
    assert set(mechanisms(features)) == {"flow"}
    features(images(model))
