"""``python -m fairseq_plugin.convert SOURCE TARGET``: weights of a stock Transformer as a start for one of our models.

``transformer_lm`` starts a language model, ``roberta`` a masked model, ``transformer`` an encoder-decoder,
``wav2vec2``, ``hubert`` and ``data2vec_audio`` a model of audio, ``s2t_transformer`` and ``s2t_conformer`` one from
speech to text. The folder of Hugging Face's GPT-2 starts a language model, and that of BERT or RoBERTa a masked model;
beside TARGET, fairseq's dictionary is then written.

Also converts the authors' released language model, whose architecture name is ``transformer_lm``, so that every tool of
fairseq loads it. The weights are copied, and other parameters of the new attention are added with their initial values.
The converted model computes something else until it is trained.
"""

import argparse
import ast
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.checkpoint_utils import load_checkpoint_to_cpu
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY, build_model
from omegaconf import OmegaConf

from common.checkpoints import LoadReport
from common.command_parser import CommandParser
from common.files.output_files import check_in_folder, new_path
from common.files.tensor_files import save
from common.modules.stored_options import is_extra_state, read_extra_state
from common.ops.shared.checks import ArgumentError

from .loading.checkpoint_config import EMBEDDING_FILES
from .loading.checkpoints import (
    HOW_TO_TRANSFER,
    CheckedLoading,
    load_report,
    read_training,
    registered_names,
    stock_name,
    stock_overrides,
)
from .loading.configuration_errors import configuration_errors
from .loading.huggingface import ForeignModel, read_foreign_model
from .loading.known_options import check_names, model_options
from .loading.new_checkpoint import new_checkpoint, new_configuration, numbered_dictionary
from .models._configuration import read_stock
from .modules.converted import converted_attentions

#: The command-line options for arguments of ``convert``.
_TYPED = {"arch": "--arch", "model_overrides": "--model-overrides"}
#: The prefix of a masked model's embeddings, in current and in fairseq's first versions.
_OF_ROBERTA = r"(en|de)coder\.sentence_encoder"
#: The seed for the new attention's parameters.
_SEED = 1
#: Entries that are only needed to resume the training of the original model.
_LEFT_OUT = ("last_optimizer_state",)


def convert(source: Path, arch: str, overrides: dict[str, Any] | None = None) -> tuple[dict[str, Any], LoadReport]:
    """Convert the checkpoint ``source`` of a stock Transformer to ``arch``; returns it and a ``LoadReport``.

    ``overrides`` are options of the model. The model is built once, to check that the weights fit.

    Raises:
        ValueError: the file cannot be read or holds another architecture; ``arch`` has other weights; an option does
            not exist, or the weights do not fit with it.
    """
    target = _target(arch)
    state, stored = read_training(source)
    if ARCH_MODEL_REGISTRY.get(stored) is not target.stock_model:
        allowed = f"{stock_name(target)!r} and its sizes"
        raise ArgumentError(f"the checkpoint {str(source)!r} holds {stored!r}; allowed with `arch` {arch}: {allowed}")
    options = {**dict.fromkeys(EMBEDDING_FILES), **_checked_options(overrides or {}, target)}
    with configuration_errors(str(source), overrides):
        all_overrides = stock_overrides(state, target, options)
        # Loaded again by fairseq, which upgrades all of its formats.
        state = load_checkpoint_to_cpu(str(source), all_overrides)
        name = registered_names(target)[0]
        if isinstance(state["cfg"].model, argparse.Namespace):
            state["cfg"].model._name = name  # overrides would also set the task's name
        elif state["cfg"].model.get("_name") == stored:  # from fairseq-hydra-train; overrides cannot add new keys
            stored_options = read_stock(name, OmegaConf.to_container(state["cfg"].model))
            overriding = {key: value for key, value in all_overrides.items() if key != "arch"}
            state["cfg"].model = {"_name": name, **stored_options, **overriding}
        transfer, added = _check_fit(state["cfg"].model, state["model"], state["cfg"].task)
    state["model"].update(added)
    left_out = [name for name in _LEFT_OUT if name in state]
    converted = {name: value for name, value in state.items() if name not in (*left_out, "args")}
    converted["cfg"] = OmegaConf.to_container(state["cfg"], resolve=False, enum_to_str=True)
    return {"args": None, **converted}, transfer._replace(left_out=[*transfer.left_out, *left_out])


