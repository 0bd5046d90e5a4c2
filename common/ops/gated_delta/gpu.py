"""The delta rule by fla's kernels."""

from ..shared.gpu import fla
from .causal import delta_in_blocks

#: Of q, k, v, beta, log_decay and the memory before the first token: outputs, and the memory after the last.
KERNELS = fla.Kernels("delta_rule", delta_in_blocks)
