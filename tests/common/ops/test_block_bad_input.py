"""gau_attention, mixed_chunk_attention and row_attention refuse bad arguments by name."""

import math

import pytest
import torch

from common.ops import gau_attention, mixed_chunk_attention, row_attention
from tests.common.inputs import mixed_chunk_inputs
from tests.common.refusals import refused, tensors


def mixed_chunk(q, k, v, chunk_size=4, **options):
    return mixed_chunk_attention(q, k, q, k, v, chunk_size=chunk_size, **options)


def row(q, k, v, row_length=4, **options):
    return row_attention(q, k, v, row_length=row_length, **options)


gated = pytest.mark.parametrize("op", [gau_attention, mixed_chunk], ids=lambda op: op.__name__)


def test_tensors_are_called_as_the_function_calls_them():
    """Messages use the function's own names; the contract tests every tensor that does not fit."""
    inputs = tensors(k=(2, 3, 5, 6))
    for op, name in ((row, "k"), (mixed_chunk, "k_quad")):
        with refused(name, f"(2, 3, 5, 6) and {name.replace('k', 'q', 1)} (2, 3, 5, 4)", "channels"):
            op(**inputs)


@gated
def test_tensors_have_heads_or_none_has(op):
    inputs = tensors()
    q, k = ("q", "k") if op is gau_attention else ("q_quad", "k_quad")
    with refused(k, "(2, 3, 5, 4)", f"a tensor of 3 dimensions, as {q} is"):
        op(inputs["q"][:, 0], inputs["k"], inputs["v"])
    with refused("v", "(2, 5, 4)", f"a tensor of 4 dimensions, as {q} is"):
        op(inputs["q"], inputs["k"], inputs["v"][:, 0])
    for wrong in (inputs["q"][0, 0], inputs["q"][None]):
        with refused(q, str(tuple(wrong.shape)), "(B, n, s) or (B, H, n, s)"):
            op(wrong, inputs["k"], inputs["v"])
    with refused(q, "list", "(B, n, s) or (B, H, n, s)"):
        op([1.0], inputs["k"], inputs["v"])


def test_all_attend_to_themselves_only():
    for op, k, q in ((row, "k", "q"), (mixed_chunk, "k_quad", "q_quad")):
        with refused(k, f"7 tokens and {q} 5", "the same number"):
            op(**tensors(k=(2, 3, 7, 4), v=(2, 3, 7, 4)))


@gated
def test_names_and_biases_that_are_not_known(op):
    with refused("kernel", "'relu'", "'relu2', 'softmax', 'laplace'"):
        op(**tensors(), kernel="relu")
    size = 5 if op is gau_attention else 4
    described = "the number of tokens" if op is gau_attention else "chunk_size"
    for shape in ((2 * size,), (2 * size + 1,), (size + 1, size + 1), (2, size, size)):
        with refused("bias", str(shape), f"for {described} = {size} and 3 heads: ({2 * size - 1},), ({size}, {size})"):
            op(**tensors(), bias=torch.zeros(shape))
    with refused("bias", "meta", "cpu"):
        op(**tensors(), bias=torch.zeros(2 * size - 1, device="meta"))


@pytest.mark.parametrize("given", [0.0, -1.0, math.nan])
def test_divisors_are_above_0(given):
    with refused("divisor", repr(given), "above 0, or None"):
        gau_attention(**tensors(), divisor=given)


@pytest.mark.parametrize("given", [0, 2.5])
def test_rows_have_a_token_at_least(given):
    with refused("row_length", repr(given), "an integer of at least 1"):
        row(**tensors(), row_length=given)


def test_the_fine_tuning_forms_are_not_causal():
    with refused("first_softmax", "True with causal=True", "False"):
        gau_attention(**tensors(), causal=True, first_softmax=True)
    for name in ("first_softmax", "first_to_all"):
        with refused(name, "causal=True and local=True", "only with causal=False and local=True"):
            mixed_chunk(**tensors(), causal=True, **{name: True})
        with refused(name, "causal=False and local=False", "only with causal=False and local=True"):
            mixed_chunk(**tensors(), local=False, **{name: True})


def test_mixed_chunk_attention_needs_a_term():
    with refused("local and linear", "both False", "one of them, or both"):
        mixed_chunk(**tensors(), local=False, linear=False)


@pytest.mark.parametrize("which, name", [(2, "q_lin"), (3, "k_lin")])
def test_the_linear_terms_tensors_are_like_the_others(which, name):
    inputs = [x.detach() for x in mixed_chunk_inputs(5, dtype=torch.float32)]
    wrong = {
        "(2, 2, 4, 4)": inputs[which][:, :, 1:],
        "(2, 2, 5, 3)": inputs[which][..., 1:],
        "torch.float64": inputs[which].double(),
        "on meta": inputs[which].to("meta"),
    }
    for shown, tensor in wrong.items():
        changed = [*inputs[:which], tensor, *inputs[which + 1 :]]
        with refused(name, shown, "as q_quad, (2, 2, 5, 4), torch.float32, on cpu"):
            mixed_chunk_attention(*changed, chunk_size=4)
    with refused(name, "list", "a tensor of 4 dimensions"):
        mixed_chunk_attention(*inputs[:which], [1.0], *inputs[which + 1 :], chunk_size=4)
