"""Named sizes of the language models that Flowformer and DAFT are compared with: ``softmax_lm_wiki103``, ...

Flowformer's Table 4 on WikiText-103, DAFT's Tables 4 and 5 on CIFAR-10 and Enwik8. Options of a mechanism that the
papers do not state have their defaults.
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
#: The options of each table row, by corpus and then by mechanism name.
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "wiki103": dict.fromkeys(("softmax", "linear", "reformer", "favor", "rfa", "rfa_gate", "cosformer"), _WIKI103),
    "enwik8": dict.fromkeys(("softmax", "linear", "favor", "reformer", "synthesizer"), _ENWIK8),
    "cifar10": {
        **dict.fromkeys(("softmax", "synthesizer", "reformer"), _CIFAR10),
        # Image Transformer has two-dimensional windows of 256; this window is the last 256 subpixels.
        "local": {**_CIFAR10, "local_window": 256},
        # From Child et al. (2019), which the paper cites: half the usual FFN size, dropout 0.25. The stride, a row of
        # pixels, is our choice.
        "sparse": _size(128, 256, 2, 512, 0.25, sparse_pattern="strided", sparse_stride=96),
    },
}

for _corpus, _rows in SIZES.items():
    for _name, _row in _rows.items():
        register_model_architecture(f"{_name}_lm", f"{_name}_lm_{_corpus}")(partial(complete_size, size=_row))
