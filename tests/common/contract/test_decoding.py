"""Decoding: ``extend`` from a state gives what ``forward`` gives on the whole sequence."""

import pytest
import torch

from common.ops.shared.state import largest_states
from tests.common.contract.mechanisms import (
    DEFAULTS,
    OPTIONS,
    Case,
    at,
    both,
    cases,
    cast,
    is_linear,
    leaves,
    long_options,
    rows,
    run_in_parts,
    tensors,
    without,
)
from tests.common.inputs import padding
from tests.compare import assert_close, assert_gradients_close

#: Lengths of the parts of 21 tokens.
PARTS = {
    "one by one": [1] * 21,
    "chunks": [5, 1, 1, 9, 5],
    "a prompt, then one by one": [17, 1, 1, 1, 1],
}
#: How the first and the last tokens of a sequence are computed: in a dtype, or under autocast, which gives bfloat16.
CHANGES = (
    *(("autocast", torch.float32), (torch.float32, "autocast")),
    *((torch.float32, torch.float64), (torch.float64, torch.float32)),
)
decoders = [case for case in DEFAULTS if case.causal]


@cases(decoders)
@pytest.mark.parametrize("parts, side", zip(PARTS, ("none", "all", "holes")))
def test_extend_is_forward(parts, side, case):
    module, mask = case.build(), padding(side, 2, 21)
    inputs = tensors(module, 21)
    whole, (out, states) = module(**inputs, **both(mask)), run_in_parts(module, inputs, PARTS[parts], mask)
    assert_close("out", out, whole)
    if side != "all":
        assert_gradients_close(out, whole, leaves(inputs, module))
    assert all(len(tensor) == 2 for state in states for tensor in state.values()), "the batch is dimension 0"


@cases(decoders)
def test_dropout_is_that_of_forward_and_stays_in_the_state(case):
    """With the same random draws, a source that was dropped is also dropped for later tokens."""
    module = case.build()
    inputs = tensors(module, 21, batch=1, grad=False)
    first, second = at(inputs, slice(12)), at(inputs, slice(12, 21))
    random = torch.get_rng_state()
    whole = module(**first, dropout_p=0.4)
    torch.set_rng_state(random)
    out, state = module.extend(**first, dropout_p=0.4)
    assert_close("out", out, whole)
    if "dropout_of_sources" not in without(case.name) and case.short_conv is None:
        torch.set_rng_state(random)
        factors = torch.nn.functional.dropout(torch.ones_like(first["v"][..., :1]), 0.4)
        dropped = torch.cat([first["v"] * factors, second["v"]], dim=-2)
        assert_close("later", module.extend(**second, state=state)[0], module(**{**inputs, "v": dropped})[..., 12:, :])


@cases(OPTIONS, causal=True)
def test_extend_is_forward_with_every_option(case):
    """In chunks with padding, and one token at a time without it, for which some mechanisms have separate code."""
    module = case.build()
    inputs = tensors(module, 21, grad=False)
    with torch.no_grad():
        for parts, mask in (("chunks", padding("left", 2, 21)), ("a prompt, then one by one", None)):
            out, _ = run_in_parts(module, inputs, PARTS[parts], mask)
            assert_close("out", out, module(**inputs, **both(mask)))


@cases(decoders)
@torch.no_grad()
def test_a_state_is_as_large_as_the_text_requires(case):
    """A state that holds no tokens has a constant size; others grow with the tokens, up to a block of 16 more or fewer.

    Under ``largest_states``, a state has its largest size from the beginning and keeps it.
    """
    module, lengths = case._replace(options=long_options(case.kind)).build(max_tokens=300), (1, 16, 64, 300)
    inputs, mask = tensors(module, 300, batch=2, grad=False), padding("left", 2, 300)
    parts = [stop - start for start, stop in zip((0, *lengths), lengths)]
    _, states = run_in_parts(module, inputs, parts, mask)
    assert all(state.keys() == states[0].keys() for state in states)
    sizes, most = [_size(state) for state in states], module.state_tokens()
    if most is None:
        assert not is_linear(module) and max(sizes) == sizes[-1] > sizes[0]
        largest, most = sizes[-1], lengths[-1]
    else:
        with largest_states():
            _, first = module.extend(**at(inputs, slice(0, 1)))
        _, after = module.extend(**at(inputs, slice(1, 3)), state=first)
        assert {name: x.shape for name, x in first.items()} == {name: x.shape for name, x in after.items()}
        largest = _size(first)
        assert max(sizes) <= largest and (most > 0 or min(sizes) == largest)
    for tokens, size in zip(lengths, sizes):
        # The factor is 2, since Combiner keeps more tokens of its last row, and some states also hold sums.
        share = (min(tokens, most) + 16) / max(most, 1)
        assert size <= _size(states[0]) + 2 * share * (largest - _size(states[0])), f"after {tokens} tokens"
    if most >= 64:
        assert sizes[0] < largest / 2, "one token is not as many as a window"


def _size(state) -> int:
    return sum(tensor.numel() for tensor in state.values())


