"""The context that modules of a model need to compute one part of a sequence."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..attention import ATTENTIONS, InnerAttention
from ..modules.gated_attention_unit import GatedAttentionUnit
from ..ops.shared.state import State
from .group import ContextGroup
from .passed_state import Call, RandomNumbers, carried, groups, state_layouts
from .sums import sums_before


class Context:
    """A group, and ``before``, the number of real tokens of each row before this process's part, int64 (B,).

    ``tokens``, int64 (B,), is the number of real tokens of each row in this part. Inside ``context_parallel``, modules
    have this object as their attribute ``context``.
    """

    def __init__(self, group: ContextGroup, tokens: Tensor) -> None:
        self.group, self._counts = group, group.gather(tokens)  # (P, B)
        self._starts = self._counts.cumsum(0) - self._counts
        self.before = self._starts[group.rank]
        self._multiples: dict[int, bool] = {}  # a cache, so that a GPU is synchronised once

    def starts_at_multiples(self, size: int) -> bool:
        """Whether the number of real tokens before every part with real tokens is a multiple of ``size``."""
        if size not in self._multiples:
            self._multiples[size] = not bool((self._starts % size * self._counts).any())
        return self._multiples[size]

    def sums_before(self, own: Tensor, log_unit: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """``sums.sums_before`` in this group: Σ of ``own`` (B, H, ...) over the processes before, and its unit."""
        return sums_before(self.group, own, log_unit)

    def carry(
        self, owner: nn.Module, call: Call, tensors: Sequence[Tensor | None], padding_mask: Tensor | None
    ) -> Tensor:
        """``passed_state.carried`` in this group."""
        return carried(self.group, owner, call, tensors, padding_mask)

    def attend(
        self,
        attention: InnerAttention,
        tensors: tuple[Tensor | None, Tensor | None, Tensor],
        key_padding_mask: Tensor | None,
        query_padding_mask: Tensor | None,
        inputs: dict[str, Tensor],
    ) -> Tensor:
        """``attention.forward`` for this part, from q, k and v (B, H, n, c) or None, and ``inputs``: (B, H, n, e).

        Padding gives 0. Sums that add up are gathered. Other states are passed from process to process; if the
        attention has nothing that belongs to a head, heads become rows, so that the pipeline has more groups of rows.
        If there are fewer groups than processes, which would idle half of the time, ``attend_part`` is used if present.

        Raises:
            ValueError: the mask of the queries is not that of the keys, although they are the same tokens.
        """
        if query_padding_mask is not None and query_padding_mask is not key_padding_mask:
            raise ValueError(
                "query_padding_mask is not key_padding_mask; allowed in context_parallel: one mask for both"
            )
        if attention.sums_add_up and not inputs:
            return self._attend_after_sums(attention, tensors, key_padding_mask)
        rows, heads, names = *tensors[-1].shape[:2], list(inputs)
        if attention.attend_part is not None and not inputs and groups(rows * heads, self.group.size) < self.group.size:
            return attention.attend_part(*tensors, key_padding_mask, self.before, self.sums_before)

        def call(own: Sequence[Tensor | None], mask: Tensor | None, state: State | None) -> tuple[Tensor, State]:
            further = {name: x.squeeze(1) if name == "x" else x for name, x in zip(names, own[3:])}
            return attention.extend(*own[:3], padding_mask=mask, state=state, **further)

        # Tokens must be the third dimension of all tensors, but x is (B, n, D).
        operands = [*tensors, *(x.unsqueeze(1) if name == "x" else x for name, x in inputs.items())]
        if "num_heads" in attention.needs or any(True for _ in attention.parameters()):
            return self.carry(attention, call, operands, key_padding_mask)
        operands = [None if x is None else x.flatten(0, 1).unsqueeze(1) for x in operands]
        mask = None if key_padding_mask is None else key_padding_mask.repeat_interleave(heads, 0)
        return self.carry(attention, call, operands, mask).squeeze(1).unflatten(0, (-1, heads))

    def _attend_after_sums(
        self, attention: InnerAttention, tensors: tuple[Tensor, Tensor, Tensor], padding_mask: Tensor | None
    ) -> Tensor:
        """``attention.extend`` from the sums of the parts before this one."""

        def call(own: Sequence[Tensor], mask: Tensor | None, state: State | None) -> tuple[Tensor, State]:
            return attention.extend(*own, padding_mask=mask, state=state)

        layouts, numbers, start = state_layouts(self.group, attention, call, tensors), RandomNumbers(tensors), None
        if "count" in layouts:  # features depend on the position
            start = {name: self.before.new_zeros(x.shape, dtype=x.dtype) for name, x in layouts.items()}
            start["count"] = self.before
        _, sums = call(tensors, padding_mask, start)
        numbers.restore()  # so that redrawn directions are the same for the part's sums and for its queries
        side_by_side = torch.cat([sums["sum_kv"], sums["sum_k"].unsqueeze(-1)], dim=-1)
        before, log_unit = self.sums_before(side_by_side, sums.get("log_max"))
        state = {"sum_kv": before[..., :-1], "sum_k": before[..., -1]}
        further = {"log_max": log_unit, "count": self.before}
        return call(tensors, padding_mask, {name: state.get(name, further.get(name)) for name in layouts})[0]


@contextmanager
def context_parallel(model: nn.Module, group: ContextGroup, tokens: Tensor) -> Iterator[Context]:
    """Inside, ``model`` computes this process's part of sequences that are split over the processes of ``group``.

    ``tokens``, int64 (B,), is the number of real tokens of each row in this part; it may be 0. Each process passes its
    part of the same rows to the model, in the same order, with as many forward and backward passes as the others, all
    of them inside. The output is that of the part's tokens. Gradients are those of the sum of all processes' losses
    through this process's tokens: sum the gradients of parameters over the group, as data parallelism does. Each
    attention sends one state to the next process and one gradient back, for any number of tokens.

    Raises:
        ValueError: as ``check_context_parallel``.
    """
    modules = check_context_parallel(model)
    context = Context(group, tokens)
    for module in modules:
        module.context = context
    try:
        yield context
        group.finish_sending()
    finally:
        for module in modules:
            module.context = None


def check_context_parallel(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` that have a ``context``.

    Raises:
        ValueError: the model has an attention that is not causal, or whose decoding state grows with the tokens, or it
            has none of our attention modules.
    """
    modules = [module for module in model.modules() if hasattr(type(module), "context")]
    attentions = [module for module in modules if isinstance(module, (InnerAttention, GatedAttentionUnit))]
    supported = [name for name, kind in ATTENTIONS.items() if "causal" in kind.supports and kind.linear_cost]
    allowed = f"gated attention units with chunks, and causal attention of these: {', '.join(supported)}"
    if not attentions:
        raise ValueError(f"model is a {type(model).__name__} without attention of lineartime; allowed: {allowed}")
    for module in attentions:
        if not (module.causal and module.linear_cost):
            name = getattr(module, "name", "") or type(module).__name__
            why = "whose state grows with the tokens" if module.causal else "which is not causal"
            raise ValueError(f"model has attention {name!r}, {why}; allowed in context_parallel: {allowed}")
    return modules
