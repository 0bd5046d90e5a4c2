"""Draw what Flow-Attention weighs in an expression of ListOps: ``python -m recipes.lra.pictures --checkpoint FILE``.

Competition is the share of a symbol among the sources, allocation how much of what it gathers a symbol lets in as a
sink (*Flowformer*, Figures 4, 5, 7 to 9), in every layer and head of a trained ``flowformer_lra_listops``.
"""

import itertools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.roberta import RobertaHubInterface
from matplotlib import pyplot as plt

import fairseq_plugin  # noqa: F401  registers the architectures
from common.attention import record_attention
from common.command_parser import CommandParser
from common.output_files import check_new

from ..shared.commands import shown_path
from ..shared.plots import STYLE, save
from ..shared.scripts import script
from .listops import to_example
from .listops_rules import evaluate
from .tables import Row, read_table

MODEL = "flowformer_classifier"
#: The first token, which stands for the whole.
FIRST = "CLS"
_HEAD = "sentence_classification_head"
#: Most symbols in a line of a picture, and in an expression.
_LONGEST_LINE, _MOST = 32, 320


class Weights(NamedTuple):
    """One expression, and what each layer weighs its symbols by."""

    symbols: list[str]  # T of them, the first token in front
    value: int
    predicted: int
    competition: list[np.ndarray]  # of each layer, (heads, T), over its mean: 1 is an even share
    allocation: list[np.ndarray]  # of each layer, (heads, T)


def load(checkpoint: Path, data: Path) -> RobertaHubInterface:
    """The model of a checkpoint, with the dictionaries of the folder ``data``.

    Raises:
        ValueError: the file does not exist or holds no classifier with Flow-Attention.
    """
    if not checkpoint.is_file():
        raise ValueError(f"--checkpoint is {checkpoint}, which is no file; allowed: a checkpoint of fairseq-train")
    if not (data / "data-bin").is_dir():
        raise ValueError(f"--data is {data}, which has no data-bin; allowed: a folder that recipes.lra.listops wrote")
    folder = str(checkpoint.parent.absolute())
    hub = ARCH_MODEL_REGISTRY[MODEL].from_pretrained(folder, checkpoint.name, str((data / "data-bin").absolute()))
    return hub.eval()


@torch.no_grad()
def weigh(hub: RobertaHubInterface, row: Row) -> Weights:
    """The weights of one expression.

    Raises:
        ValueError: the model cannot read it: an unknown symbol, or too many.
    """
    tokens = torch.from_numpy(to_example(row).inputs[0]).long()
    symbols = row.source.split()
    if hub.task.cfg.init_token is not None:
        tokens, symbols = torch.cat([tokens.new_tensor([hub.task.cfg.init_token]), tokens]), [FIRST, *symbols]
    if len(tokens) > hub.task.max_positions():
        raise ValueError(
            f"{row.place} has {len(tokens)} tokens; allowed: {hub.task.max_positions()}, the training's --max-positions"
        )
    with record_attention(hub.model) as records:
        scores, _ = hub.model(tokens[None], classification_head_name=_HEAD)
    competition = [record.competition[0].float() for record in records]  # (heads, T)
    shares = [(layer / layer.mean(1, keepdim=True)).numpy() for layer in competition]
    allocation = [record.allocation[0].float().numpy() for record in records]
    return Weights(symbols, int(row.target), int(scores.argmax()), shares, allocation)


def draw(weights: Weights, path: Path) -> None:
    """Write one picture: the expression for each layer and head, coloured by competition and by allocation."""
    panels = [(layer, head) for layer, of in enumerate(weights.competition) for head in range(len(of))]
    columns, lines = _layout(weights.symbols)
    with plt.rc_context(STYLE):
        size = (3.0 + 0.44 * columns, 0.8 + len(panels) * (0.45 + 0.3 * lines))
        figure, grid = plt.subplots(len(panels), 2, figsize=size, squeeze=False, layout="constrained")
        for column, (kind, maps) in enumerate(
            {"competition": weights.competition, "allocation": weights.allocation}.items()
        ):
            low, high = min(map(np.min, maps)), max(map(np.max, maps))
            for axes, (layer, head) in zip(grid[:, column], panels):
                shown = _draw_symbols(axes, weights.symbols, maps[layer][head], low, high)
                axes.set_title(f"{kind}, layer {layer + 1}, head {head + 1}")
            figure.colorbar(shown, ax=list(grid[:, column]), pad=0.01, aspect=40)
        figure.suptitle(f"value {weights.value}, predicted {weights.predicted}; competition: 1 is an even share")
        save(figure, path, dpi=110)


def _layout(symbols: Sequence[str]) -> tuple[int, int]:
    """Symbols in a line, and lines."""
    columns = min(_LONGEST_LINE, len(symbols))
    return columns, -(-len(symbols) // columns)


def _draw_symbols(axes: plt.Axes, symbols: Sequence[str], values: np.ndarray, low: float, high: float):
    """Symbols in cells, line by line, coloured by ``values`` between ``low`` and ``high``."""
    columns, lines = _layout(symbols)
    cells = np.full(lines * columns, np.nan)
    cells[: len(values)] = values
    shown = axes.imshow(cells.reshape(lines, columns), cmap="viridis", vmin=low, vmax=high, aspect="auto")
    for number, (symbol, value) in enumerate(zip(symbols, values, strict=True)):
        line, place = divmod(number, columns)
        light = high > low and (value - low) / (high - low) > 0.6
        axes.text(
            place,
            line,
            symbol,
            ha="center",
            va="center",
            fontsize=6.5,
            color="black" if light else "white",
            clip_on=True,
        )
    axes.set_axis_off()
    return shown


def read_row(data: Path, example: int) -> Row:
    """Row ``example`` of the test table in ``data``.

    Raises:
        ValueError: there is no such row.
    """
    if example < 0:
        raise ValueError(f"--example is {example}; allowed: at least 0")
    row = next(itertools.islice(read_table(data / "test.tsv"), example, None), None)
    if row is None:
        raise ValueError(f"--example is {example}; allowed: a number below that of the rows of {data / 'test.tsv'}")
    return row


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.lra.pictures", description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FILE", help="of a flowformer_lra_listops")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder that recipes.lra.listops wrote")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--example", type=int, default=0, metavar="N", help="of the test table, from 0 (%(default)s)")
    which.add_argument("--expression", help="an expression in quotes, such as '[MAX 2 9 [MIN 4 7 ] 0 ]'")
    parser.add_argument("--output", type=Path, default=Path("weights.png"), metavar="FILE", help="default: %(default)s")
    return parser


@script("pictures")
def main(arguments: Iterable[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    check_new(options.output, "--output")
    hub = load(options.checkpoint, options.data)
    if options.expression is None:
        row = read_row(options.data, options.example)
    else:
        symbols = options.expression.split()
        row = Row("--expression", " ".join(symbols), str(evaluate(symbols)))
    if len(row.source.split()) > _MOST:
        raise ValueError(f"{row.place} has {len(row.source.split())} symbols; allowed: at most {_MOST}, to be read")
    draw(weigh(hub, row), options.output)
    print(f"Ready: {shown_path(options.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
