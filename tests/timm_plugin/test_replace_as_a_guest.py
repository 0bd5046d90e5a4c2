"""``replace_attention`` keeps a model's sharing, hooks, freezing, seeds and reparametrised weights."""

import copy
import pickle

import pytest
import timm
import torch
from timm.layers import Attention
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.compare import assert_close, weights
from tests.timm_plugin.helpers.checkpoint_files import randomise
from tests.timm_plugin.helpers.logs import warnings_of
from timm_plugin import replace_attention
from timm_plugin.layers.attention import SelfAttention

VIT = dict(img_size=32, embed_dim=32, depth=2, num_heads=2, num_classes=3)


def _vit(**arguments) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **VIT, **arguments)


def _alone() -> nn.Module:
    return nn.Sequential(randomise(Attention(32, 2, qkv_bias=True)))


X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))


# ---- places


def test_a_module_in_two_places_is_replaced_by_one():
    shared = Attention(32, 2)
    model = nn.ModuleDict({"a": nn.Sequential(shared, shared), "b": nn.Sequential(Attention(32, 2), shared)})
    replace_attention(model, "flow")
    layers = [model["a"][0], model["a"][1], model["b"][1]]
    assert all(layer is layers[0] for layer in layers) and isinstance(layers[0], SelfAttention)
    assert isinstance(model["b"][0], SelfAttention) and model["b"][0] is not layers[0]
    assert len(list(model.parameters())) == 6


def test_a_block_in_two_places():
    model = _vit()
    model.blocks[1] = model.blocks[0]
    replace_attention(model, "linformer")
    assert model.blocks[1] is model.blocks[0] and isinstance(model.blocks[0].attn, SelfAttention)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 3)


def test_an_attention_itself_cannot_be_replaced():
    with pytest.raises(ValueError, match="model is a Attention .*attention itself"):
        replace_attention(Attention(32, 2), "flow")
    with pytest.raises(ValueError, match="no module is one"):
        replace_attention(nn.Linear(2, 2), "flow")


# ---- our layers again


def test_ours_are_replaced_again(caplog):
    model = _vit()
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    replace_attention(model, "linformer")
    replace_attention(model, "linear")
    assert "gone: attention.key_rows (2), attention.value_rows (2)" in warnings_of(caplog)[-1]
    expected = replace_attention(_vit(), "linear")
    assert all(torch.equal(model.state_dict()[name], x) for name, x in weights.items())
    images = torch.randn(1, 3, 64, 64)
    for each in (model, expected):
        each.eval().set_input_size(64)  # nothing of Linformer's grid remains
    assert_close("logits", model(images), expected(images))


def test_ours_without_keys_are_refused_by_name():
    model = replace_attention(_vit(class_token=False, global_pool="avg"), "daft_conv")
    with pytest.raises(ValueError, match="DaftConvSelfAttention has the projections of 'daft_conv'"):
        replace_attention(model, "flow")


def test_a_model_of_ours_with_another_mechanism_takes_another_size():
    model = timm.create_model("daft_full_s", img_size=32, embed_dim=48, depth=1, num_classes=3).eval()
    replace_attention(model, "flow").set_input_size(64)
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 3)


# ---- hooks


@pytest.mark.parametrize("name", ["flow", "linformer", "reformer"])
def test_hooks_are_carried_over_and_do_not_see_the_trial(name, caplog):
    model, calls = _vit().train(), []
    attn = model.blocks[0].attn
    before = attn.register_forward_pre_hook(lambda module, args: calls.append(("before", module, len(args))))
    after = attn.register_forward_hook(
        lambda module, args, kwargs, out: calls.append(("after", module, out.shape)), with_kwargs=True
    )
    backward = attn.register_full_backward_hook(lambda module, *gradients: calls.append(("backward", module, 0)))
    saving = attn.register_state_dict_pre_hook(lambda module, *args: calls.append(("saving", module, 0)))
    loading = attn.register_load_state_dict_pre_hook(lambda module, *args: calls.append(("loading", module, 0)))
    loaded = attn.register_load_state_dict_post_hook(lambda module, keys: calls.append(("loaded", module, 0)))
    for part in (attn.qkv, attn.proj, attn.attn_drop, attn.proj_drop):
        part.register_forward_hook(lambda module, args, out: calls.append((module, None, 0)))
    replace_attention(model, name)
    assert calls == []
    replacement = model.blocks[0].attn
    del attn
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    model.load_state_dict(model.state_dict())
    own = [(kind, module) for kind, module, _ in calls if isinstance(kind, str)]
    assert sorted({kind for kind, _ in own}) == ["after", "backward", "before", "loaded", "loading", "saving"]
    assert all(module is replacement for _, module in own)
    assert sum(kind is replacement.proj for kind, _, _ in calls) == 1
    lost = {"attn_drop", *({"qkv"} if name == "reformer" else ())}
    (line,) = (line for line in warnings_of(caplog) if "not called" in line)
    named = {part.split(" ")[0] for part in line.split("not called any more: ")[1].split(", ")}
    assert named == lost
    for handle in (before, after, backward, saving, loading, loaded):
        handle.remove()
    calls.clear()
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    model.load_state_dict(model.state_dict())
    assert not [kind for kind, _, _ in calls if isinstance(kind, str)]


