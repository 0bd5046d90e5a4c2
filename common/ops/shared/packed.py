"""Packed documents: the argument ``segment_ids`` of functions of ``common.ops``, for which see ``documents.py``."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor


def takes_segments(*tokens: str, bias: bool = False, shared: str | None = None) -> Callable[[Callable], Callable]:
    """A decorator that gives a function of ``common.ops`` the argument ``segment_ids`` (B, n), documents in a row.

    ``tokens`` are the names of its inputs that have a dimension of tokens, in addition to the masks. With ``bias`` it
    has a relative bias of that name for all tokens and those of the state; each document gets its leading part. The
    input ``shared`` may be without batch, in three dimensions, and is then the same for all documents. With
    ``segment_ids`` the function is called once for all documents of about the same length, each of them a row, padded
    on the right. With ``initial_state`` and ``return_state`` the state has an additional entry ``segment_id`` (B,): a
    document with this id continues from the state, others start without it. torch.compile breaks its graph there.

    Raises:
        ValueError: ids that are not integers (B, n), or that decrease; queries and keys of two sequences; only one mask
            if attention is not causal; a bias for another number of tokens; under torch.export.
    """

    def decorate(op: Callable) -> Callable:
        signature = inspect.signature(op)

        @functools.wraps(op)
        def attend(*args: Any, segment_ids: Tensor | None = None, **kwargs: Any) -> Any:
            if segment_ids is None:
                return op(*args, **kwargs)
            arguments = signature.bind(*args, **kwargs)
            arguments.apply_defaults()
            same = shared is not None and getattr(arguments.arguments[shared], "ndim", None) == 3
            of_tokens = tuple(name for name in tokens if not (same and name == shared))
            from .documents import by_document  # not above: few calls have packed documents

            return by_document(op, of_tokens, arguments.arguments, segment_ids, bias)

        return attend

    return decorate
