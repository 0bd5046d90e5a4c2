"""Causal Flow-Attention by the form that suits the tensors. Legend: ``flow_attention``."""

from typing import Tuple

from torch import Tensor

from .checks import State
from .eager import runs_eagerly
from .flow_attention_causal_chunks import CausalInput, attention_in_chunks
from .flow_attention_causal_pieces import attention_in_pieces
from .triton import dispatch


def causal_attention(given: CausalInput) -> Tuple[Tensor, State]:
    """Algorithm 2: the output (B, H, n, e) and the state after the tokens.

    On a GPU by kernels; on a CPU in pieces, but for a single token; as one graph of chunks for all else.
    """
    q, k, v = given.q, given.k, given.v  # not a slice, which torch.compile of torch 2.6 refuses
    if dispatch.flow_attention_applies(q, k, v):
        return dispatch.attempt("flow_attention", "causal_attention", attention_in_chunks, (given,))
    if q.device.type == "cpu" and q.shape[2] > 1 and runs_eagerly(q, k, v):
        return attention_in_pieces(given)
    return attention_in_chunks(given)
