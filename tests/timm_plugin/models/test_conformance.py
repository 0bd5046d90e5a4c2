"""Our models pass the checks that timm's own test suite runs on every registered model (its tests/test_models.py)."""

import math
import warnings

import pytest
import timm
import torch
from timm.models import FeatureInfo, create_feature_extractor, get_graph_node_names
from torch import Tensor, nn

from common.attention.soft import SoftAttention
from tests.compare import assert_close
from tests.timm_plugin.helpers.models import CASES, COLUMNAR, HIERARCHICAL, NOT_SCRIPTABLE, REGISTERED, build, images

# torchvision notes that stochastic depth adds nodes in training; the last node, the only one used here, is the same.
pytestmark = pytest.mark.filterwarnings("ignore:NOTE. The nodes obtained by tracing:UserWarning")


@pytest.mark.parametrize("case", CASES)
def test_forward(case):
    model = build(case)
    x = images(model)
    out = model(x)
    assert out.shape == (2, model.num_classes)
    assert torch.isfinite(out).all()
    assert_close("one image alone", model(x[:1]), out[:1])
    model.set_grad_checkpointing()
    assert_close("with checkpointing", model(x), out)


@pytest.mark.parametrize("case", CASES)
def test_backward_reaches_every_parameter(case):
    model = build(case, num_classes=42, drop_path_rate=0.0).train()
    out = model(images(model))
    assert out.shape == (2, 42)
    out.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("name", REGISTERED)
def test_default_cfg_is_true(name):
    """Checked at the configured size with one block, since nothing depends on the depth."""
    stages = 3 if name == "flowformer_hier_digits" else 4
    small = dict(depths=(1,) * stages) if "hier" in name else {"num_blocks" if "mixer" in name else "depth": 1}
    model = timm.create_model(name, device="meta", **small).eval()
    cfg = model.default_cfg
    x = torch.empty(1, *cfg["input_size"], device="meta")
    parameters = model.state_dict()
    distilled = isinstance(cfg["classifier"], tuple)
    for classifier in cfg["classifier"] if distilled else (cfg["classifier"],):
        assert classifier + ".weight" in parameters
    assert cfg["first_conv"] + ".weight" in parameters
    assert cfg["architecture"] == name
    assert model.num_classes == cfg["num_classes"]

    features = model.forward_features(x)
    before_logits = model.forward_head(features, pre_logits=True)
    hierarchical = cfg["pool_size"] is not None
    if hierarchical:
        assert features.shape == (1, model.num_features, *cfg["pool_size"])
    else:
        assert features.shape[-1] == model.num_features
    assert before_logits.shape == (1, model.head_hidden_size)
    assert model(x).shape == (1, cfg["num_classes"])

    model.reset_classifier(0)
    assert model.num_classes == 0
    assert model(x).shape == before_logits.shape
    if distilled:  # timm's model only pools by its two tokens
        return
    model.reset_classifier(0, "")
    assert model(x).shape == features.shape
    bare = timm.create_model(name, num_classes=0, global_pool="", device="meta", **small)
    assert bare(x).shape == features.shape


@pytest.mark.parametrize("case", CASES)
def test_torchscript(case):
    model = build(case, scriptable=True)
    if case in NOT_SCRIPTABLE:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            with pytest.raises(ValueError, match="allowed for torch.jit.script: .*flow, daft_full and daft_conv"):
                torch.jit.script(model)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch announces the end of torch.jit
        scripted = torch.jit.script(model)
        graph = torch.jit.script(_traced(model).eval()) if case == "hier" else None
    x = images(model)
    assert_close("scripted", scripted(x), model(x))
    if graph is not None:
        assert_close("scripted FX graph", graph(x)["out"], model(x))


