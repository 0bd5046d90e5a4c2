"""Inner widths that give models the same number of parameters: ``python -m recipes.flash.widths --help``."""

import json
import sys
from pathlib import Path

from fairseq import tasks
from torch import nn
from tqdm import tqdm

from common.command_parser import CommandParser

from ..shared.fairseq_models import model_options
from ..shared.indexed_files import check_dictionary
from ..shared.scripts import positive_int, script
from .models import ALL_MODELS, SHAPE, Shape, masked_name

#: All models get about as many parameters as this one with its default inner width.
REFERENCE = "transformer_pp_lm"
#: Largest relative difference from the reference's number of parameters.
TOLERANCE = 0.02
#: Inner widths are multiples of the width divided by this.
_STEPS = 16


def build(data: Path, arguments: list[str], length: int, masked: bool = False) -> nn.Module:
    """The model, ``masked`` or causal, that fairseq-train would build with ``arguments``."""
    fixed = [
        str(data),
        "--user-dir",
        "fairseq_plugin",
        "--task",
        "masked_lm" if masked else "language_modeling",
        "--tokens-per-sample",
        str(length),
    ]
    options = model_options([*fixed, *arguments])
    return tasks.setup_task(options).build_model(options)


def count_parameters(data: Path, arguments: list[str], length: int, masked: bool = False) -> int:
    """Parameters of that model."""
    return sum(parameter.numel() for parameter in build(data, arguments, length, masked).parameters())


def equal_widths(data: Path, models: list[str], length: int, shape: Shape = SHAPE) -> dict[str, int]:
    """Model -> the inner width that gives it about the reference's number of parameters; all causal or all masked.

    Raises:
        ValueError: no width comes within the tolerance.
    """
    masked = ALL_MODELS[models[0]].masked
    reference = masked_name(REFERENCE) if masked else REFERENCE
    target = count_parameters(data, shape.arguments(reference, None), length, masked)
    widths, step = {}, max(1, shape.width // _STEPS)
    for name in tqdm(models, desc="widths", unit=" models", leave=False, disable=None):

        def count(width: int, name: str = name) -> int:
            return count_parameters(data, shape.arguments(name, width), length, masked)

        # Parameters grow evenly with the inner width.
        low, high = step, 2 * shape.width
        slope = (count(high) - count(low)) / (high - low)
        width = round((low + (target - count(low)) / slope) / step) * step
        widths[name] = max(width, step)
        parameters = count(widths[name])
        if abs(parameters - target) > TOLERANCE * target:
            raise ValueError(
                f"{name} has {parameters:,} parameters at the nearest inner width, {widths[name]};"
                f" allowed: within {TOLERANCE:.0%} of the {target:,} of {reference}"
            )
    return widths


@script("widths")
def main(arguments: list[str] | None = None) -> int:
    """Print model -> width as JSON; returns the exit status."""
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="a data-bin folder; its dictionary alone is used")
    parser.add_argument("--archs", nargs="+", choices=ALL_MODELS, required=True, help="all causal, or all masked")
    parser.add_argument("--length", type=positive_int, default=512, help="tokens in a sequence (%(default)s)")
    for name, value in SHAPE._asdict().items():
        parser.add_argument(f"--{name}", type=positive_int, default=value, help="of every model (%(default)s)")
    chosen = parser.parse_args(arguments)
    if len({ALL_MODELS[name].masked for name in chosen.archs}) > 1:
        raise ValueError(f"--archs is {' '.join(chosen.archs)}; allowed: causal models alone, or masked ones alone")
    check_dictionary(chosen.data, "DATA")
    shape = Shape(chosen.width, chosen.layers, chosen.heads)
    print(json.dumps(equal_widths(chosen.data, chosen.archs, chosen.length, shape)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
