"""What every inner attention has in common: its contract with the adapters and its capability flags."""

import inspect
from typing import Any, Callable, Dict, Final, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops.checks import State


class InnerAttention(nn.Module):
    """(q, k, v) -> out between a host's projections. Subclasses define two methods.

    ``forward(q, k, v, key_padding_mask=None, query_padding_mask=None, dropout_p=0.0) -> out`` attends over whole
    sequences: q (B, H, n, d), k (B, H, m, d), v (B, H, m, e) -> (B, H, n, e), heads already split. Masks are bool,
    (B, m) for keys and (B, n) for queries, True = padding; a padded query gives 0. ``dropout_p`` is applied in
    either mode of the module, since hosts decide that themselves. Causal is a property of the module, not of a mask.

    ``extend(q, k, v, padding_mask=None, state=None) -> (out, state)`` attends from the next tokens of a causal
    sequence, one or many; ``padding_mask`` (B, n) is theirs alone, ``state`` None starts a sequence. Every tensor of
    a state has the batch as dimension 0.
    """

    #: Whether decoding needs memory that does not grow with the tokens seen.
    state_is_constant_size: bool = True
    #: Whether both methods want the tokens before their projection too: the keyword ``x`` (B, n, D).
    needs_input: bool = False
    #: Channels of one head's key, None for as many as its query has.
    key_channels: Optional[int] = None
    #: Whether q is a tensor; otherwise it is None, and a host needs no projection to queries.
    query: bool = True

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal

    @classmethod
    def option_names(cls) -> Tuple[str, ...]:
        """Names of the constructor's arguments."""
        return tuple(name for name in inspect.signature(cls.__init__).parameters if name != "self")

    def _check_causal(self) -> None:
        if not self.causal:
            raise ValueError("causal is False; allowed for extend: an attention built with causal=True")

    def extra_repr(self) -> str:
        """The constructor's arguments, for ``print(model)``."""
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.option_names())


class OpAttention(InnerAttention):
    """An ``InnerAttention`` that is one function of ``common.ops``, whose options are the constructor's arguments.

    Subclasses name the function, ``op``, and define ``_attend_scriptable``, its form for TorchScript.
    """

    op: Callable
    causal: Final[bool]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Optional[Tensor] = None,
        query_padding_mask: Optional[Tensor] = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """q (B, H, n, d), k (B, H, m, d), v (B, H, m, e) -> (B, H, n, e); see ``InnerAttention``."""
        v = drop_sources(v, dropout_p)
        if torch.jit.is_scripting():
            if self.causal:
                raise ValueError("causal is True; allowed in TorchScript: causal=False")
            return self._attend_scriptable(q, k, v, key_padding_mask, query_padding_mask)
        return self._attend(q, k, v, key_padding_mask, query_padding_mask)

    @torch.jit.unused
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Optional[Tensor], query_padding_mask: Optional[Tensor]
    ) -> Tensor:
        masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
        return type(self).op(q, k, v, **masks, **self._arguments())

    @torch.jit.unused
    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, padding_mask: Optional[Tensor] = None, state: Optional[State] = None
    ) -> Tuple[Tensor, State]:
        """The next tokens' outputs (B, H, n, e) and the state after them; O(1) memory and time per token."""
        self._check_causal()
        masks = {"key_padding_mask": padding_mask, "query_padding_mask": padding_mask}
        return type(self).op(q, k, v, initial_state=state, return_state=True, **masks, **self._arguments())

    @torch.jit.unused
    def _arguments(self) -> Dict[str, Any]:
        return {name: getattr(self, name) for name in self.option_names()}


def drop_sources(v: Tensor, dropout_p: float) -> Tensor:
    """Attention dropout in linear time: whole sources of v (B, H, m, e) are dropped, the rest scaled by 1/(1-p).

    Dropping entries of the attention map one by one would need the map; this drops the same columns for every query.
    """
    if dropout_p == 0.0:
        return v
    return v * F.dropout(torch.ones_like(v[..., :1]), dropout_p)
