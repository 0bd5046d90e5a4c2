"""Flow-Attention that is not causal, by kernels for CPUs and by hand in PyTorch; and promises of both directions."""

import functools

import pytest
import torch
from torch.autograd import forward_ad

from common.ops import flow_attention
from common.ops.flow.full import flow_attention_in_graph
from common.ops.flow.options import flow_options
from common.ops.flow.reference import flow_attention_reference
from common.ops.shared.cpu import dispatch, threads
from common.ops.shared.feature_maps import FEATURE_MAPS, feature_map_gradient, real_features
from recipes.runs import peak_bytes
from tests.common.inputs import LAYOUTS, in_layout, padding, qkv
from tests.compare import assert_all_close, assert_close, assert_gradients_close, gradients

needs_kernels = pytest.mark.skipif(not dispatch.has_numba(), reason="kernels need Numba")

OPTIONS = [
    {},
    {"form": "paper", "phi": "elu+1"},
    {"form": "released_vision", "clamp": None, "allocation": "softmax"},
    {"clamp": 0.3, "allocation": "softmax", "phi": "elu+1"},
    {"competition": "sigmoid", "allocation": "none", "clamp": 0.3},
    {"competition": "none", "phi": "relu"},
    {"competition": "softmax_heads", "clamp": 0.9},
    {"form": "paper", "competition": "softmax_heads", "allocation": "softmax"},
]
#: Padding of sinks and of sources.
SIDES = [("none", "none"), ("left", "right"), ("right", "holes"), ("holes", "left"), ("all", "right"), ("left", "all")]


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    """Whoever runs the tests may have turned kernels off."""
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)


@pytest.fixture(params=[pytest.param("kernels", marks=needs_kernels), "plain PyTorch"])
def either_form(request, monkeypatch):
    """Run the test with kernels and without them."""
    if request.param == "plain PyTorch":
        monkeypatch.setenv(dispatch.VARIABLE, "0")


def masks_of(sides, batch, n, m):
    """Masks of sinks and sources; both or none."""
    if sides == ("none", "none"):
        return {}
    sinks, sources = (padding(side, batch, tokens) for side, tokens in zip(sides, (n, m)))
    return {"query_padding_mask": sinks, "key_padding_mask": sources}


def check_both_passes(inputs, tolerance=1e-10, grad_tolerance=1e-10, **options):
    """Compare output and gradients with those of the literal reference."""
    out, expected = flow_attention(*inputs, **options), flow_attention_reference(*inputs, **options)
    assert_close("out", out, expected, tolerance)
    assert_all_close("qkv", gradients(out, inputs), gradients(expected, inputs), grad_tolerance)


def same_bits(actual, expected) -> bool:
    return all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


# --- agreement with the reference ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, m", [(1, 1), (2, 5), (4, 3), (63, 64), (65, 33), (130, 257)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_outputs_and_gradients(options, n, m, either_form):
    sides = SIDES[(n + len(str(options))) % len(SIDES)] if min(n, m) > 2 else SIDES[0]
    check_both_passes(qkv(n, m, batch=3, heads=3, d=7, e=5), **masks_of(sides, 3, n, m), **options)


