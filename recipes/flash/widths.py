"""Inner widths with which models have equally many parameters: ``python -m recipes.flash.widths --help``."""

import argparse
import json
import sys
from pathlib import Path

from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from ..shared.scripts import script
from .models import MODELS, SHAPE

#: The others get as many parameters as this architecture has with its default inner width.
REFERENCE = "transformer_pp_lm"
#: Largest relative difference from the reference's number of parameters.
TOLERANCE = 0.02
_WIDTH_STEP = 8


def count_parameters(data: Path, arguments: list[str], length: int) -> int:
    """Parameters of the model that fairseq-train would build with ``arguments``."""
    fixed = [
        str(data),
        "--user-dir",
        "fairseq_plugin",
        "--task",
        "language_modeling",
        "--tokens-per-sample",
        str(length),
    ]
    parsed = options.parse_args_and_arch(options.get_training_parser(), [*fixed, *arguments])
    config = convert_namespace_to_omegaconf(parsed)
    model = tasks.setup_task(config.task).build_model(config.model)
    return sum(parameter.numel() for parameter in model.parameters())


def equal_widths(data: Path, architectures: list[str], length: int) -> dict[str, int]:
    """Architecture -> the inner width with which it has about as many parameters as the reference.

    Raises:
        ValueError: no width comes within the tolerance.
    """
    target = count_parameters(data, SHAPE.arguments(REFERENCE, None), length)
    widths = {}
    for architecture in architectures:

        def count(width: int, architecture: str = architecture) -> int:
            return count_parameters(data, SHAPE.arguments(architecture, width), length)

        # Parameters grow evenly with the inner width.
        low, high = _WIDTH_STEP, 2 * SHAPE.width
        slope = (count(high) - count(low)) / (high - low)
        width = round((low + (target - count(low)) / slope) / _WIDTH_STEP) * _WIDTH_STEP
        widths[architecture] = max(width, _WIDTH_STEP)
        parameters = count(widths[architecture])
        if abs(parameters - target) > TOLERANCE * target:
            raise ValueError(
                f"{architecture} has {parameters:,} parameters at the nearest inner width, {widths[architecture]};"
                f" allowed: within {TOLERANCE:.0%} of the {target:,} of {REFERENCE}"
            )
    return widths


@script("widths")
def main(arguments: list[str] | None = None) -> int:
    """Print architecture -> width as JSON; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="a data-bin folder; its dictionary alone is used")
    parser.add_argument("--archs", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--length", type=int, default=512, help="tokens in a sequence (%(default)s)")
    chosen = parser.parse_args(arguments)
    print(json.dumps(equal_widths(chosen.data, chosen.archs, chosen.length)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
