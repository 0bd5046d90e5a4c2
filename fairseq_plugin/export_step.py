"""``python -m fairseq_plugin.export_step CHECKPOINT TARGET``: one decoding step of a language model as a graph.

``TARGET.onnx`` runs in onnxruntime, ``TARGET.pt2`` in torch, both without fairseq and without this project. The file
holds what a caller needs: the state's entries, the dictionary and the longest sequence.
"""

import hashlib
import importlib.util
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY
from torch import nn
from torch.export import ExportedProgram
from tqdm import tqdm

from common import __version__
from common.command_parser import CommandParser
from common.files.output_files import check_in_folder, check_new, new_path
from common.files.tensor_files import DIGEST

from .export.decoding_step import DecodingStep, export_program
from .loading.checkpoints import UNWRAPPED, read_training
from .loading.folders import find_folder
from .models._language_model import LinearTimeLanguageModel

#: The name of the metadata in a file, and their format version.
METADATA, VERSION = "lineartime", 1
#: The placeholder for the digest in an ONNX file while the digest is computed.
_NO_DIGEST = "0" * 64
_ONNX, _PROGRAM = ".onnx", ".pt2"
_PACKAGES = ("onnx", "onnxscript")
#: Loggers whose debug messages appear because one of fairseq's models configures logging for all libraries.
_TALKATIVE = ("onnx_ir", "onnxscript")


def load(checkpoint: Path, data: str | None = None) -> tuple[str, nn.Module, Dictionary, bool]:
    """Load the language model of ``checkpoint``: architecture, model, dictionary, and whether bos begins a text.

    ``data`` is the folder with ``dict.txt``; default: the folder of the checkpoint.

    Raises:
        ValueError: the file cannot be read, would run code, holds another kind of model, or has no dictionary.
    """
    _, architecture = read_training(checkpoint)
    model = ARCH_MODEL_REGISTRY.get(architecture)
    if model is None or not issubclass(model, LinearTimeLanguageModel):
        raise ValueError(
            f"the checkpoint {str(checkpoint)!r} is of --arch {architecture}; allowed: language models of this plugin "
            "(python -m fairseq_plugin.convert makes one of 'transformer_lm')"
        )
    folder = Path(find_folder("--data", str(checkpoint.parent) if data is None else data))
    if not (folder / "dict.txt").is_file():
        raise ValueError(
            f"{folder} has no dict.txt; allowed: --data with the folder of fairseq-preprocess, or dict.txt beside the "
            "checkpoint"
        )
    loaded = model.from_pretrained(str(checkpoint.parent), checkpoint.name, str(folder.absolute()), **UNWRAPPED)
    begins_with_bos = bool(getattr(loaded.task.args, "add_bos_token", False))
    return architecture, loaded.models[0], loaded.task.source_dictionary, begins_with_bos


def metadata_of(
    architecture: str, step: DecodingStep, dictionary: Dictionary, begins_with_bos: bool, tokens: int
) -> dict[str, Any]:
    """The metadata that a caller of the graph needs, as values for JSON."""
    return {
        "version": VERSION,
        "made_by": f"lineartime {__version__}",
        DIGEST: _NO_DIGEST,
        "architecture": architecture,
        "tokens_per_call": tokens,
        "longest_sequence": step.max_tokens,
        "state": [
            {**entry._asdict(), "dtype": str(entry.dtype).removeprefix("torch."), "shape": list(entry.shape)}
            for entry in step.entries
        ],
        "begins_with": dictionary.bos() if begins_with_bos else dictionary.eos(),
        **{name: getattr(dictionary, name)() for name in ("bos", "pad", "eos", "unk")},
        "symbols": dictionary.symbols,
    }


