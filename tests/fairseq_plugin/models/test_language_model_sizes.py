"""The named sizes of the language models that the Flowformer and DAFT papers compare."""

import pytest
import torch

from fairseq_plugin.models.language_model_sizes import SIZES
from tests.fairseq_plugin.helpers.language_models import build_model

LENGTHS = {"wiki103": 512, "enwik8": 1024, "cifar10": 3072}
ROWS = [f"{name}_lm_{corpus}" for corpus, rows in SIZES.items() for name in rows]
#: With 256 symbols: layers, width, heads, FFN, dropout, parameters other than the attention's.
SHAPES = {
    "wiki103": (6, 512, 8, 2048, 0.1),
    "enwik8": (12, 512, 8, 2048, 0.1),
    "cifar10": (12, 512, 4, 2048, 0.1),
    "sparse_lm_cifar10": (128, 256, 2, 512, 0.25),
}
#: Mechanisms with fairseq's projections and no parameters of their own.
PLAIN = ("softmax", "linear", "favor", "cosformer", "local", "sparse")


@pytest.mark.parametrize("arch", ROWS)
def test_named_size(arch: str) -> None:
    """Layers, width, heads, FFN and dropout as in the paper; parameter counts if the attention adds none."""
    name, _, corpus = arch.rpartition("_lm_")
    layers, width, heads, ffn, dropout = SHAPES.get(arch, SHAPES[corpus])
    with torch.device("meta"):
        model = build_model(arch, "--tokens-per-sample", str(LENGTHS[corpus]), sizes=(), words=252)
    decoder = model.decoder
    first = decoder.layers[0]
    assert (len(decoder.layers), decoder.embed_dim, decoder.dropout_module.p) == (layers, width, dropout)
    assert (first.self_attn.num_heads, first.fc1.out_features) == (heads, ffn)
    assert (decoder.output_projection.weight is decoder.embed_tokens.weight) == (corpus == "wiki103")
    if name in PLAIN:
        layer = 4 * (width * width + width) + 2 * width * ffn + ffn + width + 4 * width
        symbols = 256 * width * (1 if corpus == "wiki103" else 2)
        assert sum(x.numel() for x in model.parameters()) == layers * layer + 2 * width + symbols


def test_what_the_paper_says_of_a_mechanism() -> None:
    """A window of 256 in place of Image Transformer's, and the strided pattern; typed options override them."""
    length = ["--tokens-per-sample", "64"]
    with torch.device("meta"):
        local, sparse, typed = (
            build_model(arch, *length, *extra, sizes=()).decoder.layers[0].self_attn.inner.options
            for arch, extra in (
                ("local_lm_cifar10", ()),
                ("sparse_lm_cifar10", ("--decoder-layers", "1")),
                ("sparse_lm_cifar10", ("--decoder-layers", "1", "--sparse-stride", "8")),
            )
        )
    assert (local.window, sparse.pattern, sparse.stride, typed.stride) == (256, "strided", 96, 8)
