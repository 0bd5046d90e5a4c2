"""Named sizes of the language models that Flowformer and DAFT are compared with: ``softmax_lm_wiki103``, ...

Flowformer's Table 4 on WikiText-103, DAFT's Tables 4 and 5 on CIFAR-10 and Enwik8. What the papers do not say of a
mechanism has its default.
"""

from functools import partial
from typing import Any

from fairseq.models import register_model_architecture

from . import attention  # noqa: F401  registers NAME_lm
from ._language_model import complete_size


def _size(layers: int, width: int, heads: int, ffn: int = 2048, dropout: float = 0.1, **further: Any) -> dict[str, Any]:
    return {
        "decoder_layers": layers,
        "decoder_embed_dim": width,
        "decoder_attention_heads": heads,
        "decoder_ffn_embed_dim": ffn,
        "dropout": dropout,
        **further,
    }


_WIKI103 = _size(6, 512, 8, share_decoder_input_output_embed=True)
_ENWIK8 = _size(12, 512, 8)
_CIFAR10 = _size(12, 512, 4)
#: The options of each row, by corpus and by the name of its mechanism.
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "wiki103": dict.fromkeys(("softmax", "linear", "reformer", "favor", "rfa", "rfa_gate", "cosformer"), _WIKI103),
    "enwik8": dict.fromkeys(("softmax", "linear", "favor", "reformer", "synthesizer"), _ENWIK8),
    "cifar10": {
        **dict.fromkeys(("softmax", "synthesizer", "reformer"), _CIFAR10),
        # Image Transformer has windows of 256 in two dimensions; these are the last 256 subpixels.
        "local": {**_CIFAR10, "local_window": 256},
        # Of Child et al. (2019), whom the paper quotes: FFN of half the usual size, dropout 0.25. The stride, a row of
        # pixels, is ours.
        "sparse": _size(128, 256, 2, 512, 0.25, sparse_pattern="strided", sparse_stride=96),
    },
}

for _corpus, _rows in SIZES.items():
    for _name, _row in _rows.items():
        register_model_architecture(f"{_name}_lm", f"{_name}_lm_{_corpus}")(partial(complete_size, size=_row))
