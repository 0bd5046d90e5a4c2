"""Retention (Sun et al., *Retentive Network*, 2023).

Legend, for every file of this folder:
    B batch, H heads, n tokens, d channels of q and k, e channels of v, C tokens of a chunk, γ a head's decay.
"""

from .interface import DECAYS, retention_attention

__all__ = ["DECAYS", "retention_attention"]