def write(program: ExportedProgram, step: DecodingStep, metadata: dict[str, Any], path: Path, suffix: str) -> None:
    """Write ``program`` to ``path`` in the format of ``suffix``; ONNX inputs and outputs are named like the state."""
    if suffix == _PROGRAM:  # a zip file, which has checksums
        content = json.dumps({name: x for name, x in metadata.items() if name != DIGEST}, ensure_ascii=False)
        with open(path, "wb") as file:
            torch.export.save(program, file, extra_files={f"{METADATA}.json": content})
        return
    content = json.dumps(metadata, ensure_ascii=False)
    if not hasattr(torch.compiler, "is_exporting"):
        raise ValueError(
            f"torch is {torch.__version__}, whose ONNX graphs are for one number of rows; allowed: newer than 2.6, or "
            f"a target that ends in {_PROGRAM}"
        )
    names = [entry.name for entry in step.entries]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and onnxscript use features that they deprecated
        onnx = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            input_names=["tokens", "order", *(f"past.{name}" for name in names)],
            output_names=["logits", *(f"present.{name}" for name in names)],
        )
    for node in onnx.model.graph.all_nodes():
        node.metadata_props.clear()  # paths of source code on this machine
    onnx.model.metadata_props[METADATA] = content
    onnx.save(str(path), external_data=False)
    whole = path.read_bytes()  # the digest is computed with zeros in its place
    path.write_bytes(whole.replace(_NO_DIGEST.encode(), hashlib.sha256(whole).hexdigest().encode()))


def prompt_path(target: Path) -> Path:
    """The path of the graph that reads prompts, next to ``target``."""
    return target.with_suffix(f".prompt{target.suffix}")


def export(checkpoint: Path, target: Path, data: str | None = None, prompt_tokens: int | None = None) -> list[Path]:
    """Write the step of ``checkpoint`` to the new file ``target``; returns the paths of the written files.

    With ``prompt_tokens``, a graph that reads this many tokens per call is written next to it.

    Raises:
        ValueError: ``target`` exists or has another suffix; see also ``load`` and ``DecodingStep``.
    """
    check_new(target, "target")
    if target.suffix not in (_ONNX, _PROGRAM):
        raise ValueError(f"target is {str(target)!r}; allowed: a file that ends in {_ONNX} or {_PROGRAM}")
    check_in_folder(target, "target")
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if target.suffix == _ONNX and missing:
        raise ValueError(
            f"target is {str(target)!r}, for which {' and '.join(missing)} must be installed (pip install)"
        )
    if prompt_tokens is not None and prompt_tokens < 2:
        raise ValueError(f"--prompt-tokens is {prompt_tokens}; allowed: at least 2")
    sizes = {target: 1} if prompt_tokens is None else {target: 1, prompt_path(target): prompt_tokens}
    for path in sizes:
        check_new(path, "target")
    with ExitStack() as written:  # both or none
        bar = written.enter_context(tqdm(total=1 + 2 * len(sizes), unit="", leave=False, disable=None))
        bar.set_description("read the checkpoint")
        architecture, model, dictionary, begins_with_bos = load(checkpoint, data)
        step = DecodingStep(model)
        for path, tokens in sizes.items():
            part = written.enter_context(new_path(path, "target"))
            described = metadata_of(architecture, step, dictionary, begins_with_bos, tokens)
            _next(bar, f"trace {path.name}")
            program = export_program(step, tokens)
            _next(bar, f"write {path.name}")
            write(program, step, described, part, target.suffix)
    return list(sizes)


def _next(bar: tqdm, what: str) -> None:
    """Advance the progress bar by one step; ``what`` describes the next one."""
    bar.update()
    bar.set_description(what)


def main(arguments: Sequence[str]) -> None:
    """Export a step; on an error, exits with one line and writes nothing."""
    parser = CommandParser(prog="python -m fairseq_plugin.export_step", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="of a language model whose decoding state is constant")
    parser.add_argument("target", type=Path, help="new file to write: .onnx, or .pt2 for torch.export.load")
    parser.add_argument("--data", help="folder with dict.txt, as of fairseq-preprocess; default: the checkpoint's")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        metavar="C",
        help="write a graph that reads C tokens at once, too: NAME.prompt.onnx",
    )
    options = parser.parse_args(arguments)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    with parser.one_line_errors():
        written = export(options.checkpoint, options.target, options.data, options.prompt_tokens)
    for path in written:
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
