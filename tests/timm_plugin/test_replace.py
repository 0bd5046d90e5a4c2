"""Another attention in timm's models, when they are created or afterwards, in all layers, by a pattern or in places.

A model keeps its weights, sharing, hooks, freezing, modes, seeds and parametrisations.
"""

import copy
import pickle

import pytest
import timm
import torch
from timm.layers import Attention, DiffAttention
from timm.models import convit, volo
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.compare import assert_close, weights
from tests.timm_plugin.helpers import PATCHES_ONLY, SMALL, VIT, build, images, one_line, randomise, vit, warnings_of
from timm_plugin import attention_layer, create_model, replace_attention
from timm_plugin.layers.attention import SelfAttention

FIVE = dict(SMALL, depth=5)
HIER, HIER_SIZE = "flowformer_hier_test", dict(img_size=64, num_classes=3)


def mechanisms(model: nn.Module) -> list[str]:
    return [getattr(x, "mechanism", "stock") for x in model.modules() if isinstance(x, (SelfAttention, Attention))]


def hier(**arguments) -> nn.Module:
    return timm.create_model(HIER, **HIER_SIZE, **arguments).eval()


def davit() -> nn.Module:
    """A model with attention between tokens in windows, and attention between channels."""
    return timm.create_model("davit_tiny", depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 2), num_classes=3).eval()


def assert_same_at_two_sizes(model: nn.Module, built: nn.Module) -> None:
    """Check that ``model`` loads the weights of ``built`` and computes the same, at another size as well."""
    model.load_state_dict(built.state_dict())
    for size in (64, 96):
        for each in (model, built):
            each.set_input_size(size)
        assert torch.equal(model(images(model)), built(images(built)))


# ---- in stock models


@pytest.mark.parametrize("norms", [{}, dict(qk_norm=True, scale_attn_norm=True, attn_drop_rate=0.5)])
def test_a_stock_model_is_the_one_that_was_created_with_it(norms, caplog):
    """With the same parameters, in evaluation, and in training with the same draws."""
    model = vit(**norms).eval()
    parameters = dict(model.named_parameters())
    layer = attention_layer("flow", form="paper")
    built = [create(VIT, attn_layer=layer, **SMALL, **norms).eval() for create in (timm.create_model, create_model)]
    for each in built:
        each.load_state_dict(model.state_dict())
    assert replace_attention(model, "flow", form="paper") is model
    assert all(dict(model.named_parameters())[name] is parameter for name, parameter in parameters.items())
    assert mechanisms(model) == ["flow", "flow"] and warnings_of(caplog) == []
    for training in (False, True):
        outputs = []
        for each in (model, *built):
            torch.manual_seed(3)
            outputs.append(each.train(training)(images(model)))
        assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: vit(), (2, 3, 32, 32)),
        (lambda: timm.create_model("deit3_small_patch16_224", img_size=64, depth=2), (2, 3, 64, 64)),
        # Its class names contain neither "attention" nor "attn"; VOLO's attention takes maps of tokens.
        (lambda: nn.Sequential(convit.MHSA(24, num_heads=3, qkv_bias=True)), (2, 6, 24)),
        (lambda: nn.Sequential(volo.Attention(24, num_heads=3, qkv_bias=True)), (2, 2, 3, 24)),
    ],
)
def test_softmax_changes_nothing_and_flow_does(make, shape):
    model, x = randomise(make()), torch.randn(shape)
    before = model(x)
    assert_close("output", replace_attention(model, "softmax")(x), before)
    assert (replace_attention(model, "flow")(x) - before).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "small"),
    [
        ("cait_xxs24_224", dict(img_size=64, depth=2)),  # talking heads, and class attention
        ("swin_tiny_patch4_window7_224", dict(depths=(1, 1))),  # relative position biases
        ("vit_base_patch16_xp_224", dict(depth=1, embed_dim=48, num_heads=3)),  # attention inside of the block itself
        ("vit_small_patch16_rope_224", dict(depth=1)),  # rotary positions
        ("resnet18", {}),
    ],
)
def test_other_attention_is_refused_with_the_reason(name, small):
    model = timm.create_model(name, **small)
    before = {path: type(module) for path, module in model.named_modules()}
    one_line(f"model is a {type(model).__name__} .*cannot be replaced", lambda: replace_attention(model, "flow"))
    assert {path: type(module) for path, module in model.named_modules()} == before


