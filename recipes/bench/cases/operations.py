"""The operations of ``common.ops`` and their peers, one row each: torch, the authors' formulas and other packages.

Tensors are (B, H, n, d) with B = 1, H = 8 and d = 64 for Flow-Attention and linear attention, and (B, n, channels) for
DAFT-conv.
"""

import io
import os
import shutil
from contextlib import redirect_stdout
from functools import lru_cache, partial

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from common.ops import daft_conv, flow_attention, linear_attention, local_attention
from common.ops.daft.conv_reference import daft_conv_reference
from common.ops.flow.reference import flow_attention_reference

from ..harness.operations import Attention, Check, Function, Operation
from ..harness.work import BACKWARD, FORWARD, Amount, Settings
from ..peers import attention_maps, direct_convolution, released_attention

FLOW, AUTHORS, SOFTMAX, FLA = "flow_attention", "authors' form", "fused softmax", "flash-linear-attention"
COMPILED = "flow_attention, compiled"
LINEAR, PERFORMER = "linear_attention", "performer-pytorch"
DAFT, DIRECT = "daft_conv", "direct convolution"
LOCAL, LOCAL_PACKAGE = "local_attention", "local-attention"
HEADS, HEAD_DIM = 8, 64
#: Sequences of a batch, in the case with several.
BATCH = 8
#: Shape of DAFT-conv's inputs.
WIDTH, WINDOW = 512, 64
#: Tokens that local attention sees before a query.
LOCAL_REACH = 128

#: Lengths of comparisons: with a literal reference, which loops over tokens, and with a map of all pairs of tokens.
#: No chunk size divides the first two.
_LITERAL, _LITERAL_DAFT, _MAP, _SOFTMAX_MAP = 97, 75, 700, 1024
#: A clamp that no flow reaches, for comparing at the timed lengths. The gradient jumps at the usual clamp of 1, which
#: flows often exceed; a few of a million flows are so close to it that float64 puts them on the other side.
_CLAMP_NEVER_REACHED = 20.0
#: Channels of v per call of the authors' causal formula where it is the reference.
_CHANNELS = 8
#: The share of the free memory that the authors' causal formula may use, and its longest sequence, beyond which a run
#: takes minutes.
_MEMORY_SHARE, _AUTHORS_LONGEST = 0.3, 2048
#: Tensors of shape (n, d, e) per head that are alive at the peak of its backward pass.
_AUTHORS_TENSORS = 5
#: Tokens of a chunk in the floor of Flow-Attention; equal to the number of channels of a head.
_FLOOR_CHUNK = 64


def _heads_first(tokens: int) -> list[tuple[int, ...]]:
    """The shapes of q, k and v."""
    return [(1, HEADS, tokens, HEAD_DIM)] * 3


def _batch_of_heads_first(tokens: int) -> list[tuple[int, ...]]:
    """The shapes of q, k and v of several sequences."""
    return [(BATCH, HEADS, tokens, HEAD_DIM)] * 3


def _daft_shapes(tokens: int) -> list[tuple[int, ...]]:
    """The shapes of q, k, v and the filters r."""
    return [(1, tokens, WIDTH), (1, tokens, HEADS), (1, tokens, WIDTH), (HEADS, WINDOW)]


