"""``python -m fairseq_plugin`` prints this folder, for ``fairseq-train --user-dir $(python -m fairseq_plugin)``.

``--options ARCH`` prints the options of an architecture, which ``fairseq-train --help`` does not show.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.tasks.language_modeling import LanguageModelingConfig

from common.command_parser import CommandParser

from .loading.known_options import check_names


def options_of(architecture: str) -> argparse.ArgumentParser:
    """The options of an architecture of fairseq or of this plugin, with their defaults.

    Raises:
        ValueError: there is no such architecture.
    """
    check_names("--options", [architecture], set(ARCH_MODEL_REGISTRY), {"architectures, such as flowformer_lm"})
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        add_help=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    ARCH_MODEL_REGISTRY[architecture].add_args(parser)
    config = MODEL_DATACLASS_REGISTRY.get(architecture)
    task = argparse.Namespace(**vars(LanguageModelingConfig()))  # language models also read options of their task
    defaults = parser.parse_args([], task)
    ARCH_CONFIG_REGISTRY[architecture](defaults)
    parser.set_defaults(**({} if config is None else vars(config())) | vars(defaults))
    return parser


def main(arguments: Sequence[str]) -> None:
    """Print the folder of the plugin, or the options of an architecture; exits with one line for an unknown one."""
    parser = CommandParser(prog="python -m fairseq_plugin", description=__doc__.split("\n")[0])
    parser.add_argument("--options", metavar="ARCH", help="print the options of an architecture, and their defaults")
    options = parser.parse_args(arguments)
    if options.options is None:
        print(Path(__file__).resolve().parent)
        return
    with parser.one_line_errors():
        print(options_of(options.options).format_help(), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
