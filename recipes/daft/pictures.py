"""Draw the position biases and keys of a DAFT model: ``python -m recipes.daft.pictures --checkpoint FILE``.

The pictures show exp(w) - 1 of every layer and, given an image, the weights of its tokens by their keys, as in
*A Dot Product Attention Free Transformer*.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from common.command_parser import CommandParser
from timm_plugin.named_values import NamedValues

from ..shared.commands import shown_path
from ..shared.scripts import positive_int, script
from ..shared.trained_models import load_model
from ..shared.working_folder import working_folder
from .drawing import draw_biases, draw_key_maps
from .maps import key_maps, position_biases

COMMAND = "recipes.daft.pictures"


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.daft.pictures", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="FILE",
        help="of timm's train.py or of fairseq-train; or a state dict, or safetensors, with --model; or a folder as "
        "timm saves one for its hub",
    )
    parser.add_argument("--image", type=Path, help="draw its keys, too; for models of images and of pixels")
    parser.add_argument("--output", type=Path, default=Path("pictures"), metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--heads", type=positive_int, default=8, help="most heads shown of a layer (%(default)s)")
    parser.add_argument("--model", help="timm's name of the model, where the file does not say it")
    parser.add_argument(
        "--model-kwargs",
        nargs="*",
        default={},
        action=NamedValues,
        metavar="KEY=VALUE",
        help="arguments of the model, as timm's train.py takes them, such as num_classes=10",
    )
    return parser


@script("pictures")
def main(arguments: Iterable[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    with working_folder(options.output, COMMAND, "--output"):
        written = _draw(options)
    print("Ready: " + ", ".join(shown_path(path) for path in written))
    return 0


def _draw(options: argparse.Namespace) -> list[Path]:
    """Write the pictures; returns their paths."""
    loaded = load_model(options.checkpoint, options.model, options.model_kwargs)
    biases = position_biases(loaded.model)
    maps = None if options.image is None else key_maps(loaded, options.image)
    title = type(loaded.model).__name__
    written = [options.output / "position_biases.png"]
    draw_biases(biases, options.heads, title, written[0])
    if maps is not None:
        written.append(options.output / "key_maps.png")
        draw_key_maps(maps, options.heads, title, written[1])
    return written


if __name__ == "__main__":
    sys.exit(main())
