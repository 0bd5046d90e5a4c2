"""torch.compile, torch.export, TorchScript and torch.func work with every mechanism unchanged."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from common.ops.shared.state import largest_states
from tests.common.contract.mechanisms import (
    CASES,
    DEFAULTS,
    IN_TORCHSCRIPT,
    LONGEST,
    PATHS,
    PLAIN,
    Case,
    at,
    both,
    cases,
    is_linear,
    leaves,
    refused,
    run_in_parts,
    tensors,
    without,
)
from tests.common.inputs import padding
from tests.compare import assert_close, assert_gradients_close
from tests.torch_versions import NEWER_THAN_2_6

#: Mechanisms that cut a sequence into windows or chunks.
IN_WINDOWS = ("bigbird", "local", "longformer", "reformer", "sparse")
#: Mechanisms that are "linear" with another function of each query and key: test_one_graph_is_for_any_length has them.
LIKE_LINEAR = ("cosformer", "hedgehog", "t2r")
#: Mechanisms whose state grows as that of "local" does.
LIKE_LOCAL = ("lolcats", "longformer")
#: The mechanisms with separate code for sums that forget, and one kind of gates for each.
FORGETTING = {"favor": "channel", "flow": "channel", "mixed_chunk": "head"}
#: Options with separate code: DAFT with only its window, and one window entry by indexing.
OF_DAFT = ("local_only=True", "gumbel_temperature=0.5")
#: Every mechanism by itself, and the options above.
traced = [*PLAIN, *(case for case in CASES if case.label in OF_DAFT and case.causal)]
#: Mechanisms by themselves, some after a short convolution, and some with sums that forget.
around = [*traced, *(case for case in DEFAULTS if case.short_conv or case.forget == FORGETTING.get(case.name))]


def with_variants(case: Case) -> Case:
    """A causal mechanism with every supported addition in front; other mechanisms unchanged."""
    if not (case.causal and is_linear(case.kind) and case in PLAIN):
        return case
    forget = FORGETTING.get(case.name, "head") if "forget" in case.kind.supports else "none"
    return case._replace(short_conv=2, forget=forget)


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    """Discard the graphs of other tests."""
    torch._dynamo.reset()


def removes_padding(case: Case) -> bool:
    """Whether rows have other lengths, by their masks: a function of whole rows, which has no mask."""
    return not case.causal and "key_padding_mask" not in getattr(case.kind, "arguments", ("key_padding_mask",))


in_one_graph = [case for case in traced if not removes_padding(case)]
decoders = {case.name for case in PLAIN if case.causal}


@cases(
    with_variants(case)
    for case in in_one_graph
    if (case.causal and case.name not in LIKE_LINEAR) or case.name not in decoders
)
def test_it_compiles_into_one_graph_with_its_backward_pass(case):
    """Tracing both passes costs a second per case, so each mechanism has one case, and the input spans two chunks.

    Each operation's gradient has the memory layout that it was traced with; ``test_one_graph_is_for_any_length``
    tests causal mechanisms by themselves.
    """
    assert_compiles(case, "aot_eager")


@cases(case for case in in_one_graph if not case.causal and case.name in decoders)
def test_it_compiles_into_one_graph_in_the_other_direction(case):
    """Only Dynamo traces it, and autograd differentiates the graph."""
    assert_compiles(case, "eager")


def assert_compiles(case: Case, backend: str) -> None:
    """Outputs and gradients of the only graph are those of the module, with padding."""
    module, mask = case.build(torch.float32), padding("left", 2, 8)
    inputs = tensors(module, 8, dtype=torch.float32)
    out = torch.compile(module, backend=backend, fullgraph=True)(**inputs, **both(mask))
    expected = module(**inputs, **both(mask))
    assert_close("out", out, expected)
    assert_gradients_close(out, expected, leaves(inputs, module))


def exports_any_length(case: Case) -> bool:
    """Whether torch.export supports a dynamic number of tokens."""
    alone = case.causal or case.image or "export_of_any_length" in without(case.name)
    return not alone and (NEWER_THAN_2_6 or case.name not in IN_WINDOWS)


@cases(case for case in PLAIN if is_linear(case.kind) and not (case.image or exports_any_length(case)))
def test_one_graph_is_for_any_length(case):
    """The sequences have several chunks. ``aot_eager``, which traces both passes, would take minutes.

    If torch.export supports dynamic lengths, the export test shows the same.
    """
    module = case.build(torch.float32)
    compiled = torch.compile(module, backend="eager", fullgraph=True, dynamic=True)
    for n in (23, 17):
        inputs = tensors(module, n, dtype=torch.float32)
        again = NEWER_THAN_2_6 and n != 23
        with torch.compiler.set_stance("fail_on_recompile") if again else nullcontext():
            out, expected = compiled(**inputs), module(**inputs)
        assert_close(f"out of {n} tokens", out, expected)
        assert_gradients_close(out, expected, leaves(inputs, module))


@cases((case for case in around if is_linear(case.kind)), causal=True)
@torch.no_grad()
def test_steps_of_decoding_compile_into_one_graph(case):
    """Steps begin with a state of the largest size, or of the only size."""
    module, graphs = case.build(torch.float32), []
    inputs = tensors(module, 8, dtype=torch.float32, grad=False)

    def backend(graph, _):
        graphs.append(graph)
        return graph

    step = torch.compile(module.extend, backend=backend, fullgraph=True, dynamic=False)
    # The state after many tokens may have other strides than after one.
    with largest_states():
        state, whole = run_in_parts(module, inputs, (3, 1))[1][-1], module(**inputs)
    for t in range(4, 8):
        out, state = step(**at(inputs, slice(t, t + 1)), state=state)
        assert_close("out", out, whole[:, :, t : t + 1])
    assert len(graphs) == 1


@cases(
    (case for case in PLAIN if is_linear(case.kind) and case.build().state_tokens() and case.name not in LIKE_LOCAL),
    causal=True,
)
@torch.no_grad()
def test_steps_from_a_state_that_grows_compile(case):
    module = case.build(torch.float32)
    inputs = tensors(module, 7, dtype=torch.float32, grad=False)
    step, whole = torch.compile(module.extend, backend="eager", fullgraph=True), module(**inputs)
    _, state = module.extend(**at(inputs, slice(0, 2)))
    for t in range(2, 7):
        out, state = step(**at(inputs, slice(t, t + 1)), state=state)
        assert_close("out", out, whole[:, :, t : t + 1])


def positional(module, n: int, dtype: torch.dtype, grad: bool = False) -> tuple[list, dict]:
    """q, k and v, and other keyword arguments, in the form that torch.export and TorchScript accept."""
    inputs = tensors(module, n, dtype=dtype, grad=grad)
    return [inputs.pop(x) for x in "qkv"], inputs


@cases(traced)
def test_it_exports(case):
    """Bidirectional sequences are exported with a dynamic length, others with a fixed one."""
    module = case.build()
    qkv, named = positional(module, 12, torch.float64)
    tokens = torch.export.Dim("tokens", min=2, max=LONGEST)
    any_length = exports_any_length(case) and not named
    shapes = [None if x is None else {2: tokens} for x in qkv] if any_length else None
    program = torch.export.export(module, tuple(qkv), named, dynamic_shapes=shapes)
    for n in (12, 3, LONGEST) if any_length else (12,):
        qkv, named = positional(module, n, torch.float64)
        assert_close(f"out of {n} tokens", program.module()(*qkv, **named), module(*qkv, **named))


@cases((case for case in PATHS if case.name in IN_TORCHSCRIPT and not case.rotary), causal=False)
def test_it_is_torchscript(case, tmp_path):
    """TorchScript is meant for images: the module is saved and loaded, and gradients are compared too."""
    module = case._replace(image=True).build()
    torch.jit.script(module).save(tmp_path / "module.pt")
    scripted = torch.jit.load(tmp_path / "module.pt")
    for dtype in (torch.float64, torch.bfloat16):
        qkv, named = positional(module, 21, dtype, grad=True)
        out, expected = scripted(*qkv, **named), module(*qkv, **named)
        assert out.dtype == dtype
        assert_close("out", out, expected)
        if dtype == torch.float64:
            assert_gradients_close(out, expected, {name: x for name, x in zip("qkv", qkv) if x is not None})


@cases(case for case in PLAIN if case.name in IN_TORCHSCRIPT and not case.causal)
def test_torchscript_stays_precise_under_autocast(case):
    """Large keys are included."""
    module = case._replace(image=True).build(torch.float32)
    (q, k, v), named = positional(module, 36, torch.float32)
    scripted = torch.jit.script(module)
    for scale in (1.0, 30.0):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = scripted(q, scale * k, v, **named)
        assert_close("out", out.float(), module(q, scale * k, v, **named), 1e-2)


@cases(case for case in DEFAULTS if case.name not in IN_TORCHSCRIPT or case.short_conv)
def test_torchscript_of_what_has_none_is_refused_in_words(case):
    """Alone or inside a model, and repeatedly; the compiler's own message would not mention the mechanism."""
    module = case.build()
    for model in (module, torch.nn.Sequential(torch.nn.Identity(), module)):
        with refused("attention"):
            torch.jit.script(model)


