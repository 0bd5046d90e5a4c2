"""The gated delta rule beyond the contract: its memory, its decay, its chunks and blocks, what it keeps."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from common.ops import gated_delta_attention
from common.ops.gated_delta.causal import delta_chunks
from common.ops.gated_delta.reference import gated_delta_attention_reference
from common.ops.shared.cpu.dispatch import VARIABLE, has_numba
from tests.common.inputs import padding, qkv
from tests.common.properties import bytes_kept, largest_tensor
from tests.compare import assert_all_close, assert_close, gradients
from tests.torch_versions import NEWER_THAN_2_6

H = 2
#: The rule without a module around it, on unmodified queries, keys and values.
BARE = {"qk_activation": "none", "qk_norm": "none", "v_activation": "none"}

with_kernels = pytest.param(
    "1", marks=pytest.mark.skipif(not has_numba(), reason="Numba is not installed"), id="kernels"
)


@pytest.fixture(params=[with_kernels, pytest.param("0", id="plain")])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels, and in plain PyTorch."""
    monkeypatch.setenv(VARIABLE, request.param)


def gates(n: int, decay: float | None = 1.0, *, beta: float = 1.0, batch: int = 2, heads: int = H) -> dict[str, Tensor]:
    """beta from 0 to ``beta`` and log decays from 0 to -``decay``, as leaves; no decay if None."""
    generator = torch.Generator().manual_seed(5)
    uniform = torch.rand(2, batch, heads, n, generator=generator, dtype=torch.float64)
    tensors = (
        {"beta": beta * uniform[0]} if decay is None else {"beta": beta * uniform[0], "log_decay": -decay * uniform[1]}
    )
    return {name: x.requires_grad_() for name, x in tensors.items()}


def single(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copy the numbers to float32 leaves."""
    return tuple(x.detach().float().requires_grad_() for x in tensors)


def assert_agrees(inputs, given: dict[str, Tensor], out: Tensor, expected: Tensor, tolerance: float | None = None):
    """Compare outputs and all gradients."""
    assert_close("out", out, expected, tolerance)
    leaves = dict(zip("qkv", inputs)) | given
    assert_all_close(leaves, gradients(out, leaves.values()), gradients(expected, leaves.values()), tolerance)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("side", ["none", "holes"])
@pytest.mark.parametrize("chunk_size", [4, 64])
@pytest.mark.parametrize("decay", [None, 0.1, 30.0])
def test_chunks_are_the_recurrence(decay, chunk_size, side):
    """Over several chunks and parts of them, with gates from nearly 0 to nearly 1, and beta up to 2."""
    inputs, gate_tensors, mask = qkv(39), gates(39, decay, beta=2.0), padding(side, 2, 39)
    masks = {"key_padding_mask": mask, "query_padding_mask": mask}
    out = gated_delta_attention(*inputs, **gate_tensors, **masks, chunk_size=chunk_size)
    assert_agrees(inputs, gate_tensors, out, gated_delta_attention_reference(*inputs, **gate_tensors, **masks))


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("decay, d, e", [(None, 64, 3), (0.3, 64, 3), (0.3, 32, 70)])
def test_blocks_of_many_heads_are_the_recurrence(decay, d, e):
    """With 64 heads of 64 channels, a block holds 32 tokens: two chunks, and only part of the last one."""
    inputs, gate_tensors = qkv(77, batch=8, heads=8, d=d, e=e), gates(77, decay, batch=8, heads=8)
    out = gated_delta_attention(*inputs, **gate_tensors, chunk_size=16)
    assert_agrees(inputs, gate_tensors, out, gated_delta_attention_reference(*inputs, **gate_tensors))


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("decay", [None, 0.02])
@pytest.mark.parametrize("n", [15, 16, 17, 300])
def test_what_traces_operations_sees_the_same(n, decay):
    """As many chunks as are processed in a loop, one more, and nested groups: 150 chunks."""
    (q, k, v), gate_tensors = qkv(n), gates(n, decay)
    q, k = (F.normalize(x.detach(), dim=-1).requires_grad_() for x in (q, k))
    memory = torch.randn(2, H, 5, 3, dtype=torch.float64, requires_grad=True)
    log_decay = gate_tensors.get("log_decay")
    graph, after = delta_chunks(q, k, v, gate_tensors["beta"], log_decay, 2, memory)
    state = {"memory": memory}
    out, last = gated_delta_attention(5**0.5 * q, k, v, **gate_tensors, **BARE, initial_state=state, return_state=True)
    leaves = {"q": q, "k": k, "v": v, "memory": memory, **gate_tensors}
    for name, actual, expected in (("out", graph, out), ("memory", after, last["memory"])):
        assert_close(name, actual, expected)
        pair = (gradients(x, leaves.values(), retain_graph=True) for x in (actual, expected))
        assert_all_close(leaves, *pair)


@pytest.mark.skipif(not has_numba(), reason="the graph is plain PyTorch without Numba, and for a range of lengths")
@pytest.mark.parametrize("decay", [None, 0.5])
def test_one_graph_that_does_not_grow_with_the_chunk_is_for_any_length(decay, monkeypatch):
    """In a host's layout, with heads inside. In plain PyTorch, compiling this graph takes minutes."""
    monkeypatch.setenv(VARIABLE, "1")
    sizes = []
    for chunk_size in (2, 8):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(gated_delta_attention, backend=counter, fullgraph=True, dynamic=True)
        for n in (19, 12, 33):
            inputs = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in qkv(n)]
            gate_tensors = gates(n, decay)
            with torch.compiler.set_stance("fail_on_recompile" if NEWER_THAN_2_6 and n != 19 else "default"):
                out = compiled(*inputs, **gate_tensors, chunk_size=chunk_size)
            assert_agrees(
                inputs, gate_tensors, out, gated_delta_attention(*inputs, **gate_tensors, chunk_size=chunk_size)
            )
        sizes.append(counter.op_count)
    assert sizes[0] == sizes[1] or not NEWER_THAN_2_6


