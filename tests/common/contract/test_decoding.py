"""Decoding: ``extend`` goes on from a state as ``forward`` does it at once."""

import pytest
import torch

from tests.common.contract.mechanisms import CASES, DEFAULTS, at, both, cases, cast, leaves, rows, run_in_parts, tensors
from tests.common.inputs import padding
from tests.compare import assert_close, assert_gradients_close

#: Parts of 21 tokens.
PARTS = {
    "one by one": [1] * 21,
    "chunks": [5, 1, 1, 9, 5],
    "a prompt, then one by one": [17, 1, 1, 1, 1],
    "whole": [21],
}
decoders = [case for case in DEFAULTS if case.causal]


@cases(decoders)
@pytest.mark.parametrize("side", ["none", "left", "right", "holes", "all"])
@pytest.mark.parametrize("parts", PARTS)
def test_extend_is_forward(parts, side, case):
    module, mask = case.build(), padding(side, 2, 21)
    inputs = tensors(module, 21)
    whole, (out, states) = module(**inputs, **both(mask)), run_in_parts(module, inputs, PARTS[parts], mask)
    assert_close("out", out, whole)
    if side in ("none", "holes"):
        assert_gradients_close(out, whole, leaves(inputs, module))
    assert all(len(tensor) == 2 for state in states for tensor in state.values()), "the batch is dimension 0"


@cases(case for case in CASES if case.causal and case.label != "default")
def test_extend_is_forward_with_every_option(case):
    module, mask = case.build(), padding("left", 2, 21)
    inputs = tensors(module, 21)
    out, _ = run_in_parts(module, inputs, PARTS["chunks"], mask)
    assert_close("out", out, module(**inputs, **both(mask)))


@cases(decoders)
def test_a_state_has_the_size_that_is_declared(case):
    module = case.build()
    _, states = run_in_parts(module, tensors(module, 35), [1] * 35)
    shapes = [{name: tuple(tensor.shape) for name, tensor in state.items()} for state in states]
    assert all(list(shape) == list(shapes[0]) for shape in shapes)
    if module.state_is_constant_size:
        assert all(shape == shapes[0] for shape in shapes)
    else:
        sizes = [sum(tensor.numel() for tensor in state.values()) for state in states]
        assert sizes == sorted(set(sizes)), "it grows with every token"


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
    """Two continuations of one prompt, as a beam has them."""
    module = case.build()
    inputs = tensors(module, 12)
    _, state = module.extend(**at(inputs, slice(0, 6)))
    before = {name: tensor.clone() for name, tensor in state.items()}
    first, _ = module.extend(**at(inputs, slice(6, 12)), state=state)
    assert list(state) == list(before) and all(torch.equal(state[name], before[name]) for name in state)
    second, _ = module.extend(**at(inputs, slice(6, 12)), state=state)
    assert torch.equal(first, second)


@cases(decoders)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_decoding_in_half_precision(dtype, case):
    module, exact = case.build(dtype), case.build(dtype).double()
    inputs = tensors(module, 21, dtype=dtype, grad=False)
    out, states = run_in_parts(module, inputs, PARTS["chunks"])
    assert out.dtype == dtype
    wide = {name: None if x is None else x.double() for name, x in inputs.items()}
    assert_close("out", out, exact(**wide), 4 * torch.finfo(dtype).eps + 2e-3)
    if module.state_is_constant_size:
        sums = [x for x in states[-1].values() if x.is_floating_point()]
        assert all(x.dtype == torch.float32 for x in sums)


@cases(decoders)
@pytest.mark.parametrize("first", [True, False], ids=["off then on", "on then off"])
@torch.no_grad()
def test_autocast_may_be_switched_while_decoding(first, case):
    """q, k and v in half precision while it is on, as projections under it give them; parameters in float32."""
    module = case.build(torch.float32, std=0.3)
    # Numbers of bfloat16, which hashes of both dtypes put into one bucket.
    inputs = cast(tensors(module, 12, dtype=torch.bfloat16, grad=False), torch.float32)
    outputs, state = [], None
    for begin, on in ((0, not first), (5, first), (6, not first), (11, first)):
        end = {0: 5, 5: 6, 6: 11, 11: 12}[begin]
        some = {
            name: x.bfloat16() if on and name in ("q", "k", "v") and x is not None else x
            for name, x in at(inputs, slice(begin, end)).items()
        }
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            out, state = module.extend(**some, state=state)
        outputs.append(out.float())
    assert_close("out", torch.cat(outputs, dim=2), module(**inputs), 0.03)


@cases(decoders)
def test_autocast_around_a_whole_sequence(case):
    """Sums stay float32 inside, forward and backward."""
    module, mask = case.build(torch.float32, std=0.3), padding("left", 2, 19)
    inputs = cast(tensors(module, 19, dtype=torch.bfloat16, scale=0.5), torch.float32)
    half = {
        name: x.detach().bfloat16() if name in ("q", "k", "v") and x is not None else x for name, x in inputs.items()
    }
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(**half, **both(mask))
    assert out.dtype == torch.bfloat16
    assert_close("out", out, module(**inputs, **both(mask)), 0.03)