@cases((case for case in PLAIN if case.name in IN_TORCHSCRIPT), causal=True)
def test_torchscript_of_causal_attention_is_refused(case):
    """The error comes from scripting or from the call."""
    module = case.build()
    qkv, _ = positional(module, 5, torch.float64)
    with pytest.raises((ValueError, torch.jit.Error), match="allowed in TorchScript"):
        torch.jit.script(module)(*qkv)


@cases(DEFAULTS)
def test_gradients_of_each_sample_by_functorch(case):
    module = case.build()
    inputs = tensors(module, 11, batch=3)
    named_tensors = {name: x.detach() for name, x in inputs.items() if isinstance(x, Tensor)}
    other_inputs = {name: x for name, x in inputs.items() if name not in named_tensors}

    def loss(sample: dict[str, Tensor]) -> Tensor:
        return module(**{name: x[None] for name, x in sample.items()}, **other_inputs).square().sum()

    each = torch.func.vmap(torch.func.grad(loss))(named_tensors)
    unused = {"allow_unused": True, "materialize_grads": True}
    wanted = torch.autograd.grad(module(**inputs).square().sum(), [inputs[name] for name in named_tensors], **unused)
    for name, expected in zip(named_tensors, wanted):
        assert_close(f"gradient of {name}", each[name], expected)