def test_a_forward_that_was_set_on_the_object_is_refused():
    model = _alone()
    model[0].forward = lambda x: x
    with pytest.raises(ValueError, match="Attention has a forward that was set on the object"):
        replace_attention(model, "flow")


# ---- random numbers


@pytest.mark.parametrize("name", ["flow", "favor", "linformer", "reformer", "rfa"])
def test_seeded_runs_do_not_change(name):
    model = _vit()
    state = torch.random.get_rng_state()
    replace_attention(model, name)
    assert torch.equal(torch.random.get_rng_state(), state)
    state = {key: x.clone() for key, x in weights(model.state_dict()).items()}
    again = replace_attention(_vit(), name)  # _vit sets the seed
    assert all(torch.equal(x, state[key]) for key, x in weights(again.state_dict()).items())
    torch.manual_seed(0)
    other = timm.create_model("vit_tiny_patch16_224", **VIT)
    torch.manual_seed(7)
    replace_attention(other, name)
    own = [key for key in state if ".attn.attention." in key and not key.endswith("sigma") and state[key].numel() > 9]
    assert (len(own) > 0) == (name != "flow")
    assert all(not torch.equal(other.state_dict()[key], state[key]) for key in own)
    for first, second in zip(own, own[1:]):
        assert not torch.equal(state[first], state[second])  # each layer draws its own


def test_a_seeded_training_is_the_same_with_and_without():
    """Dropout after the call draws the same numbers as without it: our softmax computes the same."""

    def losses(replaced: bool) -> list[float]:
        model = _vit(proj_drop_rate=0.3, drop_path_rate=0.2).train()
        if replaced:
            replace_attention(model, "softmax")
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        values = []
        for _ in range(3):
            loss = model(torch.randn(4, 3, 32, 32)).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            values.append(loss.item())
        return values

    assert losses(True) == pytest.approx(losses(False), rel=1e-5)


# ---- parameters


@pytest.mark.parametrize("name", ["linformer", "reformer", "daft_conv"])
def test_a_frozen_model_stays_frozen(name, caplog):
    args = dict(class_token=False, global_pool="avg") if name == "daft_conv" else {}
    model = _vit(**args).requires_grad_(False)
    replace_attention(model, name)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert "new, and frozen: " in warnings_of(caplog)[-1]
    model = _vit(**args)
    model.blocks[0].requires_grad_(False)
    replace_attention(model, name)
    for i, block in enumerate(model.blocks):
        assert all(parameter.requires_grad == (i == 1) for parameter in block.attn.parameters())


def test_modes_of_parts_stay():
    model = _vit(proj_drop_rate=0.5).train()
    model.blocks[0].attn.proj_drop.eval()
    replace_attention(model, "favor")
    attn = model.blocks[0].attn
    assert attn.training and attn.attention.training and not attn.proj_drop.training
    model = replace_attention(_vit().eval(), "favor")
    assert not any(module.training for module in model.modules())


REPARAMETERS = {
    "orthogonal": lambda qkv: parametrizations.orthogonal(qkv),
    "weight_norm": lambda qkv: parametrizations.weight_norm(qkv),
    "old weight_norm": lambda qkv: nn.utils.weight_norm(qkv),
    "old spectral_norm": lambda qkv: nn.utils.spectral_norm(qkv),
    "pruned": lambda qkv: prune.l1_unstructured(qkv, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("how", REPARAMETERS)
def test_reparametrised_projections(how):
    """Our softmax keeps them; a mechanism of other widths would lose them, and refuses."""
    model = _alone().eval()
    REPARAMETERS[how](model[0].qkv)
    names = [name for name, _ in model.named_parameters()]
    before, qkv = model(X), model[0].qkv
    with pytest.raises(ValueError, match="qkv is a .*; allowed with attention 'reformer'"):
        replace_attention(model, "reformer")
    assert isinstance(model[0], Attention)
    replace_attention(model, "softmax")
    assert model[0].qkv is qkv and isinstance(model[0], SelfAttention)
    assert [name for name, _ in model.named_parameters()] == names
    assert_close("output", model(X), before)
    model.train()(X).sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "qkv" in name)


# ---- copies


@pytest.mark.parametrize("name", ["soft", "daft_conv", "daft_full"])
def test_a_pickle_of_version_0_2(name):
    """The pickle stores the grid in place of the class's, and does not say whether there are positions."""
    args = {} if name == "daft_full" else dict(class_token=False, global_pool="avg")
    model = replace_attention(_vit(**args), name).eval()
    layer = model.blocks[0].attn
    make, arguments, state = layer.__reduce__()
    state = {key: x for key, x in state.items() if key != "has_positions"}
    old = make(*arguments[:3], layer.grid_size)
    old.__setstate__(copy.deepcopy(state))
    other = pickle.loads(pickle.dumps(model))
    other.blocks[0].attn = old
    assert_close("logits", other(torch.ones(1, 3, 32, 32)), model(torch.ones(1, 3, 32, 32)))
