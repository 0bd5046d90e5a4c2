"""torch.compile, TorchScript, torch.export and functorch take the modules as they are."""

import pytest
import torch

from common.attention import build_attention
from common.ops import flow_attention
from tests.common.attention.build import attend, build, narrow
from tests.common.inputs import padding, qkv
from tests.compare import assert_close, gradients

LINEAR_TIME = ["flow", "linear"]
causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def detached(*args, **kwargs):
    return [x.detach() for x in qkv(*args, **kwargs)]


@pytest.mark.parametrize("name", LINEAR_TIME)
@pytest.mark.parametrize("backend, lengths", [("eager", (40, 33, 70)), ("aot_eager", (40,))])
@causality
def test_compiled_without_graph_breaks(causal, backend, lengths, name):
    """ "eager" for any length; "aot_eager", which traces the backward pass too, for one."""
    torch._dynamo.reset()
    module = build_attention(name, causal=causal, chunk_size=16)
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=len(lengths) > 1)
    for length in lengths:
        inputs, mask = qkv(length, dtype=torch.float32), padding("left", 2, length)
        out = compiled(*inputs, key_padding_mask=mask, query_padding_mask=mask)
        expected = module(*inputs, key_padding_mask=mask, query_padding_mask=mask)
        assert_close("out", out, expected)
        for which, actual, wanted in zip("qkv", gradients(out, inputs), gradients(expected, inputs)):
            assert_close(f"gradient of {which}", actual, wanted)


@pytest.mark.parametrize("name", ["combiner", "daft_conv", "daft_full", "mixed_chunk", "quadratic"])
@causality
def test_the_others_compile_without_graph_breaks(causal, name):
    torch._dynamo.reset()
    module = build(name, causal, torch.float32)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    inputs, mask = qkv(22, d=4, e=4, dtype=torch.float32), padding("left", 2, 22)
    more = {"x": inputs[2].transpose(1, 2).flatten(2)} if module.needs_input else {}
    q, k, v = inputs
    out = compiled(q, narrow(module, k), v, mask, mask, **more)
    expected = attend(module, *inputs, key_padding_mask=mask, query_padding_mask=mask)
    assert_close("out", out, expected)
    leaves = [*inputs, *module.parameters()]
    for i, (actual, wanted) in enumerate(zip(gradients(out, leaves), gradients(expected, leaves))):
        assert_close(f"gradient {i} of q, k, v and the parameters", actual, wanted)


@pytest.mark.parametrize("name", ["daft_conv", "mixed_chunk"])
@torch.no_grad()  # from parameters a state after tokens requires a gradient, and one before them does not
def test_decoding_steps_from_parameters_compile_to_one_graph(name):
    torch._dynamo.reset()
    module, graphs = build(name, True, torch.float32), []
    q, k, v = detached(12, d=4, e=4, dtype=torch.float32)
    inputs = q, narrow(module, k), v

    def backend(graph, _):
        graphs.append(graph)
        return graph

    step = torch.compile(module.extend, backend=backend, fullgraph=True, dynamic=False)
    state = None
    for part in (slice(0, 3), slice(3, 4)):  # the state after many tokens may have other strides than after one
        _, state = module.extend(*(x[:, :, part] for x in inputs), state=state)
    for t in range(4, 12):
        out, state = step(*(x[:, :, t : t + 1] for x in inputs), state=state)
        assert_close("out", out, module(*inputs)[:, :, t : t + 1])
    assert len(graphs) == 1


@pytest.mark.parametrize("name", LINEAR_TIME)
def test_decoding_steps_compile_to_one_graph(name):
    torch._dynamo.reset()
    module, inputs, graphs = build_attention(name, causal=True), detached(12, dtype=torch.float32), []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    extend = torch.compile(module.extend, backend=backend, fullgraph=True, dynamic=False)
    _, state = module.extend(*(x[:, :, :4] for x in inputs))
    for t in range(4, 12):
        out, state = extend(*(x[:, :, t : t + 1] for x in inputs), state=state)
        assert_close("out", out, module(*inputs)[:, :, t : t + 1])
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ["flow", "linear", "softmax"])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_torchscript_of_the_full_form(masked, name, tmp_path):
    module = build_attention(name)
    torch.jit.script(module).save(tmp_path / "module.pt")
    scripted = torch.jit.load(tmp_path / "module.pt")
    for dtype in (torch.float64, torch.bfloat16):
        inputs = detached(11, 17, dtype=dtype)
        masks = (padding("right", 2, 17), padding("left", 2, 11)) if masked else (None, None)
        out = scripted(*inputs, *masks)
        assert out.dtype == dtype
        assert_close("out", out, module(*inputs, *masks))


