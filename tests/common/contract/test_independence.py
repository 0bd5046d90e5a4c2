"""A token's output depends only on the real tokens that it sees, and on nothing else in the batch."""

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from common.attention import InnerAttention
from common.kernels import CPU_KERNELS
from common.ops.shared.cpu.dispatch import VARIABLE
from tests.common.contract.mechanisms import (
    DEFAULTS,
    HEADS,
    OPTIONS,
    Case,
    arguments_of_op,
    at,
    both,
    cases,
    cast,
    leaves,
    refused,
    rows,
    run_in_parts,
    takes_one_mask,
    tensors,
    without,
)
from tests.common.inputs import padding
from tests.compare import assert_close, gradients

NAN, INF = float("nan"), float("inf")
sequences = [case for case in DEFAULTS if not case.image]
#: Tokens, and channels of keys and values: multiples of four and of the size of a processor's vectors, and not.
SIZES = (
    (8, 1, 3),
    (11, 8, 15),
    (4, 3, 1),
    (9, 24, 17),
    (8, 17, 24),
    (69, 40, 33),
    (10, 33, 40),
    (1, 24, 8),
    (8, 15, 8),
)


def has_kernels(case: Case) -> bool:
    """Whether the table of mechanisms with kernels for CPUs has it."""
    name = case.name if case.causal else f"{case.name}, not causal"
    names = {name} if case.forget == "none" else {name, f"{name} with gates"}
    return not names.isdisjoint(itertools.chain(*CPU_KERNELS.values()))


def poisoned(inputs: dict, mask: Tensor, poison: float) -> dict:
    """``inputs`` with ``poison`` where ``mask`` (B, n) is True."""

    def one(x: Tensor) -> Tensor:
        hidden = mask[:, None, :, None] if x.dim() == 4 else mask[:, :, None]
        return x.detach().masked_fill(hidden, poison).requires_grad_()

    return {name: one(x) if isinstance(x, Tensor) else x for name, x in inputs.items()}


def shifted(inputs: dict, mask: Tensor) -> dict:
    """``inputs`` with different finite numbers where ``mask`` (B, n) is True."""

    def one(x: Tensor) -> Tensor:
        hidden = mask[:, None, :, None] if x.dim() == 4 else mask[:, :, None]
        return torch.where(hidden, 7.0 - 3.0 * x, x).detach().requires_grad_()

    return {name: one(x) if isinstance(x, Tensor) else x for name, x in inputs.items()}


@cases(DEFAULTS)
def test_what_stands_in_padding_changes_no_bit(case):
    for side, poison in (("left", NAN), ("both", INF), ("holes", 1e30), ("all", INF)):
        assert_padding_hides(case, side, poison)


@cases(OPTIONS)
def test_what_stands_in_padding_changes_no_bit_with_every_option(case):
    """This includes rows without a real token."""
    assert_padding_hides(case, "all", NAN)


def assert_padding_hides(case: Case, side: str, poison: float) -> None:
    """``poison`` in padding on a side changes no bit of outputs and gradients, which are finite, and 0 at padding."""
    module, mask = case.build(torch.float32), padding(side, 2, 14)
    clean = tensors(module, 14, dtype=torch.float32)
    changed = poisoned(clean, mask, poison)
    out, expected = module(**changed, **both(mask)), module(**clean, **both(mask))
    assert torch.equal(out, expected) and torch.isfinite(out).all()
    assert (out.masked_select(mask[:, None, :, None]) == 0).all(), "a padded query gives 0"
    actual, wanted = (gradients(y, leaves(x, module).values()) for x, y in ((changed, out), (clean, expected)))
    for name, gradient, other in zip(leaves(clean, module), actual, wanted):
        assert torch.equal(gradient, other) and torch.isfinite(gradient).all(), f"gradient of {name}"
    for name, gradient in zip(leaves(clean, module), actual):
        if name in clean:  # no gradient reaches padding
            hidden = mask[:, None, :, None] if gradient.dim() == 4 else mask[:, :, None]
            assert (gradient.masked_select(hidden) == 0).all(), f"gradient of {name} in padding"


