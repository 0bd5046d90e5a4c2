"""The operations of ``common.ops`` beside torch's attention, the authors' formulas and other packages."""

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import cache, partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from common.ops import daft_conv, flow_attention, gated_delta_attention, linear_attention, local_attention
from common.ops.daft.conv_reference import daft_conv_reference
from common.ops.flow.reference import flow_attention_reference
from common.ops.gated_delta.reference import gated_delta_attention_reference
from common.ops.linear.reference import linear_attention_reference

from .measure import Candidate, Case, Place, compared, random, runs_of
from .peers import attention_maps, direct_convolution, released_attention

H, D, BATCH = 8, 64, 8
WIDTH, WINDOW = 512, 64  # of DAFT-conv
REACH = 128  # tokens that local attention sees before a query
SOFTMAX = "fused softmax"
INSTALL = {"fla": "pip install flash-linear-attention"}


class Check(NamedTuple):
    """A comparison with a reference."""

    reference: Callable[..., Tensor]
    tokens: int = 2**30  # at no more than these
    heads: int | None = None  # the reference computes only this many last heads
    call: Callable[..., Tensor] | None = None  # in place of the timed function, with another option


class Function(NamedTuple):
    """One implementation of an operation."""

    call: Callable[..., Tensor]
    checks: tuple[Check, ...]
    package: str = ""  # the module that it needs
    most: int = 2**30  # tokens beyond which it takes gigabytes and minutes


def operation(shapes: Callable, functions: dict[str, Function], size: int, place: Place) -> list[Candidate]:
    """Functions of the same inputs, whose shapes depend on the number of tokens."""
    inputs = random(place, *shapes(size))
    return [_candidate(name, function, shapes, size, place, inputs) for name, function in functions.items()]


def _candidate(
    name: str, function: Function, shapes: Callable, size: int, place: Place, inputs: Sequence[Tensor]
) -> Candidate:
    if function.package and find_spec(function.package) is None:
        command = INSTALL.get(function.package, "pip install '.[bench]'")
        return Candidate(name, absent=f"not installed: {command}")
    if size > function.most:
        return Candidate(name, absent=f"it takes gigabytes and minutes; run up to {function.most:,} tokens")

    def check() -> dict[str, float]:
        errors = [_errors(function.call, one, shapes, min(size, one.tokens), place) for one in function.checks]
        return {f"{tensor} ({i})": x for i, found in enumerate(errors, 1) for tensor, x in found.items()}

    return Candidate(name, inputs[0].shape[0] * size, runs_of(function.call, inputs), check)


@cache  # a reference is a slow loop, and the same for every longer input
def _errors(call: Callable, check: Check, shapes: Callable, tokens: int, place: Place) -> dict[str, float]:
    return compared(check.call or call, check.reference, random(place, *shapes(tokens)), check.heads)


def heads(tokens: int, batch: int = 1) -> list[tuple[int, ...]]:
    """Shapes of q, k and v."""
    return [(batch, H, tokens, D)] * 3


