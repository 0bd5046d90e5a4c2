"""``python -m fairseq_plugin.from_safetensors SOURCE FOLDER``: a checkpoint for every command of fairseq.

``SOURCE`` is a folder of ``python -m fairseq_plugin.to_safetensors``, or the name of a trained model that is part of
this package. ``FOLDER`` gets ``model.pt`` and ``dict.txt``, and so is also the folder of data for fairseq-interactive.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from common.command_parser import CommandParser
from common.files.output_files import new_path

from .loading.safetensors_folder import CHECKPOINT, packaged_models, write_checkpoint


def main(arguments: Sequence[str]) -> None:
    """Write a checkpoint; on an error, exits with one line and writes nothing."""
    parser = CommandParser(prog="python -m fairseq_plugin.from_safetensors", description=__doc__.split("\n")[0])
    parser.add_argument("source", help="name of a model that is part of the package, or a folder of to_safetensors")
    parser.add_argument("target", type=Path, help="new folder to write")
    options = parser.parse_args(arguments)
    packaged = packaged_models()
    folder = Path(packaged.get(options.source, options.source))
    with parser.one_line_errors():
        with new_path(options.target, "target") as new:
            if not folder.is_dir():
                names = ", ".join(packaged)
                raise ValueError(f"source is {options.source!r}; allowed: {names}, or a folder of to_safetensors")
            new.mkdir()
            write_checkpoint(folder, new)
    print(f"{options.target / CHECKPOINT}: for --path of fairseq's commands, with --user-dir")


if __name__ == "__main__":
    main(sys.argv[1:])