def test_what_stays_is_a_warning(caplog):
    """In all of a model; other places than the named ones are no news."""
    model = replace_attention(davit(), "flow")
    (line,) = warnings_of(caplog)
    assert "these stay: ChannelAttention" in line and mechanisms(model) == ["flow", "flow"]
    assert torch.isfinite(model(torch.randn(1, 3, 64, 64))).all()
    caplog.clear()
    model = davit()
    spatial, channel = (
        next(path for path, module in model.named_modules() if kind in type(module).__name__)
        for kind in ("SpatialBlock", "ChannelBlock")
    )
    replace_attention(model, {spatial: "flow"})
    assert warnings_of(caplog) == []
    said = f"attention in {channel} cannot be replaced: ChannelAttention"
    one_line(said, lambda: replace_attention(model, {channel: "flow"}))


def test_numbers_that_no_parameter_shows_tell_kinds_apart():
    """Two layers of one class with equal parameters, the second of which scales its output; and one's own forward."""

    class ScaledAttention(Attention):
        def forward(self, x):
            return super().forward(x) * self.factor

    model = nn.Sequential(ScaledAttention(24, 3), ScaledAttention(24, 3), Attention(24, 3))
    model[0].factor, model[1].factor = 1.0, 2.0
    model[2].forward = lambda x: x
    replace_attention(model, "flow")
    assert [isinstance(layer, SelfAttention) for layer in model] == [True, False, False]


def test_parameters_of_other_widths_are_new_and_values_are_kept(caplog):
    model = vit(**PATCHES_ONLY, img_size=(32, 128))  # 2 x 8 tokens, as many as 4 x 4
    values = model.blocks[1].attn.qkv.weight[-32:].clone()
    replace_attention(model, "daft_conv", window=3)
    assert "new: qkv.weight (2)" in warnings_of(caplog)[-1]
    assert torch.equal(model.blocks[1].attn.qkv.weight[-32:], values)
    assert model(images(model)).shape == (2, 3)
    one_line("DaftConvSelfAttention has the projections of 'daft_conv'", lambda: replace_attention(model, "flow"))


@pytest.mark.parametrize(("name", "stated"), [("soft", {}), ("daft_conv", {"window": 3}), ("cosformer", {})])
def test_stages_have_grids_of_their_own(name, stated):
    assert_same_at_two_sizes(replace_attention(hier(), name, **stated), hier(attn_layer=name, **stated))


def test_ours_are_replaced_again(caplog):
    model = vit(**SMALL)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    replace_attention(model, "linformer")
    replace_attention(model, "linear")
    assert "gone: attention.key_rows (2), attention.value_rows (2)" in warnings_of(caplog)[-1]
    assert all(torch.equal(model.state_dict()[name], x) for name, x in before.items())
    expected = replace_attention(vit(), "linear")
    for each in (model, expected):
        each.eval().set_input_size(64)  # nothing of Linformer's grid remains
    assert_close("logits", model(images(model)), expected(images(model)))
    daft = replace_attention(build("daft_full"), "flow")
    daft.set_input_size(96)
    assert daft(images(daft)).shape == (2, 1000)


# ---- when a model is created


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("vit_base_patch16_xp_224", dict(depth=1)),  # these three ignore it
        ("vit_pwee_patch16_reg1_gap_256", dict(depth=1)),
        ("vit_dpwee_patch16_reg1_gap_256", dict(depth=1)),
        ("eva02_tiny_patch14_224", {}),  # these do not take it
        ("resnet18", {}),
        ("nf_regnet_b0", {}),
    ],
)
def test_a_model_that_does_not_use_it_is_refused(name, arguments):
    for attn_layer in ("flow", "flow*3,softmax"):
        with torch.device("meta"), pytest.raises(ValueError, match=f"attn_layer is 'flow.*', .*{name}"):
            create_model(name, attn_layer=attn_layer, **arguments)


@pytest.mark.parametrize(("attn_layer", "kind"), [("attn", Attention), ("diff", DiffAttention), (Attention, Attention)])
def test_timms_own_attention(attn_layer, kind):
    model = create_model(VIT, attn_layer=attn_layer, **SMALL)
    ours = timm.create_model("flowformer_deit_ti", attn_layer=attn_layer, **SMALL)
    assert all(type(block.attn) is kind for block in (*model.blocks, *ours.blocks))


# ---- patterns and places