def _by_channels(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Apply ``attention`` to a few channels of v at a time; they are independent, and all would need gigabytes."""
    parts = [checkpoint(attention, q, k, part, use_reentrant=False) for part in v.split(_CHANNELS, dim=-1)]
    return torch.cat(parts, dim=-1)


def authors_refusal(settings: Settings, size: int) -> str | None:
    """Why the authors' causal formula, which sums kᵀv at every position, is not run at ``size``; None if it is."""
    itemsize = torch.empty(0, dtype=settings.dtype).element_size()
    needed = _AUTHORS_TENSORS * HEADS * size * HEAD_DIM**2 * itemsize
    free = torch.cuda.mem_get_info()[0] if settings.device == "cuda" else psutil.virtual_memory().available
    if needed > _MEMORY_SHARE * free:
        return f"it needs {needed / 2**30:.1f} GiB; allowed here: {_MEMORY_SHARE * free / 2**30:.1f}"
    if size > _AUTHORS_LONGEST:
        return f"it needs {needed / 2**30:.1f} GiB and minutes; run up to {_AUTHORS_LONGEST:,} tokens"
    return None


def _flow_functions(causal: bool) -> tuple[Function, Function, Function]:
    """Flow-Attention, fused softmax attention and the authors' formula."""
    authors = released_attention.causal if causal else released_attention.full
    literal = Check(partial(flow_attention_reference, causal=causal), _LITERAL, heads=1)
    long = Check(
        partial(_by_channels, partial(authors, clamp=_CLAMP_NEVER_REACHED)),
        heads=1,
        function=partial(flow_attention, causal=causal, clamp=_CLAMP_NEVER_REACHED),
    )
    return (
        Function(FLOW, partial(flow_attention, causal=causal), (literal, long)),
        softmax_function(causal),
        Function(AUTHORS, authors, (literal,), refusal=authors_refusal if causal else None),
    )


def _softmax(causal: bool, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def softmax_function(causal: bool) -> Function:
    """Fused softmax attention of q, k and v; further inputs are those of other functions."""
    softmax_map = Check(partial(_softmax_map, causal), _SOFTMAX_MAP)
    return Function(SOFTMAX, partial(_softmax, causal), (softmax_map,))


def _softmax_map(causal: bool, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    return attention_maps.softmax_attention(q, k, v, causal=causal)


def _flow_work(products: int, name: str, size: int, run: str) -> Amount | None:
    """The least work of Flow-Attention: arithmetic per chunk of 64 tokens of a head, and moving every tensor once.

    Arithmetic: kᵀ v and q Σ kᵀv, and if causal q kᵀ and (q kᵀ) v inside the chunk, each 2 · 64³ operations; the
    backward pass adds twice as many. Memory: q, k, v and the output; the backward pass reads q, k, v and the output's
    gradient and writes three gradients.
    """
    if name != FLOW:
        return None
    passes, tensors = {FORWARD: (1, 4), BACKWARD: (3, 11)}[run]
    tokens = size * HEADS
    return Amount(tokens * products * 2 * _FLOOR_CHUNK * HEAD_DIM * passes, tokens * HEAD_DIM * tensors)


@lru_cache(maxsize=1)
def _compiled(tokens: int) -> Attention:
    """Compile for one length, after a reset: torch.compile gives up on a function after a few lengths."""
    torch.compiler.reset()
    return torch.compile(partial(flow_attention, causal=True), dynamic=False)


def compiled_flow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal Flow-Attention under torch.compile."""
    return _compiled(q.shape[2])(q, k, v)


def compiler_refusal(settings: Settings, size: int) -> str | None:
    """Why torch.compile cannot run here; None if it can. On a CPU it needs a C++ compiler."""
    compiler = os.environ.get("CXX", "g++")
    if settings.device == "cuda" or shutil.which(compiler):
        return None
    return f"torch.compile needs a C++ compiler, and there is no {compiler}"


def fla_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Unnormalised causal linear attention of flash-linear-attention, whose layout is (B, n, H, d)."""
    from fla.ops.linear_attn import chunk_linear_attn

    out, _ = chunk_linear_attn(*(x.transpose(1, 2) for x in (q, k, v)), scale=1.0, normalize=False)
    return out.transpose(1, 2)


@lru_cache
def _performer_layer() -> nn.Module:
    """performer-pytorch's attention with relu features of the channels themselves, as in the FLASH paper's baseline."""
    import performer_pytorch

    scale = HEAD_DIM**-0.25  # it multiplies q and k by this; a factor of all features cancels

    def relu(x: Tensor) -> Tensor:
        return F.relu(x) + (1e-6 * scale - 1e-3)  # it adds 1e-3 itself

    with redirect_stdout(io.StringIO()):  # it prints that a kernel of another package is missing
        attention = performer_pytorch.FastAttention(
            HEAD_DIM, nb_features=HEAD_DIM, causal=True, generalized_attention=True, kernel_fn=relu
        )
    attention.projection_matrix = None
    return attention


def performer_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal linear attention with relu features by performer-pytorch."""
    return _performer_layer()(q, k, v)


def local_package(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention to the token itself and the ``LOCAL_REACH`` before it, by local-attention."""
    from local_attention import LocalAttention

    return LocalAttention(LOCAL_REACH, causal=True, exact_windowsize=True, autopad=True)(q, k, v)


def _causal_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).tril() @ v


_QKV = ("q", "k", "v")
_LENGTHS, _QUICK = (128, 256, 384, 512, 1024, 2048, 4096, 8192, 16384), (128, 512, 1024)
#: Tokens of a vision transformer of 224 x 224 pixels, without its class token.
VIT = 196
_FLOW_NOTE = f"B = 1, H = {HEADS}, d = {HEAD_DIM}; released form, clamp 1"
_RELU_MAP = Check(attention_maps.relu_attention, _MAP, heads=1)
_LOCAL_MAP = Check(partial(attention_maps.local_attention, window=LOCAL_REACH + 1), _MAP, heads=1)
_DAFT_CHECKS = (
    Check(partial(daft_conv_reference, causal=True), _LITERAL_DAFT),
    Check(attention_maps.daft_conv, _MAP),
)

OPERATIONS = (
    Operation(
        "causal_flow",
        "Causal Flow-Attention",
        _QKV,
        _heads_first,
        _flow_functions(causal=True),
        _LENGTHS,
        _QUICK,
        _FLOW_NOTE,
        least_work=partial(_flow_work, 4),
    ),
    Operation(
        "causal_flow_batch",
        f"Causal Flow-Attention, {BATCH} sequences",
        _QKV,
        _batch_of_heads_first,
        _flow_functions(causal=True)[:2],
        (128, 256, 384, 512, 1024),
        (128,),
        f"B = {BATCH}, H = {HEADS}, d = {HEAD_DIM}; released form, clamp 1",
        plotted=False,
    ),
    Operation(
        "full_flow",
        "Flow-Attention, not causal",
        _QKV,
        _heads_first,
        _flow_functions(causal=False),
        (128, VIT, *_LENGTHS[1:-1]),
        _QUICK,
        _FLOW_NOTE,
        least_work=partial(_flow_work, 2),
    ),
    Operation(
        "causal_flow_cuda",
        "Causal Flow-Attention on a GPU",
        _QKV,
        _heads_first,
        (
            *_flow_functions(causal=True)[:2],
            Function(FLA, fla_attention, (Check(_causal_product, _SOFTMAX_MAP),), package="fla"),
        ),
        tuple(2**i for i in range(10, 18)),
        (1024, 8192),
        f"{_FLOW_NOTE}; {FLA} is unnormalised linear attention, another function with the same products",
        devices=("cuda",),
        least_work=partial(_flow_work, 4),
    ),
    Operation(
        "causal_flow_compiled",
        "Causal Flow-Attention under torch.compile",
        _QKV,
        _heads_first,
        (
            Function(
                COMPILED,
                compiled_flow,
                (Check(partial(flow_attention_reference, causal=True), _LITERAL, heads=1),),
                refusal=compiler_refusal,
            ),
            _flow_functions(causal=True)[1],
        ),
        (128, 256, 512, 1024),
        (256,),
        f"{_FLOW_NOTE}; compiled for each length, which takes seconds that are not counted",
        plotted=False,
    ),
    Operation(
        "daft_conv",
        "DAFT-conv, causal",
        (*_QKV, "r"),
        _daft_shapes,
        (
            Function(DAFT, partial(daft_conv, causal=True), _DAFT_CHECKS),
            Function(DIRECT, direct_convolution.daft_conv, _DAFT_CHECKS),
        ),
        (512, 1024, 2048, 4096),
        (512,),
        f"B = 1, d = {WIDTH}, {HEADS} heads, window {WINDOW}",
    ),
    Operation(
        "performer_pytorch",
        "Performer attention, causal",
        _QKV,
        _heads_first,
        (
            Function(LINEAR, partial(linear_attention, causal=True, phi="relu"), (_RELU_MAP,)),
            Function(PERFORMER, performer_attention, (_RELU_MAP,), package="performer_pytorch"),
        ),
        (1024, 4096),
        (1024,),
        f"B = 1, H = {HEADS}, d = {HEAD_DIM}, relu features without random projections",
        plotted=False,
    ),
    Operation(
        "local_attention",
        "Local attention, causal",
        _QKV,
        _heads_first,
        (
            Function(LOCAL, partial(local_attention, window=LOCAL_REACH + 1, causal=True), (_LOCAL_MAP,)),
            Function(LOCAL_PACKAGE, local_package, (_LOCAL_MAP,), package="local_attention"),
        ),
        (1024, 4096, 16384),
        (1024,),
        f"B = 1, H = {HEADS}, d = {HEAD_DIM}, a window of {LOCAL_REACH + 1}: the token and {LOCAL_REACH} before it",
        plotted=False,
    ),
)
CASES = tuple(operation.case() for operation in OPERATIONS)
