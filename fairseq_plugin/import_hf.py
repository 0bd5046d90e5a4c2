"""``python -m fairseq_plugin.import_hf FOLDER TARGET``: a folder of ``export_hf`` as a checkpoint of fairseq.

The weights are those in the folder, for example after further training with transformers.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from common.command_parser import CommandParser
from common.files.output_files import check_in_folder, new_path
from common.files.tensor_files import save

from .export_hf import check_installed


def main(arguments: Sequence[str]) -> None:
    """Import a model; on an error, exits with one line and writes nothing."""
    parser = CommandParser(prog="python -m fairseq_plugin.import_hf", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of export_hf, also one that transformers has saved since")
    parser.add_argument("target", type=Path, help="new file to write, for any tool of fairseq")
    options = parser.parse_args(arguments)
    with parser.one_line_errors():
        check_installed()
        check_in_folder(options.target, "target")
        with new_path(options.target, "target") as part:
            from .export.huggingface_folder import import_folder  # transformers takes seconds

            state = import_folder(options.folder)
            save(state, part)
    print(f"{options.target}: {len(state['model'])} tensors; fairseq's tools take it with --path, or with")
    print("--finetune-from-model or --restore-file for fairseq-train")


if __name__ == "__main__":
    main(sys.argv[1:])
