"""The other rows of Flowformer's Table 5: its hierarchical model with other attention.

The paper does not state their options. They are the defaults of each mechanism, and for SOFT the ratios by stage of its
authors.
"""

from typing import Any

from timm.models import generate_default_cfgs

from ._registry import register_once
from .flowformer import TABLE_8, Flowformer, create_hierarchical, hierarchical_cfg

#: Mechanism -> the name and the top-1 accuracy that Table 5 prints; the model is called ``MECHANISM_hier_s``.
TABLE_5: dict[str, tuple[str, float]] = {
    "softmax": ("Full Attn.", 78.7),
    "linear": ("Linear Trans.", 79.0),
    "reformer": ("Reformer", 79.6),
    "longformer": ("Longformer", 77.6),
    "favor": ("Performer", 78.1),
    "nystrom": ("Nyströmformer", 77.2),
    "yoso": ("YOSO-E", 79.0),
    "soft": ("SOFT", 79.2),
    "cosformer": ("cosFormer", 68.3),
}

__all__ = ["TABLE_5"]  # register_model appends every entry point

default_cfgs = generate_default_cfgs({f"{mechanism}_hier_s.untrained": hierarchical_cfg() for mechanism in TABLE_5})


def _register(mechanism: str, printed: str, top_1: float) -> None:
    """Register ``flowformer_hier_s`` with another attention under the mechanism's name."""
    name = f"{mechanism}_hier_s"

    def entrypoint(pretrained: bool = False, **kwargs: Any) -> Flowformer:
        model_args = dict(TABLE_8, num_heads=16, attn_layer=mechanism)
        return create_hierarchical(name, pretrained, **dict(model_args, **kwargs))

    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__doc__ = f"``flowformer_hier_s`` with attention {mechanism!r}: {printed} of Table 5, top-1 {top_1}."
    globals()[name] = register_once(entrypoint)


for _mechanism, _row in TABLE_5.items():
    _register(_mechanism, *_row)