@cases(sequences)
def test_a_mask_of_the_keys_alone_says_all_or_is_refused(case):
    """In self-attention a masked key is not a token: nothing of it reaches real tokens, and it has no position.

    Rows have padding on the left, where it would move positions, and one has no real token.
    """
    module, mask = case.build(), padding("left", 3, 14)
    mask[2] = True
    inputs = tensors(module, 14, batch=3)
    if not takes_one_mask(case):
        for present, missing in (("key", "query"), ("query", "key")):
            with refused(f"{missing}_padding_mask"):
                module(**inputs, **{f"{present}_padding_mask": mask})
        return
    real = ~mask[:, None, :, None]
    (out, grads), (other, others) = (
        (out := module(**x, key_padding_mask=mask).where(real, 0.0), gradients(out, leaves(x, module).values()))
        for x in (inputs, shifted(inputs, mask))
    )
    assert torch.equal(out, other), "what stands in padding"
    for name, gradient, changed in zip(leaves(inputs, module), grads, others):
        assert torch.equal(gradient, changed), f"gradient of {name}"
    for b in range(3):
        if real[b].any():
            alone = module(**at(rows(inputs, slice(b, b + 1)), ~mask[b]))
            assert_close(f"row {b}", out[b : b + 1, :, ~mask[b]], alone)


@cases(case for case in DEFAULTS if takes_one_mask(case) and "query_padding" not in without(case.name))
def test_what_stands_in_queries_that_are_padding_alone_changes_no_bit(case):
    """The queries are padding, but the keys of the same tokens are real."""
    module, mask = case.build(torch.float32), padding("right", 2, 14)
    clean = tensors(module, 14, dtype=torch.float32)
    loud = {**clean, "q": poisoned({"q": clean["q"]}, mask, NAN)["q"]}
    out, expected = (module(**x, query_padding_mask=mask) for x in (loud, clean))
    assert torch.equal(out, expected)
    actual, wanted = (gradients(y, leaves(x, module).values()) for x, y in ((loud, out), (clean, expected)))
    assert all(torch.equal(*pair) for pair in zip(actual, wanted))


@cases(sequences, causal=True)
def test_what_stands_in_padding_changes_no_state(case):
    module, mask = case.build(torch.float32), padding("holes", 2, 14)
    mask[0, :7] = True  # at first, a row without a real token
    clean = tensors(module, 14, dtype=torch.float32)
    changed = poisoned(clean, mask, NAN)
    (out, _), (expected, _) = (run_in_parts(module, x, (6, 1, 1, 6), mask) for x in (changed, clean))
    assert torch.equal(out, expected) and (out.masked_select(mask[:, None, :, None]) == 0).all()
    actual, wanted = (gradients(y, leaves(x, module).values()) for x, y in ((changed, out), (clean, expected)))
    for name, gradient, other in zip(leaves(clean, module), actual, wanted):
        assert torch.equal(gradient, other), f"gradient of {name}"


@cases(sequences)
def test_each_row_is_what_it_is_alone_without_padding(case):
    for side in ("left", "all"):
        assert_rows_stand_alone(case, side)


@cases(case for case in OPTIONS if not case.image)
def test_each_row_is_what_it_is_alone_with_every_option(case):
    assert_rows_stand_alone(case, "holes")


def assert_rows_stand_alone(case: Case, side: str) -> None:
    """Each row of a batch padded on one side equals the result for its real tokens alone."""
    module, mask = case.build(), padding(side, 3, 14)
    inputs = tensors(module, 14, batch=3)
    out = module(**inputs, **both(mask))
    for b in range(3):
        real = ~mask[b]
        if real.any():
            alone = module(**at(rows(inputs, slice(b, b + 1)), real))
            assert_close(f"row {b}", out[b : b + 1, :, real], alone)