def softmax(causal: bool) -> Function:
    """torch's fused attention of q, k and v; further inputs are those of other functions."""

    def call(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def written_out(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        return attention_maps.softmax_attention(q, k, v, causal=causal)

    return Function(call, (Check(written_out, 1024),))


def _by_channels(attention: Callable, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Eight channels of v at a time; they are independent, and all would need gigabytes."""
    parts = [checkpoint(attention, q, k, part, use_reentrant=False) for part in v.split(8, dim=-1)]
    return torch.cat(parts, dim=-1)


def flow(causal: bool) -> Function:
    """Flow-Attention, compared with its literal reference, and at the timed length with the authors' formula.

    The latter with a clamp that no flow reaches: the gradient jumps at the usual clamp of 1, and a few of a million
    flows are so close to it that float64 puts them on the other side.
    """
    authors = partial(released_attention.causal if causal else released_attention.full, clamp=20.0)
    at_length = Check(partial(_by_channels, authors), heads=1, call=partial(flow_attention, causal=causal, clamp=20.0))
    return Function(partial(flow_attention, causal=causal), (_literal_flow(causal), at_length))


def _literal_flow(causal: bool) -> Check:
    return Check(partial(flow_attention_reference, causal=causal), 97, heads=1)  # no block size divides 97


def flows(causal: bool) -> dict[str, Function]:
    """Flow-Attention, fused softmax attention and the authors' formula, whose causal form sums kᵀv at each position."""
    authors = released_attention.causal if causal else released_attention.full
    most = 2048 if causal else 2**30
    formula = Function(authors, (_literal_flow(causal),), most=most)
    return {"flow_attention": flow(causal), SOFTMAX: softmax(causal), "authors' form": formula}


@cache
def _compiled(tokens: int) -> Callable:
    """Compile for one length, after a reset: torch.compile gives up on a function after a few lengths."""
    torch.compiler.reset()
    return torch.compile(partial(flow_attention, causal=True), dynamic=False)


def compiled_flow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal Flow-Attention under torch.compile."""
    return _compiled(q.shape[2])(q, k, v)


def fla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Unnormalised causal linear attention of flash-linear-attention: another function with the same products."""
    from fla.ops.linear_attn import chunk_linear_attn

    out, _ = chunk_linear_attn(*(x.transpose(1, 2) for x in (q, k, v)), scale=1.0, normalize=False)
    return out.transpose(1, 2)


@cache
def _performer() -> torch.nn.Module:
    """performer-pytorch's attention with relu features of the channels themselves, as in the FLASH paper's baseline."""
    import performer_pytorch

    scale = D**-0.25  # it multiplies q and k by this; a factor of all features cancels
    relu = lambda x: F.relu(x) + (1e-6 * scale - 1e-3)  # it adds 1e-3 itself
    with redirect_stdout(io.StringIO()):  # it prints that a kernel of another package is missing
        layer = performer_pytorch.FastAttention(
            D, nb_features=D, causal=True, generalized_attention=True, kernel_fn=relu
        )
    layer.projection_matrix = None
    return layer


def local_package(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """local-attention's causal window of the token itself and those before it."""
    from local_attention import LocalAttention

    return LocalAttention(REACH, causal=True, exact_windowsize=True, autopad=True)(q, k, v)


def short_inputs() -> dict[str, Function]:
    """Mechanisms with kernels, and gates made of normal numbers, which is timed, too."""

    def plain(function: Callable, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        return function(q, k, v, causal=True)

    def by_head(function: Callable, q: Tensor, k: Tensor, v: Tensor, head: Tensor, *_: Tensor) -> Tensor:
        return function(q, k, v, causal=True, log_decay=-head.abs())

    def by_channel(function: Callable, q: Tensor, k: Tensor, v: Tensor, _: Tensor, channel: Tensor) -> Tensor:
        return function(q, k, v, causal=True, log_decay=-channel.abs())

    def delta(function: Callable, q: Tensor, k: Tensor, v: Tensor, head: Tensor, *_: Tensor) -> Tensor:
        return function(q, k, v, causal=True, beta=head.sigmoid(), log_decay=-head.abs())

    linear = linear_attention, linear_attention_reference
    rows = {
        "linear": (plain, *linear),
        "linear, gates by head": (by_head, *linear),
        "linear, gates by channel": (by_channel, *linear),
        "gated delta rule": (delta, gated_delta_attention, gated_delta_attention_reference),
        "flow": (plain, flow_attention, flow_attention_reference),
    }
    ours = {
        name: Function(partial(call, function), (Check(partial(call, reference), 37, heads=1),))
        for name, (call, function, reference) in rows.items()
    }
    return {**ours, SOFTMAX: softmax(causal=True)}


def gated_shapes(tokens: int, batch: int = 1) -> list[tuple[int, ...]]:
    """Shapes of q, k, v, and of the numbers that gates by head and by channel are made of."""
    vectors = (batch, H, tokens, D)
    return [vectors, vectors, vectors, vectors[:3], vectors]


def _daft_shapes(tokens: int) -> list[tuple[int, ...]]:
    return [(1, tokens, WIDTH), (1, tokens, H), (1, tokens, WIDTH), (H, WINDOW)]


def _causal_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).tril() @ v


def _case(title: str, sizes: Sequence[int], shapes: Callable, functions: dict[str, Function], **further) -> Case:
    """A case compared with its last function, or with fused softmax attention where that is one of them."""
    base = SOFTMAX if SOFTMAX in functions else list(functions)[-1]
    return Case(title, sizes, partial(operation, shapes, functions), base, **further)


_LENGTHS = (128, 256, 384, 512, 1024, 2048, 4096, 8192, 16384)
_CAUSAL = flows(causal=True)
_DAFT_CHECKS = (Check(partial(daft_conv_reference, causal=True), 75), Check(attention_maps.daft_conv, 700))
_RELU_MAP = (Check(attention_maps.relu_attention, 700, heads=1),)
_LOCAL_MAP = (Check(partial(attention_maps.local_attention, window=REACH + 1), 700, heads=1),)
CASES = {
    "causal_flow": _case("Causal Flow-Attention", _LENGTHS, heads, _CAUSAL),
    "causal_flow_batch": _case(
        f"Causal Flow-Attention, {BATCH} sequences",
        _LENGTHS[:5],
        partial(heads, batch=BATCH),
        {name: _CAUSAL[name] for name in ("flow_attention", SOFTMAX)},
    ),
    "full_flow": _case("Flow-Attention, not causal", (128, 196, *_LENGTHS[1:-1]), heads, flows(causal=False)),
    "causal_flow_cuda": _case(
        "Causal Flow-Attention on a GPU",
        tuple(2**i for i in range(10, 18)),
        heads,
        {
            "flow_attention": _CAUSAL["flow_attention"],
            SOFTMAX: softmax(causal=True),
            "flash-linear-attention": Function(fla, (Check(_causal_product, 1024),), "fla"),
        },
        devices=("cuda",),
    ),
    "causal_flow_compiled": _case(
        "Causal Flow-Attention, compiled for each length",
        (128, 256, 512, 1024),
        heads,
        {"flow_attention, compiled": Function(compiled_flow, (_literal_flow(True),)), SOFTMAX: softmax(causal=True)},
    ),
    "daft_conv": _case(
        f"DAFT-conv, causal; width {WIDTH}, window {WINDOW}",
        (512, 1024, 2048, 4096),
        _daft_shapes,
        {
            "daft_conv": Function(partial(daft_conv, causal=True), _DAFT_CHECKS),
            "direct convolution": Function(direct_convolution.daft_conv, _DAFT_CHECKS),
        },
    ),
    "performer_pytorch": _case(
        "Causal linear attention with relu features",
        (1024, 4096),
        heads,
        {
            "linear_attention": Function(partial(linear_attention, causal=True, phi="relu"), _RELU_MAP),
            "performer-pytorch": Function(lambda *qkv: _performer()(*qkv), _RELU_MAP, "performer_pytorch"),
        },
    ),
    "local_attention": _case(
        f"Causal attention to the token itself and {REACH} before it",
        (1024, 4096, 16384),
        heads,
        {
            "local_attention": Function(partial(local_attention, window=REACH + 1, causal=True), _LOCAL_MAP),
            "local-attention": Function(local_package, _LOCAL_MAP, "local_attention"),
        },
    ),
    "short_inputs": _case("Causal attention of short inputs", (64, 128, 256, 512), gated_shapes, short_inputs()),
    "short_inputs_batch": _case(
        f"Causal attention of short inputs, {BATCH} sequences",
        (64, 128, 256, 512),
        partial(gated_shapes, batch=BATCH),
        short_inputs(),
    ),
}
