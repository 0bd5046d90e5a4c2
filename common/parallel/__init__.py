"""Context parallelism: each process holds a part of a sequence, and a state is passed from part to part.

Legend: P processes of a group, B rows of a batch, H heads, n tokens of one process's part.
"""

from .context import Context, check_context_parallel, context_parallel
from .group import ContextGroup
from .parts import own_part, part_length

__all__ = ["Context", "ContextGroup", "check_context_parallel", "context_parallel", "own_part", "part_length"]
