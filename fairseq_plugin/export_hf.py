"""``python -m fairseq_plugin.export_hf CHECKPOINT TARGET``: a model of fairseq as a folder for transformers.

The folder holds configuration, weights, tokenizer and a model card; transformers loads it without fairseq.
"""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from common._installed import install_command
from common.attention import VARIABLE
from common.command_parser import CommandParser
from common.files.output_files import check_in_folder

from .export.huggingface_options import FILES, KINDS

#: The command-line options for arguments of the functions.
_TYPED = {"bpe": "--bpe", **{name: f"--{name.replace('_', '-')}" for name in FILES}}
_PACKAGES = ("transformers", "tokenizers", "safetensors")


def check_installed() -> None:
    """Raise ValueError unless the packages of the extra "huggingface" are installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} must be installed: {install_command('huggingface')}")


def main(arguments: Sequence[str]) -> None:
    """Export a model; on an error, exits with one line and writes nothing."""
    parser = CommandParser(prog="python -m fairseq_plugin.export_hf", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="of NAME_lm, NAME_mlm, NAME_classifier or an encoder-decoder")
    parser.add_argument("target", type=Path, help="new or empty folder to write")
    parser.add_argument(
        "--data", type=Path, help="folder with the dictionaries, as of fairseq-preprocess; default: the checkpoint's"
    )
    parser.add_argument(
        "--bpe",
        choices=tuple(KINDS),
        default="words",
        help="what a text becomes before the dictionary: words between whitespace; split, subwords between whitespace, "
        "encoded by the user; characters or bytes, as this project's recipes write them; sentencepiece; gpt2 "
        "(%(default)s)",
    )
    parser.add_argument("--sentencepiece-model", type=Path, help="with --bpe sentencepiece: its model")
    parser.add_argument("--gpt2-encoder-json", type=Path, help="with --bpe gpt2: its encoder.json")
    parser.add_argument("--gpt2-vocab-bpe", type=Path, help="with --bpe gpt2: its vocab.bpe")
    options = parser.parse_args(arguments)
    files = {name: getattr(options, name) for name in FILES if getattr(options, name) is not None}
    with parser.one_line_errors(names=_TYPED):
        check_installed()
        from .export.huggingface_card import files_of_own
        from .export.huggingface_folder import export_folder  # transformers takes seconds

        check_in_folder(options.target, "target", "folder")
        source, config = export_folder(options.checkpoint, options.target, options.data, options.bpe, files)
    own = "".join(f"; {x} is carried along, and is to be named in {VARIABLE}" for x in files_of_own(config).values())
    print(f"{options.target}: {source.architecture} as {config.architectures[0]}, tokens by {options.bpe}{own}")


if __name__ == "__main__":
    main(sys.argv[1:])
