"""Every kind of model does what timm's own test suite (its tests/test_models.py) and train.py ask of a model."""

import copy
import math

import pytest
import timm
import torch
from timm.layers import DropPath
from timm.models import FeatureInfo, create_feature_extractor, get_graph_node_names, group_parameters
from timm.optim import create_optimizer_v2
from timm.utils import reparameterize_model
from torch import Tensor
from torch.nn import functional as F

from tests.compare import assert_close, gradients
from tests.golden.make_timm import registered
from tests.timm_plugin.helpers import CASES, HIERARCHICAL, UNITS, build, images, randomise
from timm_plugin import tell_grid
from timm_plugin.layers.attention import SelfAttention

# torchvision notes that stochastic depth adds nodes in training; the last node, the only one used here, is the same.
pytestmark = pytest.mark.filterwarnings(
    "ignore:NOTE. The nodes obtained by tracing:UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
every_case = pytest.mark.parametrize("case", CASES)


@every_case
def test_forward(case):
    model = build(case)
    x = images(model)
    out = model(x)
    assert out.shape == (2, model.num_classes)
    assert_close("one image alone", model(x[:1]), out[:1])
    layout = {"memory_format": torch.channels_last}
    assert_close("channels last", copy.deepcopy(model).to(**layout)(x.to(**layout)), out)
    assert_close("reparameterised, as --reparam", reparameterize_model(copy.deepcopy(model))(x), out)


@every_case
def test_backward_reaches_every_parameter(case):
    model = build(case, num_classes=42, drop_path_rate=0.0).train()
    out = model(images(model))
    assert out.shape == (2, 42)
    out.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("name", [*registered(), "mixer_deit_s"])
def test_default_cfg_is_true(name):
    """Checked at the configured size with one block, since nothing depends on the depth."""
    stages = 3 if name == "flowformer_hier_digits" else 4
    small = dict(depths=(1,) * stages) if "hier" in name else {"num_blocks" if "mixer" in name else "depth": 1}
    model = timm.create_model(name, device="meta", **small).eval()
    cfg = model.default_cfg
    x = torch.empty(1, *cfg["input_size"], device="meta")
    parameters = model.state_dict()
    distilled = isinstance(cfg["classifier"], tuple)
    for layer in (*(cfg["classifier"] if distilled else (cfg["classifier"],)), cfg["first_conv"]):
        assert f"{layer}.weight" in parameters
    assert cfg["architecture"] == name and cfg["tag"] == ("uci_digits" if "digits" in name else "untrained")

    features = model.forward_features(x)
    before_logits = model.forward_head(features, pre_logits=True)
    if cfg["pool_size"]:
        assert features.shape == (1, model.num_features, *cfg["pool_size"])
    assert features.shape[1 if cfg["pool_size"] else -1] == model.num_features
    assert before_logits.shape == (1, model.head_hidden_size)
    assert model(x).shape == (1, model.num_classes) == (1, cfg["num_classes"])
    model.reset_classifier(0)
    assert model.num_classes == 0 and model(x).shape == before_logits.shape
    if not distilled:  # timm's model only pools by its two tokens
        model.reset_classifier(0, "")
        bare = timm.create_model(name, num_classes=0, global_pool="", device="meta", **small)
        assert model(x).shape == bare(x).shape == features.shape


# ---- features


@every_case
def test_forward_intermediates(case):
    model = build(case)
    x = images(model)
    info = FeatureInfo(model.feature_info, len(model.feature_info))
    final, maps = model.forward_intermediates(x)
    assert len(maps) == len(info.channels()) >= 3
    for feature, channels, reduction in zip(maps, info.channels(), info.reduction()):
        assert feature.shape == (2, channels, *(math.ceil(side / reduction) for side in x.shape[2:]))
    assert_close("final", final, model.forward_features(x))
    first, last = model.forward_intermediates(x, indices=[0, -1], intermediates_only=True)
    assert_close("first", first, maps[0])
    assert_close("last", last, maps[-1])
    early = model.forward_intermediates(x, indices=[1], intermediates_only=True, stop_early=True)
    assert_close("stopped early", early[0], maps[1])
    maps = model.forward_intermediates(x, norm=True, intermediates_only=True)
    if case in HIERARCHICAL:
        assert_close("normalised", maps[-1], final)
        with pytest.raises(ValueError, match="output_fmt is NLC; allowed: NCHW"):
            model.forward_intermediates(x, output_fmt="NLC")
        return
    tokens = model.forward_intermediates(x, norm=True, output_fmt="NLC", intermediates_only=True)
    for i, (feature, expected) in enumerate(zip(tokens, maps, strict=True)):
        assert_close(f"tokens {i}", feature, expected.flatten(2).transpose(1, 2))
    assert_close("normalised", tokens[-1], final[:, model.num_prefix_tokens :])
    as_dict = model.forward_intermediates(x, output_fmt="NLC", output_dict=True)
    assert_close("final in a dictionary", as_dict["image_features"], final)
    assert [feature.shape for feature in as_dict["image_intermediates"]] == [feature.shape for feature in tokens]
    assert_close("DINO's interface", model.get_intermediate_layers(x, n=1, norm=True)[0], tokens[-1])


@pytest.mark.parametrize(
    ("case", "feature_cls"),
    [(case, None) for case in CASES] + [("hier", kind) for kind in ("list", "dict", "hook", "fx")],
)
def test_features_only(case, feature_cls):
    whole = build(case)
    further = {} if feature_cls is None else {"feature_cls": feature_cls}
    model = build(case, features_only=True, **further)
    features = model(images(whole))
    features = list(features.values()) if isinstance(features, dict) else features
    expected = whole.forward_intermediates(images(whole), intermediates_only=True)
    for i, (feature, wanted) in enumerate(zip(features, expected, strict=True)):
        assert_close(f"features {i}", feature, wanted)
    assert model.feature_info.reduction() == ([4, 8, 16, 32] if case in HIERARCHICAL else [16, 16, 16])
    assert model.feature_info.channels() == [feature.shape[1] for feature in features]
    if feature_cls is None:
        (feature,) = build(case, features_only=True, out_indices=(1,))(images(whole))
        assert_close("one", feature, expected[1])


@every_case
def test_prune_intermediate_layers(case):
    model, bare = build(case), build(case)
    x = images(model)
    expected = model.forward_intermediates(x, indices=[0, 1], intermediates_only=True)
    assert model.prune_intermediate_layers([0, 1]) == [0, 1]
    assert len(model.stages if case in HIERARCHICAL else model.blocks) == 2
    pruned = model.forward_intermediates(x, indices=[0, 1], intermediates_only=True)
    for i, feature in enumerate(pruned):
        assert_close(f"features {i}", feature, expected[i])
    assert model.num_classes == 0 and torch.isfinite(model(x)).all()
    bare.prune_intermediate_layers([0, 1], prune_norm=True)
    assert bare.forward_features(x).dim() == (4 if case in HIERARCHICAL else 3)
    if case in HIERARCHICAL:  # with fewer channels and a new classifier
        model.reset_classifier(7, "avg")
        assert model(x).shape == (2, 7)


# ---- programs


@pytest.mark.parametrize("case", ["deit_distilled", "daft_gumbel", "daft_conv_vit"])
def test_torchscript(case):
    """With timm's ``scriptable=True``, as its scripts' ``--torchscript``. A table of operations has other kinds."""
    model = build(case, scriptable=True)
    assert_close("scripted", torch.jit.script(model)(images(model)), model(images(model)))


def test_torchscript_of_stages():
    """It accepts and refuses sizes as the model, and attention that it cannot run is named."""
    fixed, dynamic = build("hier", scriptable=True), build("hier", dynamic_img_size=True, scriptable=True)
    x = images(fixed, size=(36, 100))
    with pytest.raises(torch.jit.Error, match="x has image size 36 x 100"):
        torch.jit.script(fixed)(x)
    assert_close("another size", torch.jit.script(dynamic)(x), dynamic(x))
    for case in ("hier_soft", "hier_cosformer"):
        with pytest.raises(ValueError, match="allowed for torch.jit.script: .*flow, daft_full and daft_conv"):
            torch.jit.script(build(case, scriptable=True))


@every_case
def test_fx_forward_is_exact_and_backward_reaches_every_parameter(case):
    model = build(case, num_classes=42)
    train_nodes, eval_nodes = get_graph_node_names(model)
    assert train_nodes[-1] == eval_nodes[-1]
    traced = create_feature_extractor(model, {eval_nodes[-1]: "out"}).eval()
    with torch.inference_mode():
        for x in (images(model), images(model, batch=3)):
            assert torch.equal(traced(x)["out"], model(x))
    traced.train()(images(model))["out"].square().mean().backward()
    for name, parameter in traced.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
    assert sum(p.numel() for p in traced.parameters()) == sum(p.numel() for p in model.parameters())


# ---- sizes


@every_case
def test_set_input_size_is_a_model_of_that_size(case):
    """On a grid with odd sides; positions keep whether they learn, and are those of timm's resampling."""
    model = build(case)
    step = 4 if case in HIERARCHICAL else 16
    size = (5 * step, 9 * step)
    positions = getattr(model.pos_embed, "weight", model.pos_embed)
    if positions is not None:
        positions.requires_grad_(False)
    model.set_input_size(img_size=size)
    if case == "daft_conv_vit":
        tell_grid(model)
    built = build(case, img_size=size)
    built.load_state_dict(model.state_dict())
    x = images(built)
    assert_close("logits", model(x), built(x))
    assert model.patch_embed.grid_size == (5, 9)
    after = getattr(model.pos_embed, "weight", model.pos_embed)
    assert after is None or after.is_leaf and not after.requires_grad


@pytest.mark.parametrize(
    ("case", "attn_layer", "size"),
    [("hier", "flow", size) for size in ((64, 64), (96, 40), (4, 4))]
    + [("hier", "soft", (36, 100)), ("hier", "daft_conv", (36, 100)), ("daft_conv", None, (48, 80))],
)
def test_a_model_for_any_size_is_one_of_that_size(case, attn_layer, size):
    given = {"attn_layer": attn_layer} if attn_layer else {}
    dynamic = build(case, **given, **({"dynamic_img_size": True} if case == "hier" else {}))
    fixed = build(case, **given)
    fixed.load_state_dict(dynamic.state_dict())
    fixed.set_input_size(size)
    x = images(dynamic, size=size)
    assert_close("logits", dynamic(x), fixed(x))


@pytest.mark.parametrize("size", [(50, 61), (3, 64)])
@pytest.mark.parametrize("case", ["hier", "hier dynamic", "daft_conv"])
def test_padding_to_whole_patches(case, size):
    case, _, dynamic = case.partition(" ")
    further = {"dynamic_img_size": True} if dynamic else {}
    model = build(case, img_size=size, dynamic_img_pad=True, **further)
    step = model.patch_embed.patch_size[0]
    height, width = (math.ceil(side / step) * step for side in size)
    reference = build(case, img_size=(height, width))
    reference.load_state_dict(model.state_dict())
    x = images(model)
    padded = F.pad(x, (0, width - size[1], 0, height - size[0]))
    assert_close("logits", model(x), reference(padded))
    assert_close("features", model.forward_intermediates(x)[0], reference.forward_features(padded))


def test_patches_of_another_size():
    model = build("hier")
    model.set_input_size(patch_size=8)
    assert [info["reduction"] for info in model.feature_info] == [8, 16, 32, 64]
    assert [x.shape[2] for x in model.forward_intermediates(images(model))[1]] == [8, 4, 2, 1]


def test_odd_maps_are_padded_at_the_end():
    """Like a model whose maps have an even number of rows, the last of which is zeros."""
    model = build("hier", img_size=(20, 32), depths=(1, 1), embed_dims=(16, 24))
    x = images(model)
    first = model.stages[0](model.pos_embed(model.patch_embed(x)))  # 5 x 8
    expected = model.stages[1].downsample.proj(F.pad(first, (0, 0, 0, 1)))
    assert_close("second map", model.stages[1].downsample(first), expected)
    assert [tuple(maps.shape[2:]) for maps in model.forward_intermediates(x)[1]] == [(5, 8), (3, 4)]


# ---- precision and training


@every_case
def test_precisions(case):
    """Cast, under autocast, and built and trained in a dtype."""
    model = build(case)
    x = images(model)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close("autocast", model(x), expected, 3e-2)
    for dtype, tolerance in ((torch.float16, 5e-3), (torch.bfloat16, 3e-2)):
        assert_close(f"{dtype}", build(case).to(dtype)(x.to(dtype)), expected, tolerance)
    model = build(case, dtype=torch.bfloat16)
    if case in HIERARCHICAL:  # older versions of timm do not keep it in their own models
        model.reset_classifier(5)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    out = model.train()(x.bfloat16())
    assert out.dtype == torch.bfloat16
    out.sum().backward()


@every_case
def test_checkpointing_recomputes_every_block(case):
    """Gradients are the same, under autocast as well; switched off, nothing is computed twice."""
    model = build(case).train()
    for module in model.modules():
        if isinstance(module, DropPath):
            module.drop_prob = 0.0
    x, calls = images(model), []
    watched = [module for module in model.modules() if isinstance(module, SelfAttention)]
    watched = watched or list(model.blocks)
    for module in watched:
        module.register_forward_pre_hook(lambda *_: calls.append(1))  # recomputing stops before a last one ends
    parameters = dict(model.named_parameters())

    def computed(times: int, autocast: bool) -> tuple[Tensor, ...]:
        calls.clear()
        torch.manual_seed(1)  # of the samples that a selection draws
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(x)
        found = gradients(out, parameters.values())
        assert len(calls) == times * len(watched)
        return found

    for autocast in (False, True):
        model.set_grad_checkpointing(False)
        expected = computed(1, autocast)
        model.set_grad_checkpointing()
        for name, gradient, other in zip(parameters, computed(2, autocast), expected):
            assert_close(f"gradient of {name}", gradient, other)
    assert_close("final features", model.eval().forward_intermediates(x)[0], model.forward_features(x))


@every_case
def test_weight_and_layer_decay(case):
    model = build(case)
    names = dict(model.named_parameters())
    wanted = model.no_weight_decay()
    if case in HIERARCHICAL:
        assert wanted == {"pos_embed.weight"} <= set(names)
    else:
        stock = {"pos_embed", "cls_token", "dist_token"} & set(names)
        # timm's own model does not know the parts of a layer.
        filters = {name for name in names if ".attn.attention." in name and case != "daft_conv_vit"}
        units = {name for name in names if case in UNITS and name.endswith((".gamma", ".beta", ".bias.weight"))}
        assert wanted & set(names) == stock | filters | units
    optimizer = create_optimizer_v2(model, "adamw", lr=1.0, weight_decay=0.05, layer_decay=0.5)
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, p in names.items():
        assert (group_of[id(p)]["weight_decay"] == 0.0) == (p.ndim <= 1 or name in wanted), name
    scale = {name: group_of[id(p)]["lr_scale"] for name, p in names.items()}
    layers = list(model.stages[0].blocks if case in HIERARCHICAL else model.blocks)
    first = layers[0].in_proj if case in UNITS else layers[0].attn.qkv
    assert scale["patch_embed.proj.weight"] == min(scale.values()) < group_of[id(first.weight)]["lr_scale"] < 1.0
    assert {scale[name] for name in scale if name.startswith("head") and name.endswith("weight")} == {1.0}


@pytest.mark.parametrize("coarse", [True, False])
def test_groups_of_a_hierarchical_model_follow_its_depth(coarse):
    model = build("hier")
    layers = group_parameters(model, model.group_matcher(coarse), reverse=True)
    assert set(layers) == {name for name, _ in model.named_parameters()}
    assert {layers[name] for name in layers if name.startswith(("patch_embed", "pos_embed"))} == {0}
    blocks = [(i, j) for i, stage in enumerate(model.stages) for j in range(len(stage.blocks))]
    for name, layer in layers.items():
        if name.startswith("stages."):
            i, part, j = name.split(".")[1:4]
            block = (int(i), int(j) if part == "blocks" else 0)
            assert layer == 1 + (int(i) if coarse else blocks.index(block)), name
    assert layers["norm.weight"] < layers["head.fc.weight"] + coarse


# ---- arguments

_RATES = dict.fromkeys(("drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"), 0.5)
_FLOW = dict(form="paper", clamp="0.3", phi="relu", competition="none", allocation="none")
#: Case -> arguments that change the output in training.
EFFECTS = {
    "hier": {**_RATES, **_FLOW, "pos_drop_rate": 0.5, "init_values": 0.1, "mlp_init_values": 0.1, "qk_norm": True}
    | {"act_layer": "relu", "norm_layer": "rmsnorm", "attn_layer": "linear", "global_pool": "max"},
    "deit": {**_RATES, **_FLOW, "init_values": 0.1, "attn_layer": "softmax"},
    "daft_full": {**_RATES, "bias_dim": 0, "query": False},
    "daft_conv": {**_RATES, "window": (3, 5), "query": False, "local_only": True, "reparameterize": False},
    "flash": {**_RATES, "init_values": 0.1, "chunk_rows": 1, "kernel": "laplace"},
}


@pytest.mark.parametrize(("case", "name"), [(case, name) for case, names in EFFECTS.items() for name in names])
@pytest.mark.filterwarnings("ignore:.*do not say which attention:UserWarning")
def test_an_argument_has_an_effect(case, name):
    """With the same weights, as far as there are such; a rate has none in evaluation, and one in training."""
    plain, other = randomise(build(case)), build(case, **{name: EFFECTS[case][name]})
    own = other.state_dict()
    shared = {key: x for key, x in plain.state_dict().items() if key in own and "_extra_state" not in key}
    other.load_state_dict({key: x for key, x in shared.items() if x.shape == own[key].shape}, strict=False)
    x = images(plain)
    outputs = []
    for model in (plain, other):
        torch.manual_seed(2)
        outputs.append(model.train()(x))
    assert (outputs[0] - outputs[1]).abs().max() > 1e-4
    if name in _RATES or name == "pos_drop_rate":
        assert torch.equal(other.eval()(x), plain.eval()(x))
        other.reset_classifier(7)
        assert name != "drop_rate" or not torch.equal(other.train()(x), other(x))