@cases(case for case in PLAIN if not is_linear(case.kind) and not case.image)
def test_functorch_of_more_tokens_than_a_block(case):
    """Eager PyTorch recomputes blocks in the backward pass, using hooks that torch.func does not support."""
    module = case.build(max_tokens=257)
    inputs = tensors(module, 257, batch=1, grad=False)
    v, other_inputs = inputs.pop("v"), inputs
    actual = torch.func.grad(lambda v: module(v=v, **other_inputs).square().sum())(v)
    (expected,) = torch.autograd.grad(module(v=v.requires_grad_(), **other_inputs).square().sum(), v)
    assert_close("gradient of v", actual, expected)


@cases(DEFAULTS)
def test_dropout_drops_whole_sources_where_a_rate_is_given(case):
    """Both in training and evaluation mode, since hosts decide when to drop. A rate of 0 draws no random numbers."""
    module = case.build()
    inputs = tensors(module, 12, batch=1, grad=False)
    whole, random = module(**inputs), torch.get_rng_state()
    assert torch.equal(module(**inputs, dropout_p=0.0), whole) and torch.equal(torch.get_rng_state(), random)
    dropped = module(**inputs, dropout_p=0.4)
    assert not torch.allclose(dropped, whole) and torch.isfinite(dropped).all()
    if "dropout_of_sources" not in without(case.name) and case.short_conv is None:
        torch.set_rng_state(random)
        factors = torch.nn.functional.dropout(torch.ones_like(inputs["v"][..., :1]), 0.4)
        assert torch.equal(module(**{**inputs, "v": inputs["v"] * factors}), dropped)