@pytest.mark.parametrize("dynamic", [True, False])
def test_torchscript_sizes(dynamic):
    model = build("hier", dynamic_img_size=dynamic, scriptable=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        scripted = torch.jit.script(model)
    other = images(model, size=(36, 100))
    if dynamic:
        assert_close("another size", scripted(other), model(other))
    else:
        with pytest.raises(torch.jit.Error, match="x has image size 36 x 100"):
            scripted(other)


@pytest.mark.parametrize("feature_cls", ["list", "dict", "hook", "fx", "getter"])
@pytest.mark.parametrize("case", HIERARCHICAL)
def test_features_only_hierarchical(case, feature_cls):
    whole = build(case)
    model = build(case, features_only=True, feature_cls=feature_cls)
    x = images(whole)
    features = model(x)
    features = list(features.values()) if isinstance(features, dict) else features
    _, expected = whole.forward_intermediates(x)
    reductions = model.feature_info.reduction()
    assert reductions == [4, 8, 16, 32][: len(reductions)]
    assert len(features) == len(expected) == len(model.feature_info.channels())
    for i, (feature, channels, reduction) in enumerate(zip(features, model.feature_info.channels(), reductions)):
        assert feature.shape == (2, channels, *(math.ceil(side / reduction) for side in x.shape[2:]))
        assert_close(f"features {i}", feature, expected[i])
    if feature_cls == "getter":
        model = build(case, features_only=True, out_indices=(0, 1), feature_cls=feature_cls)
        assert len(model.model.stages) == 2
        assert [feature.shape for feature in model(x)] == [feature.shape for feature in expected[:2]]


@pytest.mark.parametrize("case", COLUMNAR)
def test_features_only_columnar(case):
    whole = build(case)
    model = build(case, features_only=True)
    features = model(images(whole))
    assert model.feature_info.reduction() == [16, 16, 16]
    assert [tuple(feature.shape) for feature in features] == [(2, whole.embed_dim, 4, 4)] * 3
    for i, expected in enumerate(whole.forward_intermediates(images(whole), intermediates_only=True)):
        assert_close(f"features {i}", features[i], expected)


@pytest.mark.parametrize("case", CASES)
def test_forward_intermediates(case):
    model = build(case)
    x = images(model)
    info = FeatureInfo(model.feature_info, len(model.feature_info))
    final, maps = model.forward_intermediates(x, output_fmt="NCHW")
    assert len(maps) == len(info.channels()) >= 3
    for feature, channels, reduction in zip(maps, info.channels(), info.reduction()):
        assert feature.shape == (2, channels, *(math.ceil(side / reduction) for side in x.shape[2:]))
    assert_close("final", final, model.forward_features(x))

    alone = model.forward_intermediates(x, indices=[0, -1], intermediates_only=True)
    assert len(alone) == 2
    assert_close("first", alone[0], maps[0])
    assert_close("last", alone[1], maps[-1])
    early = model.forward_intermediates(x, indices=[1], intermediates_only=True, stop_early=True)
    assert_close("stopped early", early[0], maps[1])

    model.set_grad_checkpointing()
    assert_close("with checkpointing", model.forward_intermediates(x)[0], final)


@pytest.mark.parametrize("case", HIERARCHICAL)
def test_intermediates_normalised(case):
    model = build(case)
    x = images(model)
    maps = model.forward_intermediates(x, norm=True, intermediates_only=True)
    assert_close("last", maps[-1], model.forward_features(x))
    with pytest.raises(ValueError, match="output_fmt is NLC; allowed: NCHW"):
        model.forward_intermediates(x, output_fmt="NLC")


@pytest.mark.parametrize("case", COLUMNAR)
def test_intermediates_as_tokens(case):
    model = build(case)
    x = images(model)
    final, maps = model.forward_intermediates(x, norm=True)
    tokens = model.forward_intermediates(x, norm=True, output_fmt="NLC", intermediates_only=True)
    assert all(feature.shape == (2, 16, model.embed_dim) for feature in tokens)
    for i, (feature, expected) in enumerate(zip(tokens, maps)):
        assert_close(f"tokens {i}", feature, expected.flatten(2).transpose(1, 2))
    assert_close("last", tokens[-1], final[:, model.num_prefix_tokens :])
    as_dict = model.forward_intermediates(x, output_fmt="NLC", output_dict=True)
    assert_close("final in a dictionary", as_dict["image_features"], final)
    assert [feature.shape for feature in as_dict["image_intermediates"]] == [feature.shape for feature in tokens]
    alone = model.get_intermediate_layers(x, n=1, norm=True)
    assert_close("DINO's interface", alone[0], tokens[-1])


@pytest.mark.parametrize("case", CASES)
def test_prune_intermediate_layers(case):
    model = build(case)
    x = images(model)
    expected = model.forward_intermediates(x, indices=[0, 1], intermediates_only=True)
    indices = model.prune_intermediate_layers([0, 1])
    assert indices == [0, 1]
    assert len(model.stages if case in HIERARCHICAL else model.blocks) == 2
    for i, feature in enumerate(model.forward_intermediates(x, indices=indices, intermediates_only=True)):
        assert_close(f"features {i}", feature, expected[i])
    assert model.num_classes == 0
    assert torch.isfinite(model(x)).all()
    bare = build(case)
    bare.prune_intermediate_layers([0, 1], prune_norm=True)
    assert bare.forward_features(x).dim() == (4 if case in HIERARCHICAL else 3)
    if case in HIERARCHICAL:  # with fewer channels and a new classifier
        model.reset_classifier(7, "avg")
        assert model.num_features == model.feature_info[1]["num_chs"] and model(x).shape == (2, 7)


def _traced(model):
    """The model rebuilt from its FX graph, as timm's tests do, with timm's leaf modules and functions."""
    train_nodes, eval_nodes = get_graph_node_names(model)
    assert train_nodes[-1] == eval_nodes[-1]
    return create_feature_extractor(model, {eval_nodes[-1]: "out"})


@pytest.mark.parametrize("case", CASES)
def test_fx_forward_is_exact_and_backward_reaches_every_parameter(case):
    model = build(case, num_classes=42)
    x = images(model)
    traced = _traced(model).eval()
    with torch.inference_mode():
        assert torch.equal(traced(x)["out"], model(x))
        again = images(model, batch=3)
        assert torch.equal(traced(again)["out"], model(again))
    out = traced.train()(x)["out"]
    assert out.shape == (2, 42)
    out.square().mean().backward()
    for name, parameter in traced.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    assert sum(p.numel() for p in traced.parameters()) == sum(p.numel() for p in model.parameters())


class Wrapped(nn.Module):
    """Stands for an adapter's wrapper of a layer: it calls the layer, and has none of its attributes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("case", CASES)
def test_every_projection_and_convolution_can_be_wrapped(case: str) -> None:
    model = build(case)
    x = images(model)
    with torch.no_grad():
        expected = model(x)
        layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
        # SOFT's function takes the weights of its own convolutions.
        own = {id(x) for module in model.modules() if isinstance(module, SoftAttention) for x in module.children()}
        layers = [(name, layer) for name, layer in layers if id(layer) not in own]
        for name, layer in layers:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Wrapped(layer))
        assert torch.equal(model(x), expected)
