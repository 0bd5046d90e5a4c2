"""The configuration in a checkpoint is data: what fairseq would evaluate in it, resolve or follow is refused.

fairseq stores the options of a training in its checkpoints, and reads them again to build task and model. It evaluates
the strings of some as Python, resolves interpolations, those of the environment too, and opens files and addresses.
"""

import ast
import os
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, is_dataclass
from itertools import islice
from typing import Any

from fairseq.dataclass.configs import FairseqConfig
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY
from fairseq.utils import safe_getattr
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.ops.shared.checks import ArgumentError

from .known_options import ConfigurationError

#: Options that fairseq gives to ``eval``, in its packages and in its examples.
EVALUATED = frozenset(
    """
    adafactor_eps adam_betas adamax_betas adaptive_input_cutoff adaptive_softmax_cutoff character_filters
    conv_aggregator_layers conv_dec_config conv_enc_config conv_feature_layers decoder_attention decoder_layers
    decoder_xformers_att_config decoder_zero_init downsample encoder_attention encoder_layers
    encoder_xformers_att_config feature_encoder_spec gated_attention lamb_betas left_pad_source left_pad_target
    model_overrides pipeline_balance pipeline_decoder_balance pipeline_decoder_devices pipeline_devices
    pipeline_encoder_balance pipeline_encoder_devices pretrained project_input self_attention transformer_context
    transformer_dec_config transformer_enc_config transformer_sampling vggblock_enc_config wer_args xformers_att_config
    """.split()
)
#: Options of pretrained embeddings, which a model whose weights are loaded has no use for.
EMBEDDING_FILES = ("encoder_embed_path", "decoder_embed_path")
#: Options that name a file even where their value has no separator.
_FILES = frozenset(
    """
    bpe_codes bpe_merges bpe_vocab bpe_vocab_file fixed_dictionary gpt2_encoder_json gpt2_vocab_bpe replace_unk
    load_state save_state sentencepiece_model sentencepiece_model_path sentencepiece_vocab source_dict target_dict
    """.split()
)
#: Files in the folder of a checkpoint that fairseq's hub takes in place of the option.
_HUB_FILES = {
    "code": "bpe_codes",
    "bpecodes": "bpe_codes",
    "sentencepiece.bpe.model": "sentencepiece_model",
    "merges.txt": "bpe_merges",
    "vocab.json": "bpe_vocab",
}
#: Groups of options whose values nothing reads where a model is loaded.
_NOT_READ = ("criterion", "optimizer", "lr_scheduler", "scoring", "simul_type", "job_logging_cfg")
#: What is raised for options of other kinds.
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
#: Most values in a configuration, and in a list that a reference names. fairseq's own have about a thousand and ten;
#: lists in lists, and references to lists of references, would take all memory.
_MOST_VALUES, _MOST_NAMED = 20_000, 1_000