@cases(decoders)
@torch.no_grad()
def test_steps_of_a_beam_while_a_state_grows(case):
    """Rows of unequal lengths are reordered repeatedly, at odd lengths, until windows are full and beyond."""
    module, order = case.build(), torch.tensor([2, 0, 0, 1])
    inputs, mask = tensors(module, 39, batch=4, grad=False), torch.zeros(4, 39, dtype=torch.bool)
    mask[1, :2] = mask[3, :6] = True
    out, state, begin = None, None, 0
    for length in (7, 1, 1, 1, 3, *[1] * 13, 9, *[1] * 4):
        part = slice(begin, begin + length)
        step_mask = mask[:, part] if begin == 0 else None
        out, state = module.extend(**at(inputs, part), padding_mask=step_mask, state=state)
        begin += length
        if begin < 39:
            state = {name: x.index_select(0, order) for name, x in state.items()}
            read = {name: x[..., :begin, :][order] for name, x in inputs.items() if isinstance(x, torch.Tensor)}
            inputs = {
                name: torch.cat([read[name], x[..., begin:, :]], dim=-2) if name in read else x
                for name, x in inputs.items()
            }
            mask = torch.cat([mask[order][:, :begin], mask[:, begin:]], dim=1)
    assert_close("out", out, module(**inputs, **both(mask))[:, :, -1:])


@cases(decoders)
def test_a_beam_is_reordered_by_one_index_select(case):
    module, order, mask = case.build(), torch.tensor([1, 1, 0]), padding("left", 2, 7)
    first, second = tensors(module, 7), tensors(module, 6, batch=3, seed=1)
    _, state = module.extend(**first, padding_mask=mask)
    state = {name: tensor.index_select(0, order) for name, tensor in state.items()}
    out, _ = module.extend(**second, state=state)
    whole = {
        name: None if x is None else torch.cat([rows(first, order)[name], x], dim=-2) for name, x in second.items()
    }
    whole_mask = torch.nn.functional.pad(mask[order], (0, 6))
    assert_close("out", out, module(**whole, **both(whole_mask))[:, :, 7:])


@cases(decoders)
@torch.no_grad()
def test_a_state_is_not_changed_by_going_on_from_it(case):
    """Two continuations of one prompt, as in beam search."""
    module = case.build()
    inputs = tensors(module, 12)
    _, state = module.extend(**at(inputs, slice(0, 6)))
    before = {name: tensor.clone() for name, tensor in state.items()}
    first, _ = module.extend(**at(inputs, slice(6, 12)), state=state)
    assert list(state) == list(before) and all(torch.equal(state[name], before[name]) for name in state)
    second, _ = module.extend(**at(inputs, slice(6, 12)), state=state)
    assert torch.equal(first, second)


@cases(decoders)
def test_decoding_in_half_precision(case):
    for dtype in (torch.bfloat16, torch.float16):
        assert_decodes_precisely(case, dtype)


def assert_decodes_precisely(case: Case, dtype: torch.dtype) -> None:
    """Compare with float64 on the same numbers; sums are float32."""
    module, exact = case.build(dtype), case.build(dtype).double()
    inputs = tensors(module, 21, dtype=dtype, grad=False)
    out, states = run_in_parts(module, inputs, PARTS["chunks"])
    assert out.dtype == dtype
    wide = {name: None if x is None else x.double() for name, x in inputs.items()}
    assert_close("out", out, exact(**wide), 4 * torch.finfo(dtype).eps + 2e-3)
    if is_linear(module):
        sums = [x for x in states[-1].values() if x.is_floating_point()]
        assert all(x.dtype == torch.float32 for x in sums)


@cases(decoders)
@torch.no_grad()
def test_a_sequence_goes_on_in_another_dtype(case):
    """This happens if autocast is switched on or off during generation, while parameters stay in float32."""
    for change in CHANGES:
        assert_goes_on(case, change)


def assert_goes_on(case: Case, change: tuple) -> None:
    """Tokens before and after a change give what all of them give in float64."""
    module = case.build(std=0.3)
    # Use bfloat16 values, so that hashes in both dtypes choose the same bucket.
    inputs = cast(tensors(module, 12, dtype=torch.bfloat16, grad=False), torch.float64)
    expected, state, outputs = module(**inputs), None, []
    for begin, end, how in ((0, 5, change[0]), (5, 6, change[1]), (6, 11, change[0]), (11, 12, change[1])):
        under_autocast = how == "autocast"
        wide = torch.float32 if under_autocast else how
        tokens = {
            name: x.bfloat16() if under_autocast and name in ("q", "k", "v") and x is not None else x
            for name, x in cast(at(inputs, slice(begin, end)), wide).items()
        }
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=under_autocast):
            out, state = module.to(wide).extend(**tokens, state=state)
        assert out.dtype == (torch.bfloat16 if under_autocast else how)
        outputs.append(out.double())
    assert_close("out", torch.cat(outputs, dim=2), expected, 0.03 if "autocast" in change else 1e-5)


@cases(decoders)
def test_autocast_around_a_whole_sequence(case):
    """Sums stay in float32 inside, forward and backward."""
    module, mask = case.build(torch.float32, std=0.3), padding("left", 2, 19)
    inputs = cast(tensors(module, 19, dtype=torch.bfloat16, scale=0.5), torch.float32)
    half = {
        name: x.detach().bfloat16() if name in ("q", "k", "v") and x is not None else x for name, x in inputs.items()
    }
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(**half, **both(mask))
    assert out.dtype == torch.bfloat16
    assert_close("out", out, module(**inputs, **both(mask)), 0.03)