@pytest.mark.parametrize("name", [VIT, "flowformer_deit_ti"])
def test_a_pattern_repeats_over_the_blocks(name):
    model = create_model(name, attn_layer="flow*3,softmax", **FIVE).eval()
    replaced = replace_attention(timm.create_model(VIT, **FIVE).eval(), "flow*3,softmax")
    replaced.load_state_dict(model.state_dict())
    assert_close("logits", replaced(images(model)), model(images(model)))
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert mechanisms(each) == ["flow", "flow", "flow", "softmax", "flow"]
        assert torch.equal(each(images(model)), model(images(model)))
    features = create_model(name, attn_layer="flow*3,softmax", features_only=True, out_indices=(3,), **FIVE)
    assert mechanisms(features) == ["flow", "flow", "flow", "softmax"]
    ours = timm.create_model("flowformer_deit_ti", attn_layer="flow, hedgehog", form="paper", rows=5, **FIVE)
    assert ours.blocks[2].attn.options.form == "paper" and ours.blocks[1].attn.options.rows == 5
    with pytest.raises(AssertionError, match="Unknown attn_layer"):  # timm's own function for its own model
        timm.create_model(VIT, attn_layer="flow*3,softmax", **FIVE)


def test_a_pattern_repeats_over_the_stages_of_a_hierarchical_flowformer():
    pattern = "soft,flow*2,cosformer"
    model = hier(attn_layer=pattern, form="paper", ratio=2)
    assert mechanisms(model) == ["soft", "flow", "flow", "flow", "cosformer"]  # the third stage has two blocks
    assert model.stages[0].blocks[0].attn.options.ratio == 2 and model.stages[1].blocks[0].attn.options.form == "paper"
    built = create_model(HIER, attn_layer=pattern, **HIER_SIZE).eval()
    assert built.stages[0].blocks[0].attn.options.ratio == 8  # SOFT's own options, by stage
    assert_same_at_two_sizes(replace_attention(hier(), pattern), built)


def test_places(caplog):
    model = vit(depth=5).eval()
    before, layer = model.blocks[3].attn, attention_layer("lolcats", window=3)
    replace_attention(model, {"blocks.0-1": "flow", "blocks.2.attn": ("hedgehog", {"rows": 7}), "blocks.4": layer})
    assert mechanisms(model) == ["flow", "flow", "hedgehog", "stock", "lolcats"]
    assert model.blocks[3].attn is before
    assert model.blocks[2].attn.attention.query_weight.shape[1] == 7 and type(model.blocks[4].attn) is layer
    (line,) = warnings_of(caplog)
    assert "'flow' (2), 'hedgehog' (1), 'lolcats' (1)" in line and "stay" not in line
    assert torch.isfinite(model(images(model))).all()
    stages = replace_attention(hier(), {"stages.0-1": "soft", "stages.3": "softmax"})
    assert mechanisms(stages) == ["soft", "soft", "flow", "flow", "softmax"]
    first = [stages.stages[i].blocks[0].attn for i in (0, 1)]
    assert [(layer.grid_size, layer.options.ratio) for layer in first] == [((16, 16), 8), ((8, 8), 4)]


def test_a_model_that_builds_its_attentions_in_another_order_is_refused(monkeypatch):
    """Whoever changes a model's blocks after they were built gets no model with other attention than asked for."""

    class Reversed(VisionTransformer):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            self.blocks = nn.Sequential(*reversed(self.blocks))

    monkeypatch.setattr("timm.models.vision_transformer.VisionTransformer", Reversed)
    with pytest.raises(ValueError, match="Reversed does not build its attentions in their order"):
        create_model(VIT, attn_layer="flow,softmax", **SMALL)


# ---- as a guest


def test_a_module_in_two_places_is_replaced_by_one():
    shared = Attention(32, 2)
    model = nn.ModuleDict({"a": nn.Sequential(shared, shared), "b": nn.Sequential(Attention(32, 2), shared)})
    replace_attention(model, "flow")
    layers = [model["a"][0], model["a"][1], model["b"][1]]
    assert all(layer is layers[0] for layer in layers) and isinstance(layers[0], SelfAttention)
    assert isinstance(model["b"][0], SelfAttention) and model["b"][0] is not layers[0]


