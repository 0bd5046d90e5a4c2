"""The gated delta rule for eager execution, with a hand-written backward pass; ``README.md`` derives it.

The forward pass keeps its inputs and the memory before each block; the backward pass recomputes the tensors of a block.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.autograd import graph_gradients
from ..shared.chunks import chunk_length, reverse_cumsum
from ..shared.precision import autocast_off
from ..shared.tracing import runs_eagerly
from .causal import Chunks, delta_chunks
from .causal_cpu import block_forward, block_outputs, blocks_of, cut, put


def delta_blocks(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, chunk_size: int, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """``delta_chunks`` with a hand-written backward pass, for tensors for which ``runs_eagerly`` is True.

    O(n (C (C + d + e) + d e)) time, O(n (d + e) + b d e) memory for b blocks of at least one chunk, and what one takes.
    """
    return _Delta.apply(q, k, v, beta, log_decay, memory, chunk_length(chunk_size, q.shape[2]))


class _Delta(torch.autograd.Function):
    """Inputs and outputs of ``delta_chunks``."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, memory: Tensor, size: int
    ) -> tuple[Tensor, Tensor]:
        inputs, state, before = (q, k, v, beta, log_decay), memory.flatten(0, 1), []
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        for tokens in blocks_of(q, size):
            before.append(state)
            chunks = Chunks(*cut(inputs, tokens, size))
            block = block_forward(chunks, state)
            put(out, tokens, block_outputs(chunks, block))
            state = block.states[-1].clone()  # without all the others
        ctx.size = size
        ctx.save_for_backward(*inputs, memory, *before)
        return out, state.view_as(memory)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_memory: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, memory = (saved := ctx.saved_tensors)[:6]  # read once, as activation checkpointing allows
        with autocast_off(memory):  # that of the forward pass does not apply here
            if torch.is_grad_enabled() or not runs_eagerly(grad_out, grad_memory):

                def in_graph(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
                    return delta_chunks(*tensors[:5], ctx.size, tensors[5])

                return *graph_gradients(in_graph, (*inputs, memory), (grad_out, grad_memory)), None
            grads = [None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
            grad_state, before = grad_memory.flatten(0, 1), saved[6:]
            for tokens, state in reversed(list(zip(blocks_of(inputs[0], ctx.size), before))):
                chunks = Chunks(*cut(inputs, tokens, ctx.size))
                block_grads, grad_state = _block_backward(
                    chunks, state, *cut((grad_out,), tokens, ctx.size), grad_state
                )
                for grad, block_grad in zip(grads, block_grads):
                    if grad is not None:
                        put(grad, tokens, block_grad)
        return *grads, grad_state.view_as(memory), None


def _block_backward(chunks: Chunks, state: Tensor, grad_out: Tensor, grad_state: Tensor) -> tuple[Chunks, Tensor]:
    """The gradients of ``chunks`` and of the memory ``state`` (N, d, e) before them.

    ``grad_out`` (G, N, C, e) is the gradient of their outputs, ``grad_state`` (N, d, e) that of the memory after them.
    """
    q, k, v, beta, log_decay = chunks
    block, beta = block_forward(chunks, state), beta.unsqueeze(-1)
    since_start, before = block.since_start.unsqueeze(-1), block.states[:-1]
    scores = (q @ k.transpose(-2, -1)).mul_(block.inside)
    grad_written = scores.transpose(-2, -1) @ grad_out  # of beta times the errors, but for what is read in later chunks
    queries = (q * since_start).transpose(-2, -1)
    grad_states = queries @ grad_out  # (G, N, d, e), at first of the memory before each chunk
    read, kept = (block.read * beta).transpose(-2, -1), since_start[..., -1:, :]  # (G, N, d, C), (G, N, 1, 1)
    for g in reversed(range(len(q))):
        after, grad_states_g = grad_state, grad_states[g]
        grad_written[g].baddbmm_(block.keys_at_end[g], after)
        grad_state = torch.addcmul(grad_states_g, kept[g], after).baddbmm_(read[g], grad_written[g], alpha=-1)
        grad_states_g.copy_(after)  # from here on, of that after each chunk
    grad_v, written = block.inverse.transpose(-2, -1) @ (grad_written * beta), block.errors * beta

    # Terms that decay from the start of a chunk, or until its end.
    grad_q = (grad_out @ before.transpose(-2, -1)).mul_(since_start)
    grad_k_from_start = (grad_v @ before.transpose(-2, -1)).mul_(-since_start)
    grad_k_to_end = (written @ grad_states.transpose(-2, -1)).mul_(block.inside[..., -1, :].unsqueeze(-1))
    # Terms that decay inside of a chunk: scores, and products of keys times beta.
    grad_scores = grad_out @ written.transpose(-2, -1)
    grad_seen = (grad_v @ block.errors.transpose(-2, -1)).neg_().tril_(-1)
    by_seen = grad_seen * block.seen
    grad_beta = (grad_written * block.errors).sum(-1) + by_seen.sum(-2)

    grad_log_decay = None
    if log_decay is not None:
        pairs = torch.addcmul(by_seen.mul_(beta.transpose(-2, -1)), grad_scores, scores)
        at_queries = (q * grad_q).sum(-1) + (k * grad_k_from_start).sum(-1)
        whole = (grad_states * before).sum((-2, -1)).unsqueeze(-1) * block.since_start[..., -1:]
        grad_log_decay = _across(pairs, at_queries, (k * grad_k_to_end).sum(-1)) + whole

    grad_scores.mul_(block.inside)
    grad_products = grad_seen.mul_(block.inside).mul_(beta.transpose(-2, -1))
    grad_q += grad_scores @ k
    grad_k = grad_scores.transpose(-2, -1) @ q
    grad_k += (grad_products + grad_products.transpose(-2, -1)) @ k
    grad_k += grad_k_from_start.add_(grad_k_to_end)
    return Chunks(grad_q, grad_k, grad_v, grad_beta, grad_log_decay), grad_state


def _across(pairs: Tensor, at_queries: Tensor, at_keys: Tensor) -> Tensor:
    """Σ_(i >= t > j) pairs_ij + Σ_(i >= t) at_queries_i + Σ_(j < t) at_keys_j: what passes across token t, (G, N, C).

    ``pairs`` (G, N, C, C), query i and key j. No sum is a difference of others, so that what a closed gate lets through
    is not lost in what it does not.
    """
    later = torch.ones_like(pairs[0, 0]).triu()
    inside = (later @ pairs).tril_(-1).sum(-1)
    return inside + reverse_cumsum(at_queries) + F.pad(at_keys[..., :-1], (1, 0)).cumsum(-1)