@pytest.mark.usefixtures("either_way")
def test_a_new_value_of_a_key_replaces_the_old_one():
    """With orthogonal keys and beta 1, each query reads the last value of its key; a sum would read both."""
    v = torch.randn(1, 1, 12, 3, dtype=torch.float64)
    keys = torch.eye(6, dtype=torch.float64)[torch.tensor([0, 1, 2, 3, 4, 5, 2, 4, 0, 1, 2, 5])][None, None]
    ones = torch.ones(1, 1, 12, dtype=torch.float64)
    _, state = gated_delta_attention(keys, keys, v, beta=ones, **BARE, chunk_size=4, return_state=True)
    for key, last in ((0, 8), (1, 9), (2, 10), (3, 3), (4, 7), (5, 11)):
        assert_close(f"value of key {key}", state["memory"][0, 0, key], v[0, 0, last])


@pytest.mark.usefixtures("either_way")
def test_half_a_beta_moves_half_the_way_and_a_decay_forgets():
    k, v = torch.tensor([[[[0.6, 0.8]]]]).expand(1, 1, 3, 2), torch.full((1, 1, 3, 1), 8.0)
    beta, log_decay = torch.full((1, 1, 3), 0.5), torch.tensor([0.0, 0.0, 0.5]).log().view(1, 1, 3)
    out = gated_delta_attention(2**0.5 * k, k, v, beta=beta, **BARE)
    assert_close("halves", out.flatten(), torch.tensor([4.0, 6.0, 7.0]))
    out = gated_delta_attention(2**0.5 * k, k, v, beta=beta, log_decay=log_decay.clamp(min=-1e4), **BARE)
    assert_close("after what is forgotten, and half", out.flatten(), torch.tensor([4.0, 4.0, 5.0]))


@pytest.mark.usefixtures("either_way")
def test_a_closed_gate_forgets_whatever_came_before():
    """A decay of exp(-10,000) in one token leaves no trace, and does not reduce the precision of later tokens."""
    inputs, gate_tensors = single(*qkv(30)), gates(30, 0.1)
    gate_tensors = dict(zip(gate_tensors, single(*gate_tensors.values())))
    with torch.no_grad():
        gate_tensors["log_decay"][:, :, 12] = -1e4
    out = gated_delta_attention(*inputs, **gate_tensors, chunk_size=8)
    later, later_gates = [x[:, :, 12:] for x in inputs], {name: x[:, :, 12:] for name, x in gate_tensors.items()}
    assert_close("after the closed gate", out[:, :, 12:], gated_delta_attention(*later, **later_gates, chunk_size=8))
    grads = gradients(out[:, :, 12:], [*inputs, *gate_tensors.values()])
    for name, gradient in zip((*"qkv", *gate_tensors), grads):
        assert torch.isfinite(gradient).all() and gradient.norm() > 0
        assert (gradient[:, :, :12] == 0).all(), f"gradient of {name}"
    assert (grads[-1][:, :, 12] == 0).all(), "no rounding error of sums that pass the gate"


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("decay", [8.0, 20.0])
def test_gradients_of_gates_that_are_nearly_closed(decay):
    """Small gradients are as precise as large ones: single precision is compared with double on the same numbers."""
    inputs, gate_tensors = qkv(60, batch=1), gates(60, None, batch=1)
    gate_tensors["log_decay"] = torch.full((1, H, 60), -decay, dtype=torch.float64, requires_grad=True)
    rounded = single(*inputs, *gate_tensors.values())
    out = gated_delta_attention(*rounded[:3], **dict(zip(gate_tensors, rounded[3:])), chunk_size=16)
    expected = gated_delta_attention(*inputs, **gate_tensors, chunk_size=16)
    (gradient,), (wanted,) = gradients(out, rounded[4:]), gradients(expected, [gate_tensors["log_decay"]])
    assert_close("gradient of log_decay", gradient, wanted, 1e-5)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("decay, beta", [(None, 1.0), (None, 2.0), (1e-4, 2.0), (50.0, 1.0)])
