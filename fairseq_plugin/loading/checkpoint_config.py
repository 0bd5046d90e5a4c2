"""Checks that the configuration in a checkpoint is only data: no text that fairseq would run, resolve or open.

fairseq stores the options of a training in its checkpoints, and reads them to build task and model. It evaluates some
texts as Python, resolves interpolations, even of environment variables, and opens files and addresses. The check does
not depend on which options it evaluates: no text may be code, whatever the name of its option.
"""

import ast
import json
import os
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

import numpy as np
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer.transformer_config import DecoderConfig, EncDecBaseConfig
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY
from fairseq.utils import safe_getattr
from hydra.errors import HydraException
from omegaconf import OmegaConf, ValueNode
from omegaconf.errors import OmegaConfBaseException

from common.ops.shared.checks import ArgumentError

from .known_options import ConfigurationError, model_options

#: Words, numbers, paths and symbols such as </s>. Such an expression calls nothing, since it has no brackets and no
#: quotes, for which Python allows no other characters of Unicode. Products, powers and shifts are excluded, since they
#: could use up all memory.
_WORDS = re.compile(r"(?!.*(?:<<|>>))[\w ?.,:;/@+=~|%#!&^<>$`\\\x80-\U0010ffff-]*")
#: Options of pretrained embeddings, which are not needed if weights are loaded.
EMBEDDING_FILES = ("encoder_embed_path", "decoder_embed_path")
#: Options of tasks and of generation that name a file even if their value has no separator, and options of
#: fairseq's tokenizers that do not name a file.
_FILES = {"fixed_dictionary", "load_state", "replace_unk", "save_state", "source_dict", "target_dict"}
_NO_FILES = {"bpe_separator", "source_lang", "target_lang", "_name"}
#: Options that may be any text, since none is evaluated: paths, the separator of subwords, and a pattern that this
#: plugin parses.
FREE_TEXTS = frozenset(
    """
    aim_repo bpe_codes bpe_merges bpe_separator bpe_vocab bpe_vocab_file checkpoint_suffix data distributed_init_method
    ema_seed_model eos_token finetune_from_model gpt2_encoder_json gpt2_vocab_bpe input lineartime_layers lm_path
    log_file path plasma_path quantization_config_path restore_file results_path save_dir sentencepiece_model
    sentencepiece_model_path teacher tensorboard_logdir user_dir wandb_project
    """.split()
).union(EMBEDDING_FILES, _FILES)
#: Files in the folder of a checkpoint with which fairseq's hub replaces an option.
_HUB_FILES = {
    "code": "bpe_codes",
    "bpecodes": "bpe_codes",
    "sentencepiece.bpe.model": "sentencepiece_model",
    "merges.txt": "bpe_merges",
    "vocab.json": "bpe_vocab",
}
#: Groups of options that are not read when a model is loaded.
_NOT_READ = ("criterion", "optimizer", "lr_scheduler", "scoring", "simul_type", "job_logging_cfg")
#: Errors raised for options of wrong types.
_FAULTS = (
    OmegaConfBaseException,
    HydraException,
    AssertionError,
    ArithmeticError,
    AttributeError,
    KeyError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
#: An interpolation that refers to another option of the same configuration.
_REFERENCE = re.compile(r"\$\{(\w+(?:\.\w+)*)\}")
#: The most values in a configuration, and in a list that a reference names. fairseq's own have about a thousand and
#: ten; nested lists, and references to lists of references, could use up all memory.
_MOST_VALUES, _MOST_NAMED = 20_000, 1_000
#: The most characters of a text that fairseq could evaluate. Python needs about a kilobyte per character to parse some.
_MOST_CHARACTERS = 1_000_000


@contextmanager
def configuration_errors(path: str, overrides: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Turn any error from reading a malformed configuration inside the ``with`` block into one ValueError.

    ``path`` is the checkpoint of the configuration, and ``overrides`` are the user's options that replace stored ones.
    """
    try:
        yield
    except _FAULTS as error:
        source = f"the checkpoint {path!r}" + (f" with `model_overrides` {overrides!r}" if overrides else "")
        if isinstance(error, ConfigurationError):
            raise ArgumentError(f"{source} has a configuration that cannot be read: {error}") from error
        foreign = isinstance(error, OmegaConfBaseException) or not isinstance(error, ValueError)
        if not foreign and "allowed" in str(error):  # the message is complete
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ArgumentError(
            f"{source} has a configuration that cannot be read ({reason}); allowed: what "
            "fairseq-train writes, and options of the kinds that the model declares"
        ) from error


def check_configuration(state: Mapping[str, Any], path: str) -> None:
    """Refuse texts in the configuration of the checkpoint ``state`` that fairseq could run or resolve.

    O(number of options). ``path`` is for messages.

    Raises:
        ValueError: a text is neither words nor a literal, and its option is not in ``FREE_TEXTS``; an interpolation
        refers to anything but another option; the name of a tokenizer or of another part is a path; or the
        configuration is malformed. The message names the file, the
        option and its value.
    """
    for name, value in _stored_options(state, path, leave_out=("job_logging_cfg",)):
        if name not in FREE_TEXTS and not _is_data(value):
            raise ValueError(f"the checkpoint {path!r} has {_no_data(name, value)}")
        if name in REGISTRIES and isinstance(value, str) and os.sep in value:  # hydra would read a file of that name
            raise ValueError(f"the checkpoint {path!r} has {name} = {value!r}; allowed: a name, no path")


def check_files(state: Mapping[str, Any], path: str, options: Mapping[str, Any]) -> None:
    """Refuse files and addresses in the configuration of ``state`` that loading would open, and unknown tasks.

    The user's ``options``, and files of fairseq's hub in the folder of ``path``, replace stored values.

    Raises:
        ValueError: there is one; the message names the file, the option and its value.
    """
    folder = os.path.dirname(path)
    replaced = {"data", *EMBEDDING_FILES, *options}
    replaced |= {option for file, option in _HUB_FILES.items() if os.path.exists(os.path.join(folder, file))}
    not_followed = replaced | _not_followed()
    tokenizer_options = list(_tokenizer_options())
    defaults = {field.default for field in tokenizer_options if isinstance(field.default, str)}
    files = _FILES.union(field.name for field in tokenizer_options) - _NO_FILES
    for name, value in _stored_options(state, path, leave_out=_NOT_READ):
        if name in not_followed or not isinstance(value, str) or value in defaults:
            continue
        if os.sep in value or (value and name in files):
            raise ValueError(
                f"the checkpoint {path!r} has {name} = {value!r}; allowed: no path and no address, but yours: "
                f"from_pretrained(..., {name}=...)"
            )
    _check_task(state, path)


def check_texts(model: type, args: Any) -> None:
    """Refuse texts in the options ``args`` of a fairseq ``model`` that fairseq could run.

    So a checkpoint cannot run code when fairseq's own commands build one of our models from it, either.

    Raises:
        ValueError: there is one; the message names the option and its value.
    """
    sides = (("encoder", EncDecBaseConfig), ("decoder", DecoderConfig))
    names = {f"{side}_{name}" for side, config in sides for name in config.__dataclass_fields__}
    names |= {*TransformerConfig.__dataclass_fields__, *model_options(model)}
    for name in sorted(names - FREE_TEXTS):
        value = safe_getattr(args, name)
        if not _is_data(value):
            raise ValueError(_no_data(name, value))


def _is_data(value: Any) -> bool:
    """Whether evaluating ``value`` calls nothing: it is no text, or short words, or a short literal."""
    if not isinstance(value, (str, bytes)):
        return True
    if len(value) > _MOST_CHARACTERS:
        return False
    if isinstance(value, str) and _WORDS.fullmatch(value):
        return True
    for parse in (ast.literal_eval, json.loads):
        try:
            content = parse(value)
            return not isinstance(content, (str, bytes)) or _is_data(content)  # fairseq may parse, then evaluate
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return False


def _no_data(name: str, value: Any) -> str:
    if len(value) > _MOST_CHARACTERS:
        return f"{name} of {len(value):,} characters; allowed: at most {_MOST_CHARACTERS:,}"
    return f"{name} = {value!r}; allowed: numbers, words, and lists and dictionaries as Python writes them, no code"


def _stored_options(state: Mapping[str, Any], path: str, leave_out: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Names and values of all options of a checkpoint, at any depth, with allowed interpolations resolved.

    ``leave_out`` are groups to skip in a nested configuration.
    """
    arguments, config = state.get("args"), state.get("cfg")
    if arguments is not None:
        yield from _without_interpolations(arguments, path)
    if config is not None:
        _check_references(config, path)
        groups = {name: group for name, group in _resolved(config, path).items() if name not in leave_out}
        yield from _without_interpolations(groups, path)


def _check_references(config: Any, path: str) -> None:
    """ValueError for an interpolation in ``config`` that does not refer to a value or to a few plain values."""
    for name, value in _leaves(config, path):
        if not _has_reference(value):
            continue
        reference = _REFERENCE.fullmatch(str(value))
        if reference is None or not _is_small(_named(config, reference[1].split(".")), path):
            raise ValueError(f"the checkpoint {path!r} has {name} = {value!r}; allowed: the name of another option")


def _has_reference(value: Any) -> bool:
    return not isinstance(value, int) and "${" in str(value)  # Python does not print integers of thousands of digits


def _named(config: Any, parts: list[str]) -> Any:
    """The value in ``config`` at the path ``parts``, outermost name first; None if there is none."""
    for part in parts:
        config = OmegaConf.to_container(config, resolve=False) if OmegaConf.is_config(config) else config
        config = vars(config) if isinstance(config, Namespace) else config
        config = config.get(part) if isinstance(config, Mapping) else None
    return config


def _is_small(named: Any, path: str) -> bool:
    """Whether ``named`` is one value, or a few values without references."""
    if isinstance(named, (str, bytes, int, float, bool)) or named is None:
        return True
    leaves = _leaves(named, path)
    return len(leaves) <= _MOST_NAMED and not any(_has_reference(value) for _, value in leaves)


def _without_interpolations(options: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The leaves of ``options``; ValueError for an interpolation, which another configuration would resolve."""
    for name, value in _leaves(options, path):
        if _has_reference(value):
            raise ValueError(f"the checkpoint {path!r} has {name} = {value!r}; allowed: no interpolation")
        yield name, value


def _resolved(config: Any, path: str) -> dict[str, Any]:
    """A nested configuration as plain values."""
    with configuration_errors(path):
        groups = OmegaConf.to_container(OmegaConf.create(config, flags={"allow_objects": True}), resolve=True)
        if not isinstance(groups, dict):
            raise TypeError(f"a {type(groups).__name__}")
        return groups


def _leaves(options: Any, path: str) -> list[tuple[str, Any]]:
    """All values in nested containers, each with the name of its nearest key; nothing is resolved."""
    with configuration_errors(path):
        leaves = list(islice(_walk("cfg", options), _MOST_VALUES + 1))
    if len(leaves) > _MOST_VALUES:
        raise ValueError(
            f"the checkpoint {path!r} has a configuration of too many values; allowed: at most {_MOST_VALUES:,}"
        )
    return leaves


def _walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (ValueNode, np.ndarray)):  # fairseq would convert it to a text
        yield from _walk(name, value.tolist() if isinstance(value, np.ndarray) else value._value())
        return
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=False)
    elif isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, Mapping) and value:  # an empty container counts as a value, since their number is limited too
        for key, item in value.items():
            yield from _walk(str(key), item)
    elif isinstance(value, (list, tuple, set, frozenset)) and value:
        for item in value:
            yield from _walk(name, item)
    else:
        yield name, value


def _not_followed() -> set[str]:
    """Names of options of commands, optimizers and criteria, which are not read when a model is loaded."""
    groups = [group for name, group in vars(FairseqConfig()).items() if is_dataclass(group) and name != "generation"]
    groups += [x for name in _NOT_READ if name in REGISTRIES for x in REGISTRIES[name]["dataclass_registry"].values()]
    return {name for group in groups for name in group.__dataclass_fields__} - {"_name"}


def _tokenizer_options() -> Iterator[Any]:
    """The option fields of fairseq's tokenizers, which name files and have addresses as defaults."""
    for name in ("bpe", "tokenizer"):
        for options in filter(is_dataclass, REGISTRIES[name]["dataclass_registry"].values()):
            yield from fields(options)


def _check_task(state: Mapping[str, Any], path: str) -> None:
    """ValueError for a task that is not registered."""
    if state.get("args") is not None:
        name = safe_getattr(state["args"], "task", "translation")  # fairseq's default for its oldest checkpoints
    else:
        task = state["cfg"].get("task")
        name = (task.get("_name") or task.get("task")) if hasattr(task, "get") else safe_getattr(task, "_name")
        name = name or safe_getattr(task, "task")
    if not isinstance(name, str) or name not in TASK_REGISTRY:
        raise ValueError(
            f"the checkpoint {path!r} is of the task {name!r}, which is not registered; allowed: "
            f"{', '.join(TASK_REGISTRY)}"
        )
