"""Means of the values so far, each with one flaw, which is its name; "flawless" has none."""

import torch

from common.attention import OpAttention, register_attention
from common.ops.shared.padding import zero_padding


def attend(v, flaw, causal, key_padding_mask, query_padding_mask, initial_state, return_state):
    """The mean of the values so far, with a ``flaw``."""
    hidden = None if flaw == "padding" else key_padding_mask
    values, ones = zero_padding(v, hidden), zero_padding(torch.ones_like(v[..., :1]), hidden)
    if flaw == "gradients":
        values = values + 0.1 * (values - values.detach())
    state = {"sum": values.sum(2), "count": ones.sum(2)}
    before = dict.fromkeys(state, 0.0) if initial_state is None or flaw == "steps" else initial_state
    state = {name: x + before[name] for name, x in state.items()}
    if flaw == "memory":
        full = torch.ones(v.shape[2], v.shape[2], dtype=v.dtype).tril() @ values
    else:
        full = values.cumsum(2)
    sums, counts = full, ones.cumsum(2)
    if flaw == "causality":
        sums, counts = values.sum(2, keepdim=True).expand_as(v), ones.sum(2, keepdim=True)
    if initial_state is not None and flaw != "steps":
        sums, counts = sums + initial_state["sum"].unsqueeze(2), counts + initial_state["count"].unsqueeze(2)
    out = zero_padding(sums / counts.clamp(min=1), query_padding_mask)
    out = out + out.mean(0, keepdim=True) if flaw == "rows_of_a_batch" else out
    out = out[..., :1] if flaw == "shapes" else out
    out = out.float() if flaw == "half_precision" and out.dtype == torch.bfloat16 else out
    return (out, state) if return_state else out


def flawed(flaw: str) -> None:
    """Register the mechanism with a ``flaw``."""

    def op(v, *, causal, key_padding_mask=None, query_padding_mask=None, initial_state=None, return_state=False):
        return attend(v, flaw, causal, key_padding_mask, query_padding_mask, initial_state, return_state)

    def reference_op(v, *, causal, key_padding_mask=None, query_padding_mask=None):
        scale = 2 if flaw == "reference" else 1
        return scale * attend(v, "", causal, key_padding_mask, query_padding_mask, None, False)

    facts = {
        "__module__": __name__,
        "supports": frozenset({"causal"}),
        "op_inputs": ("v",),
        "op": staticmethod(op),
        "reference_op": staticmethod(reference_op),
        "projections": lambda self, head_dim: {"v": head_dim},
    }
    register_attention(flaw)(type(flaw, (OpAttention,), facts))


for name in ("shapes", "rows_of_a_batch", "causality", "padding", "gradients", "half_precision"):
    flawed(name)
for name in ("steps", "reference", "memory", "flawless"):
    flawed(name)
