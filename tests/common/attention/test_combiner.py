"""The Combiner module: rows are summarised from what their tokens attend to."""

import torch

from common.attention import build_attention
from tests.common.attention.build import build
from tests.common.inputs import qkv
from tests.common.refusals import refused


def inputs_of(n, batch=2):
    """q, k, v (B, 2, n, 4) and x (B, n, 8)."""
    x = torch.randn(batch, n, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    return (*qkv(n, batch=batch, d=4, e=4), x)


def test_it_has_two_matrices_of_the_width_more_than_a_transformer():
    module = build_attention("combiner", num_heads=12, head_dim=64)
    assert sum(x.numel() for x in module.parameters()) == 2 * (768 * 768 + 768) + 2 * 768
    assert module.options.row_length == 128 and module.options.rotary


def one_by_one(module, tensors, state):
    """The outputs of the tokens computed one at a time, and the state after each."""
    outputs, states = [], []
    for t in range(tensors[0].shape[2]):
        q, k, v, x = tensors
        out, state = module.extend(*(y[:, :, t : t + 1] for y in (q, k, v)), x=x[:, t : t + 1], state=state)
        outputs.append(out)
        states.append(state)
    return torch.cat(outputs, dim=2), states


@torch.no_grad()
def test_summaries_are_formed_once_when_their_row_is_full():
    """Most steps therefore cost only what a token sees, without the cost of a summary."""
    tensors, module = inputs_of(16, batch=1), build("combiner", causal=True)
    q, k, v, x = (y.detach() for y in tensors)
    _, state = module.extend(q[:, :, :8], k[:, :, :8], v[:, :, :8], x=x[:, :8])
    module.summary_k_proj.weight.fill_(torch.nan)
    out, states = one_by_one(module, [y[..., 8:, :] for y in (q, k, v, x)], state)
    assert [bool(row.isfinite().all()) for row in out.unbind(2)] == [True] * 4 + [False] * 4
    assert states[2]["summary_k"] is state["summary_k"]


def test_a_state_of_rows_of_another_length_is_refused():
    q, k, v, x = inputs_of(9)
    _, state = build("combiner", causal=True).extend(q, k, v, x=x)
    for wrong in (3, 20):
        module = build("combiner", causal=True, row_length=wrong)
        with refused("initial_state", "9 tokens", f"row_length={wrong}"):
            module.extend(q, k, v, x=x, state=state)