@pytest.mark.parametrize("sides", SIDES, ids=str)
@pytest.mark.parametrize("d, e", [(1, 1), (3, 12), (12, 1), (1, 40), (40, 1), (16, 17), (64, 65), (65, 64)])
def test_few_and_many_channels(d, e, sides, either_form):
    check_both_passes(qkv(13, 21, d=d, e=e), **masks_of(sides, 2, 13, 21))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_float32(options, either_form):
    inputs = qkv(130, 70, d=64, e=64, dtype=torch.float32)
    check_both_passes(inputs, tolerance=5e-6, grad_tolerance=2e-5, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_large_logits(options, either_form):
    """Without a clamp, the softmax over the flows of features of 30 and more is almost a maximum."""
    check_both_passes(qkv(20, scale=30.0), tolerance=1e-9, grad_tolerance=1e-7, **options)


def test_without_features(either_form):
    """Features that have underflowed to 0 receive and give nothing; the reference divides by the flow of 0."""
    q, k, v = qkv(6)
    inputs = [x.detach().masked_fill(torch.arange(6)[:, None] == 2, -2000.0).requires_grad_() for x in (q, k)]
    inputs = [*inputs, v]
    out, expected = (
        flow_attention(*inputs, form="paper"),
        flow_attention_in_graph(*inputs, None, None, flow_options("paper")),
    )
    assert not out[:, :, 2].any()
    assert_close("out", out, expected, 1e-12)
    assert_gradients_close(out, expected, dict(zip("qkv", inputs)), 1e-11)


# --- gradients -------------------------------------------------------------------------------------------------------


def test_expanded_inputs_and_gradients(either_form):
    q, k, v = qkv(8, heads=1)
    results = []
    for attend in (flow_attention, flow_attention_reference):
        out = attend(*(x.expand(2, 3, 8, -1) for x in (q, k, v)))
        results.append(torch.autograd.grad(out.sum(), (q, k, v)))
    for name, actual, expected in zip("qkv", *results):
        assert_close(f"gradient of {name}", actual, expected, 1e-11)


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
@pytest.mark.parametrize("twice", [False, True], ids=["first", "second derivative"])
def test_gradient_of_one_input_alone(wanted, twice, either_form):
    inputs = [x.detach().requires_grad_(name == wanted) for name, x in zip("qkv", qkv(9))]
    leaf = inputs["qkv".index(wanted)]
    results = []
    for attend in (flow_attention, flow_attention_reference):
        out = attend(*inputs, clamp=20.0).square().sum()
        (gradient,) = torch.autograd.grad(out, [leaf], create_graph=twice)
        results.append(torch.autograd.grad(gradient.square().sum(), [leaf])[0] if twice else gradient)
    assert_close(f"gradient of {wanted}", *results, 1e-10)


def test_forward_derivative(either_form):
    inputs = [x.detach() for x in qkv(6)]
    step = torch.randn_like(inputs[0])
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(flow_attention(forward_ad.make_dual(inputs[0], step), *inputs[1:])).tangent
    moved = [flow_attention(inputs[0] + sign * 1e-6 * step, *inputs[1:], clamp=1.0) for sign in (1, -1)]
    assert_close("tangent", tangent, (moved[0] - moved[1]) / 2e-6, 1e-6)


def test_half_precision_is_rounded_once(either_form):
    inputs = qkv(40, 30, d=20, e=20, dtype=torch.bfloat16)
    out = flow_attention(*inputs)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    expected = flow_attention(*exact)
    assert torch.equal(out, expected.bfloat16())
    weights = torch.ones_like(out)
    actual_gradients, wanted = (
        torch.autograd.grad(out, inputs, weights),
        torch.autograd.grad(expected, exact, weights.float()),
    )
    for name, actual, expected in zip("qkv", actual_gradients, wanted):
        assert_close(f"gradient of {name}", actual, expected, 5e-3)


@pytest.mark.parametrize("phi", FEATURE_MAPS)
def test_gradient_of_a_feature_map(phi):
    x = torch.tensor([-3.0, -0.1, 0.2, 5.0], dtype=torch.float64).view(1, 1, 4, 1).requires_grad_()
    for mask in (None, torch.tensor([[True, False, True, False]])):
        features = real_features(x, phi, mask)
        weights = torch.randn_like(features)
        (wanted,) = torch.autograd.grad(features, x, weights)
        actual = torch.empty_like(x)
        feature_map_gradient(weights, features.detach(), phi, out=actual)
        assert_close("gradient", actual, wanted)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_second_derivatives_where_one_tensor_is_query_key_and_value(causal):
    """Each use of the tensor contributes once."""
    (x, _, _) = qkv(9)

    def second(attend):
        (first,) = torch.autograd.grad(attend(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    expected = second(lambda x: flow_attention(x.clone(), x.clone(), x.clone(), causal=causal))
    assert_close("second derivative", second(lambda x: flow_attention(x, x, x, causal=causal)), expected)


# --- kernels ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """The kernels that were called."""
    names, run = [], threads.run

    def recorded(kernel, *arguments):
        names.append(kernel.py_func.__module__.rpartition(".")[2])
        run(kernel, *arguments)

    monkeypatch.setattr(threads, "run", recorded)
    return names


def both_passes(inputs, **options):
    out = flow_attention(*inputs, **options)
    return [out, *gradients(out, inputs)]


@needs_kernels
@pytest.mark.parametrize("options", [{}, {"competition": "softmax_heads"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_both_passes_are_kernels(options, dtype, calls):
    both_passes(qkv(9, dtype=dtype), **options)
    assert calls == ["full_kernels", "full_backward_kernels"]


@needs_kernels
def test_nothing_is_written_outside_of_the_memory_for_it(monkeypatch):
    """The memory of each thread is followed by numbers that stay as they are."""
    guards, run = [], threads.run

    def guarded(kernel, units, operations, work_size, like, *arguments):
        work = torch.full((work_size + 64,), 7.0, dtype=like.dtype)
        kernel(0, units, *arguments, work.data_ptr())
        guards.append(work[work_size:])

    for n, m, d, e in ((1, 2, 1, 1), (5, 3, 3, 17), (9, 34, 16, 12), (70, 30, 65, 61)):
        for options in ({}, {"competition": "softmax_heads"}):
            inputs = qkv(n, m, heads=3, d=d, e=e)
            expected = both_passes(inputs, **options)
            with monkeypatch.context() as patch:
                patch.setattr(threads, "run", guarded)
                assert same_bits(both_passes(inputs, **options), expected)
    assert len(guards) == 16 and run is threads.run and all((guard == 7.0).all() for guard in guards)


@needs_kernels
def test_memory_of_a_training_step():
    """Beyond inputs, output and gradients: not much more than q, whereas a graph would keep over four times as much."""
    inputs = qkv(4096, batch=1, heads=8, d=64, e=64, dtype=torch.float32)
    weights = torch.randn_like(inputs[0])

    def step():
        out = flow_attention(*inputs)
        return out.detach(), *torch.autograd.grad(out, inputs, weights)

    step()
    assert peak_bytes(step) < 0.5 * inputs[0].nbytes


@pytest.mark.parametrize("batch, heads", [(1, 1), (2, 8)])
def test_beside_inputs_and_output_few_numbers_are_kept(batch, heads, either_form):
    """For each row and head: five for each token, a 64 x 64 matrix and four 64-vectors."""
    saved, n = [], 2048
    inputs = qkv(n, batch=batch, heads=heads, d=64, e=64, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = flow_attention(*inputs)
    addresses = {x.data_ptr() for x in (*inputs, out)}
    assert addresses <= {x.data_ptr() for x in saved}
    others = sum({x.data_ptr(): x.untyped_storage().nbytes() for x in saved if x.data_ptr() not in addresses}.values())
    assert 0 < others <= 4 * batch * heads * (5 * n + 64 * (64 + 4))


@needs_kernels
@pytest.mark.parametrize("sides", [SIDES[0], SIDES[3]], ids=str)
def test_the_operator_keeps_what_pytorch_asks_of_operators(sides):
    """Traces both passes with changing sizes, which takes seconds."""
    masks = masks_of(sides, 2, 9, 6)
    constants = 1, 0, 0, 1e-6, 0.0, float("inf"), True  # sigmoid features, softmax competition and allocation
    arguments = (*qkv(9, 6), masks.get("key_padding_mask"), masks.get("query_padding_mask"), *constants)
    torch.library.opcheck(torch.ops.lineartime.full_flow.default, arguments)


# --- what both directions promise ------------------------------------------------------------------------------------

both_directions = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@both_directions
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [5, 20])
def test_layouts_of_hosts(layout, head_dim, causal, either_form):
    inputs = [x.requires_grad_() for x in in_layout(layout, qkv(9, heads=4, d=head_dim, e=head_dim))]
    check_both_passes(inputs, causal=causal)
    if not causal and layout in ("heads inside", "a part of a projection"):
        assert flow_attention(*inputs).transpose(1, 2).is_contiguous(), "joining heads needs no copy"


@both_directions
@pytest.mark.parametrize("batch, heads", [(0, 2), (2, 0)])
def test_inputs_without_rows_or_heads(batch, heads, causal, either_form):
    inputs = qkv(4, batch=batch, heads=heads)
    out = flow_attention(*inputs, causal=causal)
    assert out.shape == (batch, heads, 4, 3)
    assert all(grad.shape == x.shape for grad, x in zip(torch.autograd.grad(out.sum(), inputs), inputs))


@both_directions
def test_batches_of_gradients(causal, either_form):
    inputs = qkv(11)
    out = flow_attention(*inputs, causal=causal, chunk_size=4)
    batch = torch.randn(3, *out.shape, dtype=out.dtype)
    batched = torch.autograd.grad(out, inputs, batch, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        wanted = torch.autograd.grad(out, inputs, batch[i], retain_graph=True)
        assert_all_close("qkv", [x[i] for x in batched], wanted, 1e-11)


@pytest.mark.parametrize(
    "causal, kernels",
    [(False, "0"), pytest.param(False, "1", marks=needs_kernels), pytest.param(True, "1", marks=needs_kernels)],
)
def test_a_backward_pass_under_autocast_is_as_precise(causal, kernels, monkeypatch):
    """Also one whose gradients can be differentiated again; plain PyTorch is as precise if it is written by hand."""
    monkeypatch.setenv(dispatch.VARIABLE, kernels)
    inputs = qkv(40, d=20, e=20, dtype=torch.float32)
    out = flow_attention(*inputs, causal=causal)
    expected = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (out @ out.transpose(-2, -1)).dtype == torch.bfloat16  # autocast is on
        for create_graph in (False, True):
            actual = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True, create_graph=create_graph)
            for name, gradient, wanted in zip("qkv", actual, expected):
                assert_close(f"gradient of {name}", gradient, wanted, 1e-5)


@needs_kernels
@both_directions
def test_the_variable_turns_kernels_off(causal, calls, monkeypatch):
    inputs = qkv(9)
    both_passes(inputs, causal=causal)
    assert len(calls) == 2
    monkeypatch.setenv(dispatch.VARIABLE, "0")
    both_passes(inputs, causal=causal)
    assert len(calls) == 2


@needs_kernels
@both_directions
@pytest.mark.parametrize("clamp", [1.0, None])
def test_torch_compile_calls_the_kernels(clamp, causal):
    """aot_eager, since it traces both passes and compiles no code."""
    inputs, graphs = qkv(12), []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    attend = functools.partial(flow_attention, causal=causal, clamp=clamp)
    out, expected = torch.compile(lambda q, k, v: attend(q, k, v), backend=backend)(*inputs), attend(*inputs)
    assert_close("out", out, expected, 1e-12)
    assert_gradients_close(out, expected, dict(zip("qkv", inputs)), 1e-12)
    operator = "lineartime.causal_flow" if causal else "lineartime.full_flow"
    assert len(graphs) == 1 and operator in graphs[0].code
