"""Models of fairseq as fairseq-train builds them, without a training."""

import argparse
from collections.abc import Iterable

from fairseq import options
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY


def parsed_options(command: Iterable[object]) -> argparse.Namespace:
    """Parse arguments of fairseq-train; the architecture sets its options, other defaults of the model are missing.

    Raises:
        SystemExit: fairseq does not accept an option; it has printed why.
    """
    return options.parse_args_and_arch(options.get_training_parser(), [str(word) for word in command])


def model_options(command: Iterable[object]) -> argparse.Namespace:
    """The options from which ``fairseq-train COMMAND`` builds its task and its model.

    fairseq-train fills in the model's defaults with hydra, which takes many times as long and gives the same values.

    Raises:
        SystemExit: fairseq does not accept an option; it has printed why.
    """
    parsed = parsed_options(command)
    declared = MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY[parsed.arch])
    return parsed if declared is None else argparse.Namespace(**{**vars(declared()), **vars(parsed)})