def convert_foreign(
    foreign: ForeignModel, source: str, arch: str, overrides: dict[str, Any] | None = None
) -> tuple[dict[str, Any], LoadReport]:
    """Convert the model ``foreign``, read from the folder ``source``, to ``arch``, as ``convert`` does with a file.

    A head that the folder lacks is new: it has its initial values.

    Raises:
        ValueError: see ``convert``.
    """
    target = _target(arch)
    if stock_name(target) != foreign.stock:
        raise ArgumentError(
            f"the folder {source!r} holds a model like fairseq's {foreign.stock!r}; allowed with `arch` {arch}: one "
            f"like {stock_name(target)!r}"
        )
    options = _checked_options(overrides or {}, target)
    with configuration_errors(source, overrides):
        config = new_configuration(foreign.command(registered_names(target)[0]), options)
        transfer, added = _check_fit(config.model, foreign.weights, config.task, foreign.may_be_new)
    checkpoint = new_checkpoint(config, {**foreign.weights, **added})
    return checkpoint, transfer._replace(left_out=[*transfer.left_out, *foreign.left_out])


def _target(arch: str) -> type:
    """The model of the architecture ``arch``; ValueError unless it takes the weights of a stock Transformer."""
    target = ARCH_MODEL_REGISTRY.get(arch)
    if target is None or not issubclass(target, CheckedLoading) or target.stock_model is None:
        fitting = sorted(name for name, model in MODEL_REGISTRY.items() if getattr(model, "stock_model", None))
        raise ArgumentError(f"`arch` is {arch!r}; allowed: {', '.join(fitting)}, and their sizes")
    return target


def _checked_options(overrides: dict[str, Any], target: type) -> dict[str, Any]:
    if not isinstance(overrides, dict):
        raise ArgumentError(f"`model_overrides` is {overrides!r}; allowed: a dictionary as Python writes it")
    valid = model_options(target)
    check_names("model_overrides", overrides, valid, valid)
    return overrides