@pytest.mark.parametrize("options", [{}, {"gumbel_temperature": 0.5}, {"local_only": True}, None], ids=str)
@pytest.mark.parametrize("query", [True, False], ids=["gated", "ungated"])
def test_torchscript_of_daft(query, options, tmp_path):
    """DAFT-conv over an image, a selection as it is indexed in evaluation, and DAFT-full; no mask for either."""
    if options is None:
        module, more = build("daft_full", query=query), {}
    else:
        module, more = build("daft_conv", query=query, window=(5, 3), **options).eval(), {"spatial_shape": (3, 7)}
    torch.jit.script(module).save(tmp_path / "module.pt")
    scripted = torch.jit.load(tmp_path / "module.pt")
    for dtype in (torch.float64, torch.bfloat16):
        q, k, v = detached(21, d=4, e=4, dtype=dtype)
        q, k = q if query else None, narrow(module, k)
        with torch.autograd.profiler.profile() as profile:
            out = scripted(q, k, v, **more)
        assert out.dtype == dtype
        assert_close("out", out, module(q, k, v, **more))
        convolves = any(event.name == "aten::conv2d" for event in profile.function_events)
        assert convolves == (options is not None and "gumbel_temperature" not in options)
        with pytest.raises(torch.jit.Error, match="a mask is given"):
            scripted(q, k, v, torch.zeros(2, 21, dtype=torch.bool), **more)


@pytest.mark.parametrize("name", LINEAR_TIME)
def test_torchscript_of_the_causal_form_is_refused_by_name(name):
    scripted = torch.jit.script(build_attention(name, causal=True))
    with pytest.raises(torch.jit.Error, match="causal is True; allowed in TorchScript: causal=False"):
        scripted(*detached(5))


@pytest.mark.parametrize("name", LINEAR_TIME)
def test_torchscript_stays_precise_under_autocast(name):
    inputs = detached(300, dtype=torch.float32)
    module = build_attention(name)
    scripted = torch.jit.script(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = scripted(*inputs)
    assert_close("out", out.float(), module(*inputs), 1e-2)


@pytest.mark.parametrize("name", LINEAR_TIME)
def test_the_full_form_exports_with_a_dynamic_length(name):
    module, inputs = build_attention(name), detached(21)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(module, tuple(inputs), dynamic_shapes=[{2: tokens}] * 3)
    for length in (21, 50, 64):
        other = detached(length, seed=1)
        assert_close("out", program.module()(*other), module(*other))


@pytest.mark.parametrize("name", ["daft_conv", "daft_full"])
def test_the_full_form_of_daft_exports_with_a_dynamic_length(name):
    module = build(name)
    tokens = torch.export.Dim("tokens", min=2, max=24)

    def inputs(length, seed):
        q, k, v = detached(length, d=4, e=4, seed=seed)
        return q, narrow(module, k), v

    program = torch.export.export(module, inputs(21, 0), dynamic_shapes=[{2: tokens}] * 3)
    for length in (21, 3, 24):
        assert_close("out", program.module()(*inputs(length, 1)), module(*inputs(length, 1)))


@pytest.mark.parametrize("name", LINEAR_TIME)
def test_the_causal_form_exports_with_its_length(name):
    module, inputs = build_attention(name, causal=True, chunk_size=8), detached(21)
    program = torch.export.export(module, tuple(inputs))
    other = detached(21, seed=1)
    assert_close("out", program.module()(*other), module(*other))


@causality
def test_vmap_and_grad_of_functorch(causal):
    q, k, v = detached(12, batch=3)

    def loss(q, k, v):
        return flow_attention(q[None], k[None], v[None], causal=causal, chunk_size=5).square().sum()

    each = torch.func.vmap(torch.func.grad(loss))(q, k, v)
    q.requires_grad_()
    (expected,) = torch.autograd.grad(flow_attention(q, k, v, causal=causal).square().sum(), [q])
    assert_close("gradient of q", each, expected)
