"""DAFT's layers, models, resampled biases and regulariser, against formulas computed from their weights."""

import pytest
import timm
import torch
from timm.task import ClassificationTask, FeatureDistillationTask, LogitDistillationTask
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal

from common.ops.daft.conv_reference import daft_conv_reference
from common.ops.daft.full_reference import daft_full_reference
from tests.compare import assert_close, gradients, weights
from tests.timm_plugin.helpers import PATCHES_ONLY, build, draw_filters, images, randomise, vit
from timm_plugin import attention_layer, replace_attention, tell_grid

C, H = 12, 4
#: Rows and columns of a map that is not square and, for a window of 5, smaller than the window in one dimension.
Y, X = 3, 7


def filters_by_hand(attention: nn.Module) -> Tensor:
    """γ (r - mean) / std + β per head, or r itself: (h, kh, kw)."""
    if attention.gamma is None:
        return attention.r
    flat = attention.r.flatten(1)
    variance = flat.var(1, keepdim=True, unbiased=False) + 1e-6  # needed for a window of one entry
    standardised = (flat - flat.mean(1, keepdim=True)) / variance.sqrt()
    return (attention.gamma * standardised + attention.beta).view_as(attention.r)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("daft_conv", dict(window=5)),
        ("daft_conv", dict(window=(5, 3), query=False)),
        ("daft_conv", dict(window=3, local_only=True, reparameterize=False)),
        ("daft_full", dict(max_tokens=21, bias_dim=6)),
        ("daft_full", dict(max_tokens=21, bias_dim=None, query=False)),
    ],
)
def test_a_layer_is_the_reference_over_the_raster(kind, options):
    layer = attention_layer(kind, **options)(C, H, qkv_bias=True, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, Y, X, C, generator=generator, dtype=torch.float64, requires_grad=True)
    attention, has_query = layer.attention, options.get("query", True)
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    q, k, v = layer.qkv(x.flatten(1, 2)).split([C if has_query else 0, H if kind == "daft_conv" else C, C], dim=-1)
    q = q if has_query else None
    if kind == "daft_conv":
        local = dict(spatial_shape=(Y, X), local_only=attention.local_only)
        out = daft_conv_reference(q, k, v, filters_by_hand(attention), **local)
    else:
        out = daft_full_reference(q, k, v, (attention.pe0, attention.pe1) if options["bias_dim"] else attention.w)
    actual, expected = layer(x), layer.proj(out).view_as(x)
    assert_close("output", actual, expected)
    names, inputs = zip(("x", x), *layer.named_parameters())
    for name, gradient, wanted in zip(names, gradients(actual, inputs), gradients(expected, inputs)):
        assert_close(f"gradient of {name}", gradient, wanted)


@pytest.mark.parametrize("size", [(64, 64), (48, 80), (32, 128), (16, 16)])
def test_conv_model_by_hand_at_any_size(size):
    """With the same weights; the smallest size is smaller than the window."""
    model = build("daft_conv").double()
    x = images(model, batch=1, size=size).double()
    maps = F.conv2d(x, model.patch_embed.proj.weight, model.patch_embed.proj.bias, stride=16)
    shape, tokens = maps.shape[2:], maps.flatten(2).transpose(1, 2)
    for block in model.blocks:
        q, k, v = block.attn.qkv(block.norm1(tokens)).split([48, 4, 48], dim=-1)
        out = daft_conv_reference(q, k, v, filters_by_hand(block.attn.attention), spatial_shape=shape)
        tokens = tokens + block.attn.proj(out)
        tokens = tokens + block.mlp(block.norm2(tokens))
    assert_close("logits", model(x), model.head(model.norm(tokens).mean(1)))


# ---- biases of another size


def _resampled(bias: Tensor, old: tuple, new: tuple, prefix: int) -> Tensor:
    """Positions (N, n) on the grid ``old`` resampled to ``new``; class token and registers are unchanged."""
    grid = bias[prefix:].T.reshape(1, -1, *old)  # (N, n) -> (1, n, Y, X)
    grid = F.interpolate(grid, size=new, mode="bicubic", antialias=True)
    return torch.cat([bias[:prefix], grid[0].flatten(1).T])


