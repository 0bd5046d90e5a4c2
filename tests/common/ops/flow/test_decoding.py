"""Steps of one token agree with the whole sequence and its gradients, in every form."""

import itertools

import pytest
import torch

from common.ops import flow_attention
from common.ops.flow.options import ALLOCATIONS, FORMS
from common.ops.flow.reference import flow_attention_reference
from tests.compare import assert_close, gradients

COMPETITIONS = ("softmax", "sigmoid", "none")


def inputs(tokens, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, tokens, channels) for channels in (4, 4, 5)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def in_steps(q, k, v, prompt, **options):
    """The output of all tokens: the ``prompt`` at once, the others one by one; and the last state."""
    cuts = [0, prompt, *range(prompt + 1, q.shape[2] + 1)]
    outputs, state = [], None
    for start, stop in itertools.pairwise(cuts):
        part = (x[:, :, start:stop] for x in (q, k, v))
        out, state = flow_attention(*part, causal=True, initial_state=state, return_state=True, **options)
        outputs.append(out)
    return torch.cat(outputs, dim=2), state


@pytest.mark.parametrize("clamp", [0.3, 50.0, None], ids=str)
@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("competition", COMPETITIONS)
@pytest.mark.parametrize("form", FORMS)
def test_steps_give_the_whole_sequence_and_its_gradients(form, competition, allocation, clamp):
    options = {"form": form, "competition": competition, "allocation": allocation, "clamp": clamp}
    tensors = inputs(7)
    out, _ = in_steps(*tensors, 3, **options)
    expected = flow_attention_reference(*tensors, causal=True, **options)
    assert_close("out", out, expected)
    for name, actual, wanted in zip("qkv", gradients(out, tensors), gradients(expected, tensors)):
        assert_close(f"gradient of {name}", actual, wanted)


@pytest.mark.parametrize("phi", ["elu+1", "relu"])
def test_steps_in_other_feature_maps_and_from_one_token(phi):
    tensors = inputs(6)
    out, state = in_steps(*tensors, 1, phi=phi, form="paper")
    assert_close("out", out, flow_attention_reference(*tensors, causal=True, phi=phi, form="paper"))
    _, whole = flow_attention(*tensors, causal=True, return_state=True, phi=phi, form="paper")
    for name, tensor in whole.items():
        assert_close(name, state[name].double(), tensor.double())


def test_a_step_leaves_the_state_before_it_as_it_was():
    tensors = [x.detach() for x in inputs(5)]
    _, state = in_steps(*tensors, 5)
    before = {name: x.clone() for name, x in state.items()}
    flow_attention(*(x[:, :, :1] for x in tensors), causal=True, initial_state=state, return_state=True)
    assert all(torch.equal(before[name], x) for name, x in state.items())


def test_steps_in_half_precision_do_not_drift():
    tensors = [x.detach() for x in inputs(200, torch.bfloat16)]
    out, state = in_steps(*tensors, 50)
    assert_close("out", out, flow_attention(*tensors, causal=True))
    assert all(x.dtype in (torch.float32, torch.int64) for x in state.values())