def test_thousands_of_tokens_in_single_precision(decay, beta):
    """Memory neither grows nor vanishes, and gradients match float64, with every beta near its maximum."""
    inputs, gate_tensors = qkv(4096, batch=1, d=16, e=8), gates(4096, decay, batch=1)
    gate_tensors["beta"] = (beta - 1e-3 * gate_tensors["beta"].detach()).requires_grad_()
    expected = gated_delta_attention(*inputs, **gate_tensors)
    rounded = single(*inputs, *gate_tensors.values())
    out = gated_delta_attention(*rounded[:3], **dict(zip(gate_tensors, rounded[3:])))
    assert_close("out", out, expected, 1e-5)
    assert 0.01 < out[:, :, -100:].norm() / out[:, :, 100:200].norm() < 100
    names = (*"qkv", *gate_tensors)
    wanted = gradients(expected, [*inputs, *gate_tensors.values()])
    assert_all_close(names, gradients(out, rounded), wanted, 1e-4)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("beta", [0.9, 1.0, 1.9, 2.0])
def test_equal_keys_in_single_precision(beta):
    """The triangle of a chunk is then full of ``beta``: a series for its inverse would lose every digit."""
    q, k, v = qkv(130, d=16, batch=1)
    gate_tensors = {"beta": torch.full((1, H, 130), beta, dtype=torch.float64)}
    k = k[:, :, :1] + 1e-3 * k
    expected = gated_delta_attention_reference(q, k, v, **gate_tensors)
    rounded = single(q, k, v, gate_tensors["beta"])
    assert_close("out", gated_delta_attention(*rounded[:3], beta=rounded[3], chunk_size=64), expected, 1e-4)


@pytest.mark.usefixtures("either_way")
def test_a_backward_pass_does_not_keep_the_memory_of_every_token():
    """No memory per chunk of 32 either: fewer than nine tensors the size of q are kept, and none of more than two."""
    n, d = 4096, 64
    inputs = [x.detach().requires_grad_() for x in qkv(n, batch=1, d=d, e=d, dtype=torch.float32)]
    gate_tensors = dict(zip(("beta", "log_decay"), single(*gates(n, batch=1).values())))

    def call() -> Tensor:
        return gated_delta_attention(*inputs, **gate_tensors)

    assert bytes_kept(call) <= 9 * 4 * H * n * d
    leaves = [*inputs, *gate_tensors.values()]
    assert largest_tensor(lambda: gradients(call(), leaves)) <= 2 * H * n * d


def flash_linear_attention(module: str):
    return pytest.importorskip(f"fla.ops.{module}.naive")


def test_it_is_flash_linear_attention_s():
    """Their naive recurrence, if that package is installed; its layout is (B, n, H, channels)."""
    naive = flash_linear_attention("gated_delta_rule").naive_recurrent_gated_delta_rule
    q, k, v = single(*qkv(37))
    k = F.normalize(k, dim=-1)
    beta, log_decay = single(*gates(37).values())
    out, state = gated_delta_attention(q, k, v, beta=beta, log_decay=log_decay, **BARE, chunk_size=8, return_state=True)
    transposed = (x.transpose(1, 2) for x in (q, k, v, beta, log_decay))
    expected, last = naive(*transposed, output_final_state=True)
    assert_close("out", out, expected.transpose(1, 2))
    assert_close("state", state["memory"], last)


def test_without_a_gate_it_is_flash_linear_attention_s_delta_rule():
    """Their naive recurrence of DeltaNet, if that package is installed."""
    naive = flash_linear_attention("delta_rule").delta_rule_recurrence
    q, k, v = single(*qkv(37))
    k = F.normalize(k, dim=-1)
    (beta,) = single(*gates(37, None).values())
    out, state = gated_delta_attention(q, k, v, beta=beta, **BARE, chunk_size=8, return_state=True)
    expected, last = naive(q, k, v, beta)
    assert_close("out", out, expected)
    assert_close("state", state["memory"], last)