def _biases(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights(model.state_dict()).items() if ".attn.attention." in name}


def _stock(case: str, **arguments) -> nn.Module:
    """A stock vision transformer with DAFT-full."""
    model = vit(img_size=64, **arguments)
    return randomise(replace_attention(model, "daft_full", bias_dim=16 if case == "factors" else 0))


def _ours(case: str, **arguments) -> nn.Module:
    return build("daft_full", **({} if case == "factors" else dict(bias_dim=0, query=False)), **arguments)


@pytest.mark.parametrize(("prefix", "arguments"), [(0, PATCHES_ONLY), (1, {}), (3, dict(reg_tokens=2))])
@pytest.mark.parametrize("case", ["factors", "free"])
@pytest.mark.parametrize("make", [_ours, _stock])
def test_biases_are_resampled_as_timm_resamples_positions(make, case, prefix, arguments):
    """``tell_grid`` does so in a stock model, once; another patch size does so as well."""
    model = make(case, **arguments)
    for parameter in model.blocks[1].attn.attention.parameters():
        parameter.requires_grad_(False)
    old = (4, 4)
    for new, change in (
        ((6, 2), dict(img_size=(96, 32))),
        ((2, 6), dict(img_size=(32, 96))),  # as many tokens, in another layout
        ((4, 12), dict(patch_size=8)),
    ):
        before = _biases(model)
        model.set_input_size(**change)
        for _ in range(2):
            tell_grid(model)
            after = _biases(model)
            for name, bias in before.items():
                expected = _resampled(bias, old, new, prefix)
                if name.endswith(".w"):  # both ends of a pair
                    expected = _resampled(expected.T, old, new, prefix).T
                assert_close(name, after[name], expected)
        assert torch.isfinite(model(images(model))).all()
        old = new
    for i, block in enumerate(model.blocks):
        assert block.attn.attention.max_tokens == 48 + prefix
        for parameter in block.attn.attention.parameters():
            assert parameter.is_leaf and parameter.is_contiguous() and parameter.requires_grad == (i != 1)
    with pytest.raises((ValueError, AssertionError), match="64.*32"):  # our message names both sizes, timm's one side
        model(images(model, size=(64, 64)))


def test_parametrised_biases_are_refused():
    model = build("daft_full")
    orthogonal(model.blocks[1].attn.attention, "pe0")
    with pytest.raises(ValueError, match="pe0 of the attention is parametrised"):
        model.set_input_size(96)
    assert model(images(model, size=(64, 64))).shape == (2, 1000)  # nothing has changed


# ---- the regulariser of DAFT-conv (Eq. 10), in any training loop

LABELS = torch.tensor([3, 5])


def entropy_by_hand(model: nn.Module) -> Tensor:
    """Σ over layers and heads of -Σ p log p, where p is the softmax of the filter."""
    total = torch.zeros(())
    for block in model.blocks:
        for filter_ in filters_by_hand(block.attn.attention):
            p = torch.exp(filter_.flatten()) / torch.exp(filter_).sum()
            total = total - (p * p.log()).sum()
    return total


def _model(**arguments) -> nn.Module:
    """A model in float64, because β's gradients nearly cancel."""
    defaults = dict(entropy_weight=0.5, dtype=torch.float64, depth=2)
    return build("daft_conv", num_classes=10, **{**defaults, **arguments}).train()


def _loss(output: Tensor, target: Tensor = LABELS) -> Tensor:
    return F.cross_entropy(output, target)


def assert_same_gradients(model: nn.Module, loss: Tensor, expected: Tensor, tolerance: float = 1e-8) -> None:
    """Check that ``loss``, computed by a trainer, has the gradients of ``expected``.

    β, added to every entry of a filter, does not change the softmax: its gradients may be only rounding errors.
    """
    names, parameters = zip(*model.named_parameters())
    found = (
        torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True, retain_graph=True)
        for value in (loss, expected)
    )
    for name, actual, wanted in zip(names, *found):
        assert_close(f"gradient of {name}", actual + 1e-3, wanted + 1e-3, tolerance)