@cases(DEFAULTS)
def test_neighbours_in_the_batch_change_nothing(case):
    """Whether they are infinite or NaN, with padding and in decoding; and no gradient reaches them."""
    module = case.build()
    inputs, mask = tensors(module, 12, batch=3), padding("left", 3, 12)
    named_tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    for name, gradient in zip(named_tensors, gradients(module(**inputs)[1], named_tensors.values())):
        assert (gradient[[0, 2]] == 0).all() and (gradient[1] != 0).any(), f"gradient of {name}"
    for poison in (INF, NAN):
        loud = {name: x.detach().clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
        for x in loud.values():
            if isinstance(x, Tensor):
                x[0], x[2] = 1e3 * x[0], poison
        for hidden in (None, mask):
            own = None if hidden is None else hidden[1:2]
            alone = module(**rows(inputs, slice(1, 2)), **both(own))
            assert_close("row 1", module(**inputs, **both(hidden))[1:2], alone)
            assert_close(f"row 1 beside {poison}", module(**loud, **both(hidden))[1:2], alone)
            if case.causal and not case.image:
                parts = run_in_parts(module, loud, (5, 1, 6), hidden)[0]
                assert_close(f"row 1 in parts, beside {poison}", parts[1:2], alone)


@cases(case for case in DEFAULTS if has_kernels(case))
def test_nan_and_overflow_stay_where_they_are(case, monkeypatch):
    """With kernels for CPUs: not in another row of the batch or another head, nor, if causal, before their token.

    The numbers are in the first head of the first row, in each input of the function that the mechanism declares.
    """
    monkeypatch.setenv(VARIABLE, "1")
    even = case.rotary or "rotary" in case.kind.supports
    for n, d, e in SIZES[1::2] if even else SIZES:
        module = case.build(torch.float32, max_tokens=2 * n, channels=d)
        inputs = tensors(module, n, batch=3, dtype=torch.float32, channels=d)
        arguments = arguments_of_op(case, module, monkeypatch, **inputs)
        arguments["v"] = torch.randn(3, HEADS, n, e, generator=torch.Generator().manual_seed(1))
        given = {name: x for name, x in arguments.items() if isinstance(x, Tensor) and len(x) == 3 and x.dim() > 2}
        op = functools.partial(case.kind.op, **{name: x for name, x in arguments.items() if name not in given})
        state = op(**given, return_state=True)[1] if case.causal else {}
        given |= {f"state {name}": x for name, x in state.items()}
        clean, alone = results(op, given), results(op, {name: x[1:] for name, x in given.items()})
        for what, x in clean.items():
            if x.is_floating_point():
                assert_close(f"{what} of the other rows", x[1:], alone[what], floor=1e-3)
        for name, x in given.items():
            of_state = name.startswith("state ")
            token = (0,) if name == "x" or x.dim() == 1 else (0, 0) if of_state else (0, 0, n // 2)
            for poison in (NAN, INF, -INF, 1e30) if x.is_floating_point() and x.numel() else ():
                loud = x.detach().clone().unsqueeze(-1)
                loud[token].view(-1)[-1] = poison
                for what, y in results(op, {**given, name: loud.squeeze(-1)}).items():
                    message = f"{what}, {poison} in {name}; {n} tokens, {d} and {e} channels"
                    assert torch.equal(y[1:], clean[what][1:]), message
                    if len(token) > 1 and y.dim() > 1 and what != "gradient of x":
                        assert torch.equal(y[0, 1:], clean[what][0, 1:]), f"another head: {message}"
                    # Windows are plain PyTorch, in which a weight of 0 times NaN is NaN.
                    if len(token) > 2 and case.causal and what.startswith("out") and module.state_tokens() == 0:
                        assert torch.equal(y[0, 0, : n // 2], clean[what][0, 0, : n // 2]), f"earlier tokens: {message}"


@cases(case for case in DEFAULTS if has_kernels(case))
def test_large_numbers_give_what_they_give_in_plain_pytorch(case, monkeypatch):
    """Numbers whose squares and exponentials overflow: an output that is finite there is it with kernels for CPUs."""
    module = case.build(torch.float32, channels=24)
    inputs = tensors(module, 9, dtype=torch.float32, channels=24, grad=False)
    for name in ("q", "k", "v"):
        for factor in (3e19, -3e19):
            loud = {**inputs, name: inputs[name].clone()}
            loud[name][0, 0, 4, -1] = factor
            outputs = []
            for kernels in "10":
                monkeypatch.setenv(VARIABLE, kernels)
                outputs.append(module(**loud))
            finite = outputs[1].isfinite()
            assert_close(f"{factor} in {name}", outputs[0][finite], outputs[1][finite])


def results(op: Callable, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output and the state of ``op``, also without gradients, and the gradients of what is ``given``."""
    given = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in given.items()}
    arguments = {name: x for name, x in given.items() if not name.startswith("state ")}
    if len(arguments) < len(given):
        state = {name.removeprefix("state "): x for name, x in given.items() if name not in arguments}
        arguments |= {"initial_state": state, "return_state": True}
    found = {}
    for what, enabled in (("out", True), ("out without gradients", False)):
        with torch.set_grad_enabled(enabled):
            out = op(**arguments)
        out, state = out if isinstance(out, tuple) else (out, {})
        found |= {what: out, **{f"state {name} of {what}": x for name, x in state.items()}}
    outputs = torch.cat([x.flatten(1) for x in found.values() if x.requires_grad], dim=1)
    leaves = {name: x for name, x in given.items() if x.requires_grad}
    loss = outputs * torch.linspace(1, 2, outputs.shape[1])
    gradients = torch.autograd.grad(loss.sum(), leaves.values(), allow_unused=True, materialize_grads=True)
    return found | {f"gradient of {name}": x for name, x in zip(leaves, gradients)}


@cases(DEFAULTS)
def test_an_empty_batch_gives_an_empty_result(case):
    module = case.build()
    inputs, mask = tensors(module, 7, batch=0), torch.zeros(0, 7, dtype=torch.bool)
    for query_mask in (None, mask):
        assert tuple(module(**inputs, **both(query_mask)).shape) == tuple(inputs["v"].shape)
        if case.causal:
            out, states = run_in_parts(module, inputs, [3, 4], query_mask)
            assert tuple(out.shape) == tuple(inputs["v"].shape)
            assert all(len(x) == 0 for state in states for x in state.values())


@cases(DEFAULTS)
def test_without_data_there_are_shapes(case):
    """On the meta device, which tools use to count a model's memory and parameters."""
    module = case.build().to("meta")
    inputs = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in tensors(module, 7).items()}
    for mask in (None, torch.zeros(2, 7, dtype=torch.bool, device="meta")):
        assert module(**inputs, **both(mask)).shape == inputs["v"].shape
        if case.causal:
            out, states = run_in_parts(module, inputs, [4, 3], mask)
            assert out.is_meta and out.shape == inputs["v"].shape and all(x.is_meta for x in states[-1].values())


@cases(sequences, causal=True)
def test_a_prefix_does_not_depend_on_what_follows(case):
    module = case.build()
    inputs = tensors(module, 23)
    whole = assert_prefixes_stand_alone(module, inputs, (1, 4, 5, 6, 11, 22))
    named_tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    for t in (1, 6, 22):
        for name, gradient in zip(named_tensors, gradients(whole[:, :, :t], named_tensors.values(), retain_graph=True)):
            later = gradient[:, :, t:] if gradient.dim() == 4 else gradient[:, t:]
            assert later.norm() <= 1e-12 * gradient.norm(), f"gradient of {name} after {t}"


@cases(OPTIONS, causal=True)
@torch.no_grad()
def test_a_prefix_does_not_depend_on_what_follows_with_every_option(case):
    module = case.build()
    assert_prefixes_stand_alone(module, tensors(module, 13), (1, 6, 12))


def assert_prefixes_stand_alone(module: InnerAttention, inputs: dict, lengths: tuple[int, ...]) -> Tensor:
    """The first tokens give what they give alone and before larger later values; returns the outputs of all tokens."""
    whole = module(**inputs)
    after = torch.arange(whole.shape[2])[:, None]
    for t in lengths:
        alone = module(**at(inputs, slice(0, t)))
        assert_close(f"the first {t}", whole[:, :, :t], alone)
        loud = {
            name: x.detach() * (1 + 50 * (after >= t)) if isinstance(x, Tensor) else x for name, x in inputs.items()
        }
        assert_close(f"the first {t}, before others", module(**loud)[:, :, :t], alone)
    return whole


@cases(sequences)
def test_padding_at_the_end_is_as_if_it_were_not_there(case):
    """Nothing depends on the length that a batch is padded to."""
    module = case.build()
    inputs = tensors(module, 9)
    alone = module(**inputs)
    for extra in (1, 3, 20):
        longer = {
            name: torch.cat([x, x.new_zeros(x.shape[:-2] + (extra, x.shape[-1]))], dim=-2)
            for name, x in inputs.items()
            if isinstance(x, Tensor)
        }
        mask = (torch.arange(9 + extra) >= 9).expand(2, -1)
        assert_close(f"{extra} tokens of padding", module(**{**inputs, **longer}, **both(mask))[:, :, :9], alone)


@cases(DEFAULTS)
def test_memory_layout_changes_nothing(case):
    """q, k and v in the layout that hosts use, with heads split from the channels of (B, n, D)."""
    module = case.build()
    inputs = cast(tensors(module, 13), torch.float64)
    strided = {
        name: x.detach().transpose(1, 2).contiguous().transpose(1, 2) if isinstance(x, Tensor) and x.dim() == 4 else x
        for name, x in inputs.items()
    }
    assert_close("out", module(**strided), module(**inputs), 1e-12)