@pytest.mark.parametrize("name", ["flow", "reformer"])
def test_hooks_are_carried_over_and_do_not_see_the_trial(name, caplog):
    model, calls = vit().train(), []
    attn = model.blocks[0].attn
    note = lambda kind: lambda module, *_: calls.append((kind, module))  # noqa: E731
    handles = [
        attn.register_forward_pre_hook(note("before")),
        attn.register_forward_hook(lambda module, args, kwargs, out: note("after")(module), with_kwargs=True),
        attn.register_full_backward_hook(note("backward")),
        attn.register_state_dict_pre_hook(note("saving")),
        attn.register_load_state_dict_post_hook(note("loaded")),
    ]
    for part in (attn.qkv, attn.proj, attn.attn_drop, attn.proj_drop):
        part.register_forward_hook(note("part"))
    replace_attention(model, name)
    assert calls == []
    replacement = model.blocks[0].attn
    del attn

    def use() -> list[str]:
        calls.clear()
        model(images(model)).sum().backward()
        model.load_state_dict(model.state_dict())
        assert {module for kind, module in calls if kind != "part"} <= {replacement}
        return sorted({kind for kind, _ in calls if kind != "part"})

    assert use() == ["after", "backward", "before", "loaded", "saving"]
    assert ("part", replacement.proj) in calls
    (line,) = (line for line in warnings_of(caplog) if "not called" in line)
    named = {part.split(" ")[0] for part in line.split("not called any more: ")[1].split(", ")}
    assert named == {"attn_drop", *({"qkv"} if name == "reformer" else ())}
    for handle in handles:
        handle.remove()
    assert use() == []


@pytest.mark.parametrize("name", ["flow", "favor", "linformer", "reformer", "rfa"])
def test_seeded_runs_do_not_change(name):
    """New parameters come from a generator that the seed decides, and each layer draws its own."""
    model = vit()
    state = torch.random.get_rng_state()
    replace_attention(model, name)
    assert torch.equal(torch.random.get_rng_state(), state)
    drawn = {key: x.clone() for key, x in weights(model.state_dict()).items()}
    again = replace_attention(vit(), name)
    assert all(torch.equal(x, drawn[key]) for key, x in weights(again.state_dict()).items())
    other = vit()
    torch.manual_seed(7)
    replace_attention(other, name)
    own = [key for key in drawn if ".attn.attention." in key and not key.endswith("sigma") and drawn[key].numel() > 9]
    assert (len(own) > 0) == (name != "flow")
    assert all(not torch.equal(other.state_dict()[key], drawn[key]) for key in own)
    assert all(not torch.equal(drawn[first], drawn[second]) for first, second in zip(own, own[1:]))


@pytest.mark.parametrize("name", ["linformer", "reformer", "daft_conv"])
def test_freezing_modes_and_devices_stay(name, caplog):
    arguments = PATCHES_ONLY if name == "daft_conv" else {}
    model = replace_attention(vit(**arguments).requires_grad_(False).eval(), name)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(module.training for module in model.modules())
    assert "new, and frozen: " in warnings_of(caplog)[-1]
    model = vit(proj_drop_rate=0.5, **arguments).train()
    model.blocks[0].requires_grad_(False)
    model.blocks[0].attn.proj_drop.eval()
    replace_attention(model, name)
    for i, block in enumerate(model.blocks):
        assert all(parameter.requires_grad == (i == 1) for parameter in block.attn.parameters())
        assert block.attn.training and block.attn.attention.training and block.attn.proj_drop.training == (i == 1)
    with torch.device("meta"):
        on_meta = replace_attention(vit(**arguments), name)
    assert all(parameter.is_meta for parameter in on_meta.parameters())


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    "reparametrise",
    [
        parametrizations.orthogonal,
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        lambda qkv: prune.l1_unstructured(qkv, "weight", 0.5),
    ],
)
def test_reparametrised_projections(reparametrise):
    """Our softmax keeps them; a mechanism of other widths would lose them, and refuses."""
    model, x = nn.Sequential(randomise(Attention(32, 2, qkv_bias=True))).eval(), torch.randn(2, 5, 32)
    reparametrise(model[0].qkv)
    names = [name for name, _ in model.named_parameters()]
    before, qkv = model(x), model[0].qkv
    one_line("qkv is a .*; allowed with attention 'reformer'", lambda: replace_attention(model, "reformer"))
    assert isinstance(model[0], Attention)
    replace_attention(model, "softmax")
    assert model[0].qkv is qkv and [name for name, _ in model.named_parameters()] == names
    assert_close("output", model(x), before)
    model.train()(x).sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "qkv" in name)