@contextmanager
def faults_of(path: str, overrides: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Turn any error from reading a malformed configuration inside the ``with`` block into one ValueError.

    ``path`` is the checkpoint that holds it, and ``overrides`` are options that a user gave in place of stored ones.
    """
    try:
        yield
    except _FAULTS as error:
        given = f" with `model_overrides` {overrides!r}" if overrides else ""
        if isinstance(error, ConfigurationError):
            raise ArgumentError(
                f"the checkpoint {path!r}{given} has a configuration that cannot be read: {error}"
            ) from error
        ours = isinstance(error, ValueError) and not isinstance(error, OmegaConfBaseException)
        if ours and "allowed" in str(error):  # it says all that there is to say
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ArgumentError(
            f"the checkpoint {path!r}{given} has a configuration that cannot be read ({reason}); allowed: what "
            "fairseq-train writes, and options of the kinds that the model declares"
        ) from error


def check_configuration(state: Mapping[str, Any], path: str) -> None:
    """Refuse strings in the configuration of the checkpoint ``state`` that fairseq would run or take from elsewhere.

    O(number of options). ``path`` is for messages.

    Raises:
        ValueError: an option that fairseq evaluates and that is no literal of Python; an interpolation of anything but
            another option; a configuration that is none. The message names the file, the option and its value.
    """
    for name, value in _stored_options(state, path):
        problem = _evaluation_problem(name, value)
        if problem:
            raise ValueError(f"the checkpoint {path!r} has {problem}")


def check_files(state: Mapping[str, Any], path: str, given: Mapping[str, Any]) -> None:
    """Refuse files and addresses in the configuration of ``state`` that loading would follow, and unknown tasks.

    The options that a user has ``given``, and files of fairseq's hub in the folder of ``path``, stand in their place.

    Raises:
        ValueError: it has one; the message names the file, the option and its value.
    """
    folder = os.path.dirname(path)
    replaced = {"data", *EMBEDDING_FILES, *given}
    replaced |= {option for file, option in _HUB_FILES.items() if os.path.exists(os.path.join(folder, file))}
    not_followed = replaced | _not_followed()
    defaults = _default_addresses()
    for name, value in _stored_options(state, path, leave_out=_NOT_READ):
        if name in not_followed or not isinstance(value, str) or value in defaults:
            continue
        if os.sep in value or (value and name in _FILES):
            raise ValueError(
                f"the checkpoint {path!r} has {name} = {value!r}; allowed: no path and no address, but yours: "
                f"from_pretrained(..., {name}=...)"
            )
    _check_task(state, path)


def check_evaluated(args: Any) -> None:
    """Refuse options of a model that fairseq evaluates and that are no literals.

    So a checkpoint runs nothing where fairseq's own commands build a model of ours from it either.

    Raises:
        ValueError: there is one; the message names the option and its value.
    """
    for name in sorted(EVALUATED):
        problem = _evaluation_problem(name, safe_getattr(args, name))
        if problem:
            raise ValueError(problem)


def _evaluation_problem(name: str, value: Any) -> str | None:
    """Error message for a value that fairseq evaluates and that is no Python literal; None for all others."""
    if name not in EVALUATED or not isinstance(value, (str, bytes)):
        return None
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return f"{name} = {value!r}; allowed: numbers, lists and dictionaries as Python writes them, no code"
    return None


def _stored_options(state: Mapping[str, Any], path: str, leave_out: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Names and values of all options of a checkpoint, at any depth; interpolations are resolved where they may be.

    ``leave_out`` are groups of a configuration in groups.
    """
    arguments, config = state.get("args"), state.get("cfg")
    if arguments is not None:
        yield from _without_interpolations(arguments, path)
    if config is not None:
        _check_references(config, path)
        groups = {name: group for name, group in _resolved(config, path).items() if name not in leave_out}
        yield from _without_interpolations(groups, path)


def _check_references(config: Any, path: str) -> None:
    """ValueError for an interpolation in ``config`` that is no reference to a value, or to a few plain values."""
    for name, value in _leaves(config, path):
        if "${" not in str(value):
            continue
        reference = _REFERENCE.fullmatch(str(value))
        if reference is None or not _is_small(_named(config, reference[1].split(".")), path):
            raise ValueError(f"the checkpoint {path!r} has {name} = {value!r}; allowed: the name of another option")


def _named(config: Any, parts: list[str]) -> Any:
    """Value in ``config`` at the path ``parts``, from the outermost name inwards; None where there is nothing."""
    for part in parts:
        config = OmegaConf.to_container(config, resolve=False) if OmegaConf.is_config(config) else config
        config = vars(config) if isinstance(config, Namespace) else config
        config = config.get(part) if isinstance(config, Mapping) else None
    return config


def _is_small(named: Any, path: str) -> bool:
    """Whether it is one value, or a few that refer to no others."""
    if isinstance(named, (str, bytes, int, float, bool)) or named is None:
        return True
    leaves = _leaves(named, path)
    return len(leaves) <= _MOST_NAMED and not any("${" in str(value) for _, value in leaves)


def _without_interpolations(options: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The leaves of ``options``, in which an interpolation would be resolved by another configuration."""
    for name, value in _leaves(options, path):
        if "${" in str(value):
            raise ValueError(f"the checkpoint {path!r} has {name} = {value!r}; allowed: no interpolation")
        yield name, value


def _resolved(config: Any, path: str) -> dict[str, Any]:
    """A configuration in groups as plain values."""
    with faults_of(path):
        found = OmegaConf.to_container(OmegaConf.create(config, flags={"allow_objects": True}), resolve=True)
        if not isinstance(found, dict):
            raise TypeError(f"a {type(found).__name__}")
        return found


def _leaves(options: Any, path: str) -> list[tuple[str, Any]]:
    """All values in nested containers, each with the name that is nearest to it; nothing is resolved."""
    with faults_of(path):
        leaves = list(islice(_walk("cfg", options), _MOST_VALUES + 1))
    if len(leaves) > _MOST_VALUES:
        raise ValueError(
            f"the checkpoint {path!r} has a configuration of too many values; allowed: at most {_MOST_VALUES:,}"
        )
    return leaves


def _walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=False)
    elif isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, Mapping) and value:  # an empty container is a value: there may be any number of them
        for key, one in value.items():
            yield from _walk(str(key), one)
    elif isinstance(value, (list, tuple, set, frozenset)) and value:
        for one in value:
            yield from _walk(name, one)
    else:
        yield name, value


def _not_followed() -> set[str]:
    """Names of options of commands, optimizers and criteria, which nothing reads where a model is loaded."""
    groups = [group for name, group in vars(FairseqConfig()).items() if is_dataclass(group) and name != "generation"]
    groups += [x for name in _NOT_READ if name in REGISTRIES for x in REGISTRIES[name]["dataclass_registry"].values()]
    return {name for group in groups for name in group.__dataclass_fields__} - {"_name"}


def _default_addresses() -> set[str]:
    """The addresses of vocabularies that are fairseq's own defaults."""
    fields = [
        field
        for name in ("bpe", "tokenizer")
        for options in REGISTRIES[name]["dataclass_registry"].values()
        if is_dataclass(options)
        for field in options.__dataclass_fields__.values()
    ]
    return {field.default for field in fields if field.default is not MISSING and isinstance(field.default, str)}


def _check_task(state: Mapping[str, Any], path: str) -> None:
    """ValueError for a task that nobody has registered."""
    if state.get("args") is not None:
        name = safe_getattr(state["args"], "task", "translation")  # fairseq's own default for its oldest files
    else:
        task = state["cfg"].get("task")
        name = (task.get("_name") or task.get("task")) if hasattr(task, "get") else safe_getattr(task, "_name")
        name = name or safe_getattr(task, "task")
    if not isinstance(name, str) or name not in TASK_REGISTRY:
        raise ValueError(
            f"the checkpoint {path!r} is of the task {name!r}, which is not registered; allowed: "
            f"{', '.join(TASK_REGISTRY)}"
        )
