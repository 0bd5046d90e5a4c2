"""The models that are compared on a CPU, causal and masked. All have the same width and depth, except in Figure 3."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from .. import models


class Shape(NamedTuple):
    """Size of the models; a gated attention unit is half a Transformer's layer."""

    width: int = 128
    layers: int = 2
    heads: int = 4

    def arguments(self, name: str, inner_width: int | None) -> list[str]:
        """The options of fairseq-train for the model ``name``; None keeps its default inner width."""
        model = ALL_MODELS[name]
        width, layers, heads = model.shape or self
        units, side = model.architecture.startswith("flash_"), "encoder" if model.masked else "decoder"
        options = ["--arch", model.architecture, f"--{side}-embed-dim", str(width)]
        options += [] if model.masked else ["--share-decoder-input-output-embed"]
        options += [f"--{side}-layers", str(layers * 2 if units else layers)]
        options += ["--flash-query-dim", str(width // 2)] if units else [f"--{side}-attention-heads", str(heads)]
        options += [f"--{side}-ffn-embed-dim", str(inner_width)] if inner_width else []
        return [*options, *(word.replace("WIDTH", str(width)) for word in model.options)]


class Model(NamedTuple):
    """A row of the tables."""

    title: str  # in the paper
    architecture: str
    options: tuple[str, ...] = ()
    masked: bool = False
    clipped: bool = True  # gradients; the paper does not clip those of its vanilla Transformer (Tables 6 and 7)
    shape: Shape | None = None  # if it differs from the others; the inner width is then the default (Figure 3)
    kind: str = ""  # label of all its sizes (Figure 3)


_STOCK = (
    *("--decoder-normalize-before", "--activation-fn", "gelu", "--dropout", "0"),
    *("--decoder-input-dim", "WIDTH", "--decoder-output-dim", "WIDTH"),
)
_LEARNED = ("--encoder-learned-pos", "--dropout", "0", "--attention-dropout", "0")
#: Causal models by name: that of the architecture, with a suffix for options.
MODELS: dict[str, Model] = {
    "flash_lm": Model("FLASH", "flash_lm"),
    "flash_quad_lm": Model("FLASH-Quad", "flash_quad_lm"),
    "transformer_pp_lm": Model("Transformer++", "transformer_pp_lm"),
    "performer_lm": Model("Performer", "performer_lm"),
    "mc_transformer_pp_lm": Model("MC-TFM++", "mc_transformer_pp_lm"),
    "transformer_plus_lm": Model("Transformer+", "transformer_plus_lm"),
    "transformer_plus_lm.no_rotary": Model("Transformer+, not rotary", "transformer_plus_lm", ("--flash-no-rotary",)),
    "combiner_lm": Model("Combiner", "combiner_lm", ("--flash-row-length", "256")),
    "transformer_lm": Model(
        "Transformer", "transformer_lm", (*_STOCK, "--decoder-learned-pos", "--no-scale-embedding"), clipped=False
    ),
    "transformer_lm.sinusoids": Model("Transformer, sinusoids", "transformer_lm", _STOCK, clipped=False),
    "flash_lm.local_only": Model("FLASH (LocalOnly)", "flash_lm", ("--flash-no-linear",)),
    "flash_lm.global_only": Model("FLASH (GlobalOnly)", "flash_lm", ("--flash-no-local", "--flash-chunk-size", "64")),
    "performer_lm.scan": Model("Performer (scan)", "performer_lm", ("--flash-cumulative-sum", "scan")),
}
#: Chunk sizes in Figure 8. Of the paper's four, only 256 and 512 are legible; FLASH has 256.
for _size in (64, 128, 512):
    MODELS[f"flash_lm.chunk_{_size}"] = Model(f"FLASH, C = {_size}", "flash_lm", ("--flash-chunk-size", str(_size)))
#: Gated attention units have the toeplitz bias at every length, or else rotary: --flash-relative-bias auto would change
#: at 512 tokens, and compare the biases.
for _name, _model in list(MODELS.items()):
    if _model.architecture.startswith("flash_"):
        for _suffix, _title, _bias in (("", "", "toeplitz"), (".rotary", ", rotary", "rotary")):
            MODELS[_name + _suffix] = _model._replace(
                title=_model.title + _title, options=(*_model.options, "--flash-relative-bias", _bias)
            )
#: The widths of Figure 3 divided by 8, its layers divided by 4, and heads of 16 channels.
_SHAPES = (Shape(64, 2, 4), Shape(96, 3, 6), Shape(128, 6, 8))
_KINDS = {"flash_quad_lm": "GAU", "transformer_plus_lm": "MHSA+MLP", "transformer_pp_lm": "MHSA+GLU"}
for _name, _kind in _KINDS.items():
    for _shape in _SHAPES:
        _title = f"{_kind}, width {_shape.width}"
        MODELS[f"{_name}.w{_shape.width}"] = MODELS[_name]._replace(title=_title, shape=_shape, kind=_kind)


def _masked(model: Model) -> Model:
    if model.architecture == "transformer_lm":  # RoBERTa is post-norm; softmax_mlm is pre-norm like all others here
        return model._replace(options=_LEARNED, architecture="softmax_mlm", masked=True)
    return model._replace(architecture=masked_name(model.architecture), masked=True)


def masked_name(name: str) -> str:
    """``flash_lm.local_only`` as ``flash_mlm.local_only``."""
    return name.replace("_lm", "_mlm")


#: Masked models by name.
MASKED_MODELS = {
    masked_name(name): _masked(model) for name, model in MODELS.items() if not name.endswith((".scan", ".sinusoids"))
}
ALL_MODELS = {**MODELS, **MASKED_MODELS}
#: The models that are compared by default.
DEFAULT_MODELS = ("flash_lm", "flash_quad_lm", "transformer_pp_lm", "performer_lm", "mc_transformer_pp_lm")
SHAPE = Shape()
#: All models get about as many parameters as this one with its default inner width, and are timed against it.
FUSED = "transformer_pp_lm"


class PaperFigure(NamedTuple):
    """A figure of the paper."""

    models: tuple[str, ...]  # by their causal names
    lengths: list[int]  # by default; the paper's reach 8,192, except in Figure 3
    masked: bool | None = None  # in the paper; None where it is illegible: both are possible
    latency: bool = False  # whether a panel shows the seconds per step


_BOTH = ("transformer_lm", "transformer_pp_lm", "performer_lm", "combiner_lm", "flash_quad_lm", "flash_lm")
FIGURES = {
    3: PaperFigure(tuple(name for name, model in MODELS.items() if model.kind), [512]),
    5: PaperFigure(_BOTH, [512, 1024, 2048, 4096], masked=True, latency=True),
    6: PaperFigure(_BOTH, [512, 1024, 2048, 4096], masked=False, latency=True),
    7: PaperFigure(
        ("flash_lm", "flash_lm.local_only", "flash_lm.global_only", "mc_transformer_pp_lm"), [1024, 2048, 4096]
    ),
    8: PaperFigure(("flash_lm.chunk_64", "flash_lm.chunk_128", "flash_lm", "flash_lm.chunk_512"), [1024, 2048, 4096]),
}


def task_arguments(masked: bool) -> list[str]:
    """The task of causal or masked models, as options of fairseq-train."""
    return ["--task", "masked_lm", "--criterion", "masked_lm"] if masked else ["--task", "language_modeling"]


def build(shape: Shape, name: str, inner_width: int | None, length: int, vocabulary: int) -> nn.Module:
    """The model that fairseq-train builds, for sequences of ``length``."""
    masked = ALL_MODELS[name].masked
    dictionary = models.dictionary_of(vocabulary)
    if masked:
        dictionary.add_symbol("<mask>")
    arguments = [*task_arguments(masked), "--tokens-per-sample", length, *shape.arguments(name, inner_width)]
    return models.build(arguments, dictionary)


def equal_widths(names: Iterable[str], length: int, shape: Shape, vocabulary: int) -> dict[str, int]:
    """Model -> the inner width that gives it about the reference's parameters, unless it has a size of its own."""
    names = [name for name in names if ALL_MODELS[name].shape is None]

    def count(name: str, width: int | None) -> int:
        return sum(weight.numel() for weight in build(shape, name, width, length, vocabulary).parameters())

    widths, step = {}, max(1, shape.width // 16)
    for name in names:
        target = count(masked_name(FUSED) if ALL_MODELS[name].masked else FUSED, None)
        low, high = step, 2 * shape.width  # parameters grow evenly with the inner width
        slope = (count(name, high) - count(name, low)) / (high - low)
        widths[name] = max(step, round((low + (target - count(name, low)) / slope) / step) * step)
    return widths
