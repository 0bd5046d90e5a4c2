"""The models that are compared on a CPU: one width and depth for all."""

from typing import NamedTuple


class Model(NamedTuple):
    """A row of the tables."""

    title: str  # in the paper
    attention: str


#: By architecture.
MODELS = {
    "flash_lm": Model("FLASH", "relu² in chunks of 256, linear across"),
    "flash_quad_lm": Model("FLASH-Quad", "relu², quadratic"),
    "transformer_pp_lm": Model("Transformer++", "softmax, torch's fused kernel"),
    "performer_lm": Model("Performer", "relu kernel, linear"),
    "mc_transformer_pp_lm": Model("MC-TFM++", "softmax in chunks of 256, linear across"),
    "transformer_plus_lm": Model("Transformer+", "softmax, torch's fused kernel"),
    "combiner_lm": Model("Combiner", "softmax, row-major axial"),
}
#: Those that are compared if none are named.
DEFAULT_MODELS = tuple(MODELS)[:5]


class Shape(NamedTuple):
    """Size of the models; a gated attention unit is half a Transformer's layer."""

    width: int = 128
    layers: int = 2
    heads: int = 4
    query_dim: int = 64

    def arguments(self, architecture: str, inner_width: int | None) -> list[str]:
        """The options of fairseq-train that make a model."""
        units = architecture.startswith("flash_")
        options = ["--arch", architecture, "--decoder-embed-dim", str(self.width), "--share-decoder-input-output-embed"]
        options += ["--decoder-layers", str(self.layers * 2 if units else self.layers)]
        options += (
            ["--flash-query-dim", str(self.query_dim)] if units else ["--decoder-attention-heads", str(self.heads)]
        )
        return options + (["--decoder-ffn-embed-dim", str(inner_width)] if inner_width else [])


SHAPE = Shape()
