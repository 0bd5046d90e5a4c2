"""``NAME_lra_TASK``: every classifier in the configurations of the Long Range Arena, and Flowformer's released ones.

Tay et al., *Long Range Arena*, ICLR 2021: a pre-norm encoder with sinusoids, or learned positions on images, and a head
of two layers. The official configurations differ only in the attention; those of the Flowformer release (Wu et al.,
ICML 2022, Table 2) have other sizes.
"""

from functools import partial
from typing import Any

from fairseq.models import MODEL_REGISTRY, register_model
from fairseq.utils import safe_getattr

from common.attention import ATTENTIONS

from ._classifier import LinearTimeClassifier
from ._configuration import register_architecture
from ._registration import derive
from .flash_masked import FlashMaskedModel


def _size(layers: int, heads: int, width: int, attention: int, ffn: int, dropout: float, **further: Any) -> dict:
    return {
        "encoder_layers": layers,
        "encoder_attention_heads": heads,
        "encoder_embed_dim": width,
        "encoder_attention_dim": attention,
        "encoder_ffn_embed_dim": ffn,
        "dropout": dropout,
        **further,
    }


_LEARNED = {"encoder_learned_pos": True}
_MEAN = {"pooling": "mean"}
#: The configurations of the Arena's Transformer (its commit cd31e5c).
OFFICIAL = {
    "listops": _size(4, 8, 512, 512, 1024, 0.1),
    "text": _size(4, 4, 256, 256, 1024, 0.1),
    "retrieval": _size(4, 4, 128, 128, 512, 0.1),
    "image": _size(1, 8, 128, 64, 128, 0.3, **_LEARNED),
    "pathfinder": _size(4, 4, 32, 16, 32, 0.2, **_MEAN),
}
#: The configurations of Flowformer_LRA in thuml/Flowformer (its commit 61f5d8c).
RELEASED = {
    "listops": _size(1, 2, 512, 512, 1024, 0.1),
    "text": _size(1, 4, 256, 256, 1024, 0.1),
    "retrieval": _size(4, 4, 128, 128, 512, 0.1),
    "image": _size(1, 4, 128, 64, 128, 0.3, **_LEARNED),
    "pathfinder": _size(1, 8, 256, 128, 256, 0.2, **_MEAN),
}
#: The released attention: relu features, competition over heads, no clamp.
_RELEASED_FLOW = {"flow_phi": "relu", "flow_competition": "softmax_heads", "flow_clamp": float("inf")}


@register_model("flash_classifier")
class FlashClassifier(LinearTimeClassifier, FlashMaskedModel):
    """A classifier of FLASH's gated attention units, O(T)."""


register_architecture("flash_classifier", "flash_classifier")(FlashClassifier.complete_options)


def complete(args, model: type[LinearTimeClassifier], size: dict[str, Any], attention: dict[str, Any]) -> None:
    """Fill in options of a configuration and of its attention that the command line left open."""
    size = {
        **size,
        **attention,
        "activation_dropout": size["dropout"],
        "classifier_style": "arena",
        "encoder_attention_no_bias": True,
    }
    if issubclass(model, FlashClassifier):  # two units replace attention and feed-forward
        ffn = size["encoder_ffn_embed_dim"]
        query, inner = unit_dims(size["encoder_embed_dim"], size["encoder_attention_dim"], ffn)
        size |= {"encoder_layers": 2 * size["encoder_layers"], "encoder_attention_heads": 1, "classifier_dim": ffn}
        size |= {"flash_query_dim": query, "encoder_ffn_embed_dim": inner}
    for name, value in size.items():
        setattr(args, name, safe_getattr(args, name, value))
    model.complete_options(args)


def unit_dims(width: int, attention: int, ffn: int) -> tuple[int, int]:
    """Width s of queries and keys, and e of values, for two gated attention units that replace one Transformer layer.

    The paper's s is 128. Both have the same number of weights: 2 (3 width e + width s) = 4 width attention
    + 2 width ffn.
    """
    query = min(128, width // 2)
    return query, (2 * attention + ffn - query) // 3


def _register(prefix: str, attention: str | None = None) -> None:
    name = f"{prefix}_classifier"
    for task, size in OFFICIAL.items():
        if attention is not None and "x" in ATTENTIONS[attention].needs:  # its heads together are as wide as the tokens
            size = {**size, "encoder_attention_dim": size["encoder_embed_dim"]}
        fill = partial(complete, model=MODEL_REGISTRY[name], size=size, attention={})
        register_architecture(name, f"{prefix}_lra_{task}")(fill)


derive("bidirectional", _register)
_register("flash")
for _task, _released in RELEASED.items():
    _fill = partial(complete, model=MODEL_REGISTRY["flowformer_classifier"], size=_released, attention=_RELEASED_FLOW)
    register_architecture("flowformer_classifier", f"flowformer_lra_{_task}_released")(_fill)