def _check_fit(
    config: Any, weights: dict[str, torch.Tensor], task_config: Any, may_be_new: str = ""
) -> tuple[LoadReport, dict[str, torch.Tensor]]:
    """Build the model for ``weights``; returns which of them it loads, and the tensors to add to them.

    ``config`` and ``task_config`` are the stored options of model and task.

    The added tensors are the new attention's own parameters, from a fixed seed, and the records of options; also what
    ``weights`` lack of the tensors with the prefix ``may_be_new``, if there is one.

    Raises:
        ValueError: ``weights`` do not fit.
    """
    target = numbered_dictionary(_vocabulary_size(weights, "decoder") or _vocabulary_size(weights, _OF_ROBERTA))
    source = numbered_dictionary(_vocabulary_size(weights, "encoder") or len(target))
    units = weights.get("label_embs_concat")  # of HuBERT's targets
    dictionaries = [None if units is None else numbered_dictionary(len(units))]
    task = SimpleNamespace(
        source_dictionary=source, target_dictionary=target, dictionaries=dictionaries, cfg=task_config
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = build_model(copy(config), task, from_checkpoint=True)
    model_state, inner = model.state_dict(), tuple(f"{name}.inner." for name in converted_attentions(model))
    added = {name: x for name, x in model_state.items() if name.startswith(inner) and not is_extra_state(name)}
    keep = [x for x in ("decoder_layers_to_keep", "encoder_layers_to_keep") if getattr(config, x, None)]
    if added and keep:
        raise ArgumentError(
            f"`model_overrides` or the checkpoint has {keep[0]}; allowed with an attention that has parameters of its "
            "own: not given, since layers are numbered anew"
        )
    if may_be_new:
        names = [name for name in model_state if name.startswith(may_be_new) and name not in weights]
        added |= {name: model_state[name] for name in names}
    transfer = load_report(weights, model.fitted_state_dict({**weights, **added}, copy(config)), model)
    return transfer, {**added, **{name: record for name, record in model_state.items() if is_extra_state(name)}}


def _vocabulary_size(weights: dict[str, torch.Tensor], side: str) -> int:
    """The number of symbols that the encoder or the decoder embeds, 0 if there is no such side."""
    # One table, or with adaptive inputs one per frequency band, each followed by a projection.
    table = rf"{side}\.embed_tokens\.(embeddings\.\d+\.0\.)?weight"
    tables = [x for name, x in weights.items() if re.fullmatch(table, name)]
    if not tables:  # character embeddings
        tables = [weights[name] for name in (f"{side}.output_projection.weight",) if name in weights]
    return sum(len(table) for table in tables)


def main(arguments: Sequence[str]) -> None:
    """Convert a file or a folder; on an error, exits with one line and writes nothing."""
    parser = CommandParser(prog="python -m fairseq_plugin.convert", description=__doc__.split("\n")[0])
    parser.add_argument(
        "source",
        type=Path,
        help="checkpoint of transformer_lm, roberta, transformer, wav2vec2, hubert, data2vec_audio or s2t_..., or the "
        "folder of Hugging Face's GPT-2, BERT or RoBERTa",
    )
    parser.add_argument(
        "target", type=Path, help="new file to write, for any tool of fairseq; of a folder, dict.txt is written beside"
    )
    parser.add_argument(
        "--arch", default="flowformer_lm", help="as hedgehog_lm, flowformer_mlm or hybrid (%(default)s)"
    )
    parser.add_argument("--model-overrides", default="{}", help="options of the model, as in fairseq-eval-lm")
    options = parser.parse_args(arguments)
    with parser.one_line_errors(names=_TYPED):
        check_in_folder(options.target, "target")
        overrides = _literal(options.model_overrides)
        write = _write_foreign if options.source.is_dir() else _write
        lines = write(options.source, options.target, options.arch, overrides)
    print(*lines, sep="\n")


def _write(source: Path, target: Path, arch: str, overrides: Any) -> list[str]:
    """Convert the checkpoint ``source`` to the file ``target``; returns lines about it."""
    with new_path(target, "target") as part:
        converted, transfer = convert(source, arch, overrides)
        save(converted, part)
    return _lines(target, arch, converted, transfer)


def _write_foreign(source: Path, target: Path, arch: str, overrides: Any) -> list[str]:
    """Convert the folder ``source`` to the file ``target`` and the files beside it; returns lines about them."""
    with ExitStack() as stack:
        part = stack.enter_context(new_path(target, "target"))
        foreign = read_foreign_model(source)
        files = {target.with_name(name): content for name, content in foreign.files().items()}
        new = [path for path in files if not _is_there(path, files[path])]
        converted, transfer = convert_foreign(foreign, str(source), arch, overrides)
        save(converted, part)
        for path in new:
            new_file = stack.enter_context(new_path(path, f"{path.name} beside target"))
            new_file.write_text(files[path], encoding="utf-8", newline="\n")
    return [
        *_lines(target, arch, converted, transfer),
        f"beside it: {', '.join(path.name for path in files)}; its options for fairseq-train: "
        f"{shlex.join(foreign.options)}",
    ]


def _is_there(path: Path, content: str) -> bool:
    """Whether the file ``path`` exists; ValueError if its content is another one."""
    if path.is_file() and path.read_bytes() != content.encode():
        raise ValueError(
            f"{path} is there already, of another vocabulary; allowed: a target in another folder, for the dictionary "
            "of the model"
        )
    return path.is_file()


def _lines(target: Path, arch: str, converted: dict[str, Any], transfer: LoadReport) -> list[str]:
    lines = [f"{target}: {arch}; {transfer.summary()}"]
    if _is_another_model(converted["model"]):
        lines.append(f"its attention is another function of these weights; {HOW_TO_TRANSFER}")
    return lines


def _is_another_model(weights: dict[str, torch.Tensor]) -> bool:
    """Whether ``weights`` have a record of an attention other than softmax attention."""
    records = [read_extra_state(record) for name, record in weights.items() if is_extra_state(name)]
    return any(record["options"].get("attention", "softmax") != "softmax" for record in records if record is not None)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError) as error:
        raise ArgumentError(f"`model_overrides` is {text!r}; allowed: a dictionary as Python writes it") from error


if __name__ == "__main__":
    main(sys.argv[1:])
