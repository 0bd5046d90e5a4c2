"""``python -m common.huggingface.lm_eval --tasks TASK --model_args pretrained=FOLDER``: lm-evaluation-harness.

Its own command line, with ``--model lineartime`` as the default. fairseq is not needed.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from ..command_parser import CommandParser

PROGRAM = "python -m common.huggingface.lm_eval"


def main(arguments: Sequence[str], program: str = PROGRAM) -> None:
    """Evaluate a model as the command line ``arguments`` says; an error exits with one line.

    ``program`` is the name of the command in messages.
    """
    whole, _ = _parsers(program)
    options = whole.parse_args(["run", "--model", "lineartime", *arguments])

    from lm_eval.utils import setup_logging

    from . import evaluation  # noqa: F401  registers the model

    setup_logging()
    try:
        options.func(options)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{program}: {str(error).splitlines()[0]}") from error


def parser() -> ArgumentParser:
    """The parser of the harness's options."""
    return _parsers(PROGRAM)[1]


def _parsers(program: str) -> tuple[CommandParser, ArgumentParser]:
    """The parser of ``program``, which has the harness's command ``run``, and that of ``run`` alone."""
    whole = CommandParser(prog=program, description=__doc__.split("\n")[0])
    try:
        from lm_eval._cli.run import Run
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"{program}: {error.name} is not installed; allowed: after pip install 'lineartime[evaluation]'"
        ) from error
    commands = whole.add_subparsers(dest="command", metavar="run")
    Run.create(commands)
    return whole, commands.choices["run"]


if __name__ == "__main__":
    main(sys.argv[1:])