def _plain(model: nn.Module, compute) -> Tensor:
    """``compute()`` without the regulariser, from the same random draws."""
    weight, model.entropy_weight = model.entropy_weight, 0.0
    torch.manual_seed(3)
    value = compute()
    model.entropy_weight = weight
    return value


@pytest.mark.parametrize(
    "arguments", [{}, dict(gumbel_temperature=0.5), dict(reparameterize=False), dict(local_only=True, query=False)]
)
def test_any_loss_of_the_output_has_the_gradients_of_the_regularised_loss(arguments):
    """Of logits, of features between the blocks as in a detector, and a loss that is constant."""
    model = _model(**arguments)
    x = images(model).double()
    for compute in (
        lambda: _loss(model(x)),
        lambda: model.forward_intermediates(x, intermediates_only=True)[-1].square().sum(),
        lambda: 0.0 * model(x).sum(),
    ):
        torch.manual_seed(3)
        value = compute()
        plain = _plain(model, compute)
        assert torch.equal(value, plain)  # the value of the loss is the trainer's
        assert_same_gradients(model, value, plain + 0.5 * entropy_by_hand(model))
    assert_close("for logging", model.auxiliary_loss(), 0.5 * entropy_by_hand(model))
    for case in ("daft_conv", "daft_full", "hier"):
        assert not hasattr(build(case), "auxiliary_loss") or build(case).auxiliary_loss() is None
    model.eval()
    filters = [p for name, p in model.named_parameters() if ".attn.attention." in name]
    assert not any(x.any() for x in torch.autograd.grad(0.0 * model(x).sum(), filters))


@pytest.mark.parametrize("task", ["classification", "logit distillation", "feature distillation"])
def test_tasks_of_timm_count_it_once(task):
    """Not the teacher's, not that of averaged weights, and once under checkpointing."""
    model, teacher = _model(), _model(entropy_weight=100.0)
    draw_filters(teacher)
    distilled = dict(criterion=nn.CrossEntropyLoss(), task_loss_weight=0.5)
    task = {
        "classification": lambda: ClassificationTask(model, _loss),
        "logit distillation": lambda: LogitDistillationTask(model, teacher, **distilled),
        "feature distillation": lambda: FeatureDistillationTask(model, teacher, **distilled),
    }[task]()
    x = images(model).double()
    task.train()
    plain = _plain(model, lambda: task(x, LABELS)["loss"])
    expected = plain + 0.5 * entropy_by_hand(model)
    assert_same_gradients(model, task(x, LABELS)["loss"], expected)
    model.set_grad_checkpointing()
    task.setup_ema(decay=0.5)
    task.update_ema(1)
    assert_same_gradients(model, task.train()(x, LABELS)["loss"], expected)


@pytest.mark.parametrize("whole", [False, True])
def test_it_counts_in_a_compiled_model_and_a_compiled_task(whole):
    model = _model(depth=1)
    task = ClassificationTask(model, _loss)
    x = images(model).double()
    expected = task(x, LABELS)["loss"]
    torch._dynamo.reset()
    compiled = torch.compile(task if whole else model, backend="aot_eager", fullgraph=not whole)
    loss = compiled(x, LABELS)["loss"] if whole else _loss(compiled(x))
    assert_close("loss", loss, expected)
    assert_same_gradients(model, loss, expected)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_bfloat16_is_exact_float16_is_refused_and_torchscript_evaluates_without_it():
    model = _model(dtype=torch.float32, scriptable=True)
    x = images(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = 0.0 * model(x).float().sum()
    assert_same_gradients(model, loss, 0.5 * entropy_by_hand(model), 1e-3)
    with torch.autocast("cpu", torch.float16):
        with pytest.raises(ValueError, match="float16"):
            model(x)
        assert torch.isfinite(model.eval()(x)).all()
    assert_close("scripted", torch.jit.script(model)(x), model(x))
    assert timm.create_model("daft_conv_test", entropy_weight=0.5).auxiliary_loss() > 0.0
