"""Draw Flow-Attention's weights of a ListOps expression: ``python -m recipes.lra.pictures --checkpoint FILE``.

The picture shows every layer and head of a trained ``flowformer_lra_listops``. Competition is the share of a symbol
among the sources; allocation is how much of its aggregated input a symbol accepts as a sink (*Flowformer*, Figures 4, 5
and 7 to 9).
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
from common.files.output_files import check_new

from ..shared.commands import shown_path
from ..shared.plots import STYLE, save
from ..shared.scripts import script
from .listops import to_example
from .listops_rules import evaluate
from .tables import Row, read_table

MODEL = "flowformer_classifier"
#: The label of the first token, which represents the whole sequence.
FIRST = "CLS"
_HEAD = "sentence_classification_head"
#: Maximum numbers of symbols in a line of a picture, and in an expression.
_LONGEST_LINE, _MOST = 32, 320


class Weights(NamedTuple):
    """One expression, and the weights of its symbols in each layer."""

    symbols: list[str]  # T symbols, starting with the first token
    value: int
    predicted: int
    competition: list[np.ndarray]  # per layer, (heads, T), divided by its mean: 1 is an even share
    allocation: list[np.ndarray]  # per layer, (heads, T)


def load(checkpoint: Path, data: Path) -> RobertaHubInterface:
    """Load the model of a checkpoint, with the dictionaries in the folder ``data``.

    Raises:
        ValueError: the file does not exist or does not contain a classifier with Flow-Attention.
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
    """Run the model on one expression and record the weights.

    Raises:
        ValueError: the expression has an unknown symbol, or too many symbols for the model.
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
    """Write a picture with the expression for each layer and head, coloured by competition and by allocation."""
    panels = [
        (layer, head) for layer, layer_weights in enumerate(weights.competition) for head in range(len(layer_weights))
    ]
    columns, lines = _layout(weights.symbols)
    with plt.rc_context(STYLE):
        size = (3.0 + 0.44 * columns, 0.8 + len(panels) * (0.45 + 0.3 * lines))
        figure, grid = plt.subplots(len(panels), 2, figsize=size, squeeze=False, layout="constrained")
        for column, (kind, maps) in enumerate(
            {"competition": weights.competition, "allocation": weights.allocation}.items()
        ):
            low, high = min(map(np.min, maps)), max(map(np.max, maps))
            for axes, (layer, head) in zip(grid[:, column], panels):
                mappable = _draw_symbols(axes, weights.symbols, maps[layer][head], low, high)
                axes.set_title(f"{kind}, layer {layer + 1}, head {head + 1}")
            figure.colorbar(mappable, ax=list(grid[:, column]), pad=0.01, aspect=40)
        figure.suptitle(f"value {weights.value}, predicted {weights.predicted}; competition: 1 is an even share")
        save(figure, path, dpi=110)


def _layout(symbols: Sequence[str]) -> tuple[int, int]:
    """Number of symbols in a line, and number of lines."""
    columns = min(_LONGEST_LINE, len(symbols))
    return columns, -(-len(symbols) // columns)


def _draw_symbols(axes: plt.Axes, symbols: Sequence[str], values: np.ndarray, low: float, high: float):
    """Draw symbols in cells, line by line, coloured by ``values`` between ``low`` and ``high``."""
    columns, lines = _layout(symbols)
    cells = np.full(lines * columns, np.nan)
    cells[: len(values)] = values
    mappable = axes.imshow(cells.reshape(lines, columns), cmap="viridis", vmin=low, vmax=high, aspect="auto")
    for number, (symbol, value) in enumerate(zip(symbols, values, strict=True)):
        line, column = divmod(number, columns)
        is_light = high > low and (value - low) / (high - low) > 0.6
        axes.text(
            column,
            line,
            symbol,
            ha="center",
            va="center",
            fontsize=6.5,
            color="black" if is_light else "white",
            clip_on=True,
        )
    axes.set_axis_off()
    return mappable


def read_row(data: Path, example: int) -> Row:
    """Row ``example`` of the test table in ``data``, from 0.

    Raises:
        ValueError: the table has no such row.
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
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--example", type=int, default=0, metavar="N", help="of the test table, from 0 (%(default)s)")
    choice.add_argument("--expression", help="an expression in quotes, such as '[MAX 2 9 [MIN 4 7 ] 0 ]'")
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
