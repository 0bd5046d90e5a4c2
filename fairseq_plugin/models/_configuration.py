"""Configurations of models from hydra, YAML files and overrides: each key is read or refused.

A configuration is flat, as a command line is (``encoder_embed_dim``), or has fairseq's groups (``encoder: {embed_dim:
...}``). fairseq passes the configuration to the named architecture if the model has no dataclass, and otherwise merges
it into the dataclass. Both cases are handled here.
"""

import difflib
import logging
from argparse import Action, Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cache, partial
from types import NoneType
from typing import Any, NamedTuple, Union, get_args, get_origin

from fairseq.dataclass import FairseqDataclass
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_REGISTRY, register_model_architecture
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer.transformer_config import DecoderConfig, EncDecBaseConfig, QuantNoiseConfig
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from omegaconf import BooleanNode, DictConfig, FloatNode, IntegerNode, OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException, ValidationError

from ..loading.known_options import ConfigurationError, declared_options

logger = logging.getLogger(__name__)

#: The groups of fairseq's nested configurations, where ``encoder_layers`` is ``layers`` of ``encoder``.
GROUPS: dict[str, type] = {"encoder": EncDecBaseConfig, "decoder": DecoderConfig, "quant_noise": QuantNoiseConfig}
#: Keys that name the model.
_NAMES = ("_name", "arch")
#: For each type, the node that checks its values, and its name in messages.
_TYPES = {
    int: (IntegerNode, "an integer"),
    float: (FloatNode, "a number"),
    bool: (BooleanNode, "true, false"),
    str: (StringNode, "a text"),
}
#: fairseq's defaults, which a fully printed configuration has for options that nobody chose.
_STOCK_DEFAULTS = {**vars(TransformerConfig()), **vars(TransformerLanguageModelConfig())}


class Key(NamedTuple):
    """A key of a configuration: the option that it sets, the key as it was typed, and its value."""

    option: str
    typed: str
    value: Any


class Known(NamedTuple):
    """The options that an architecture reads, and how it reads them."""

    #: Its options, each with its command-line action, or None if the command line lacks it.
    options: dict[str, Action | None]
    #: Default values of options.
    defaults: dict[str, Any]
    #: The types that each option allows, as far as they are known.
    types: dict[str, tuple[Any, ...]]
    #: Whether it has a dataclass; then null is a value, otherwise null leaves an option open.
    typed: bool
    #: Whether it reads groups as fairseq's ``transformer`` does.
    reads_groups: bool


def read_configuration(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the configuration ``given`` of the architecture ``name`` sets, flat.

    Raises:
        ConfigurationError: a key that nothing reads, a value that is not allowed, or an option with two values.
    """
    known = _known(name)
    read: dict[str, Key] = {}
    for key in _keys(given, known):
        if key.option not in known.options:
            _check_unread(name, key, known)
        elif key.value is not None or known.typed or key.option not in known.defaults:
            _check_twice(name, read.get(key.option, key), key, known)
            read[key.option] = key
    options = {option: _checked(name, key, known) for option, key in read.items() if not _is_unused(name, key, known)}
    flat = {option: value for option, value in options.items() if read[option].typed == option}
    filled = _filled(name, flat) if known.reads_groups and len(flat) < len(options) else {}
    return {**filled, **_rest_of_groups(given, options, known), **options}


def read_stored(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options in the configuration ``given`` that a checkpoint of the architecture ``name`` has.

    Keys that nothing reads, which earlier versions stored, groups among them, are left out.
    """
    known = _known(name)
    shared = {field.name for config in GROUPS.values() for field in fields(config)} if known.reads_groups else set()
    return {key: value for key, value in given.items() if key in known.options or key in shared - {*_NAMES}}


def read_stock(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that fairseq's own model reads from ``given`` and the architecture ``name`` has, flat.

    If a group is given, fairseq does not read the flat options of that group.
    """
    known = _known(name)
    unread = tuple(f"{group}_" for group in GROUPS if known.reads_groups and _is_group(given.get(group)))
    keys = [key for key in _keys(given, known) if key.option in known.options]
    options = {x.option: x.value for x in keys if x.typed != x.option or not x.option.startswith(unread)}
    return {**_rest_of_groups(given, options, known), **options}


def register_architecture(model: str, name: str) -> Callable[[Callable[[Any], None]], None]:
    """fairseq's ``register_model_architecture`` for a model without a dataclass."""

    def register(complete: Callable[[Any], None]) -> None:
        register_model_architecture(model, name)(partial(_read_and_complete, complete))

    return register


def readable(options: type[FairseqDataclass], name: str) -> FairseqDataclass:
    """An instance of ``options`` as the entry of the model ``name`` in fairseq's registry of dataclasses.

    Calling it gives an instance, as calling the class does. omegaconf copies the object into which it merges a
    configuration: the copy is a ``_CheckedConfig``, which checks that configuration.
    """
    members = {
        "__call__": lambda self, **values: options(**values) if values else self,
        "__deepcopy__": lambda self, memo: _CheckedConfig(options(_name=name)),
        "from_namespace": options.from_namespace,
    }
    return type(options.__name__, (options,), members)()


class _CheckedConfig(DictConfig):
    """The configuration of a model that has a dataclass."""

    def merge_with(self, *others: Any) -> None:
        """omegaconf's, after options are checked and options of the named size are added."""
        for other in others:
            values = OmegaConf.to_container(other, resolve=False, enum_to_str=True)
            values.update(
                {
                    group: OmegaConf.to_container(other[group], resolve=True)
                    for group in GROUPS
                    if _is_group(values.get(group))
                }
            )
            name = values.get("_name") or self._name
            options = _sized(name, read_configuration(name, values))
            try:
                super().merge_with({"_name": name, **options})
            except OmegaConfBaseException as error:
                reason = str(error).splitlines()[0]
                raise ConfigurationError(f"model.{error.full_key} of {name} cannot be read: {reason}") from error


def _filled(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """``options`` and the options that the architecture ``name`` fills in."""
    args = Namespace(**options)
    ARCH_CONFIG_REGISTRY[name](args)
    return vars(args)


def _sized(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """``options`` of a model with a dataclass, and the options that the named architecture ``name`` sets."""
    known = _known(name)
    if name in MODEL_REGISTRY or not known.options.keys() - options.keys():
        return options
    interpolations = {key: value for key, value in known.defaults.items() if _is_interpolation(value)}
    filled = _filled(name, {**interpolations, **options})
    integers = {key for key, action in known.options.items() if action and action.type is int}
    # fairseq's base_lm_architecture sets a number to False.
    return {
        key: int(value) if value is False and key in integers else value
        for key, value in filled.items()
        if key in known.options
    }


def _read_and_complete(complete: Callable[[Any], None], args: Any) -> None:
    """Flatten ``args`` in place if it is a configuration; then ``complete`` the options that it leaves open."""
    if OmegaConf.is_config(args):
        values = OmegaConf.to_container(args, resolve=True, enum_to_str=True)
        # fairseq sets this flag on configurations of checkpoints; those of hydra lack it.
        reader = read_stored if args._get_flag("allow_objects") else read_configuration
        options = reader(next(values[key] for key in _NAMES if values.get(key)), values)
        for key in values.keys() - {*_NAMES}:
            del args[key]
        args.update(options)
    complete(args)


@cache
def _known(name: str) -> Known:
    """How the architecture ``name`` reads its options; see ``Known``."""
    model = ARCH_MODEL_REGISTRY[name]
    declared, config = declared_options(model), getattr(model, "__dataclass", None)
    values = _filled(name, {}) if config is None else vars(config())
    names = [*values, *(declared if config is None else ()), *getattr(model, "undeclared_options", ())]
    options = {option: declared.get(option) for option in names if option not in _NAMES}
    types = {option: _types(config, option, action, values.get(option)) for option, action in options.items()}
    return Known(options, values, types, config is not None, getattr(model, "reads_groups", False))


def _types(config: type | None, option: str, action: Action | None, default: Any) -> tuple[Any, ...]:
    """The types of ``option``: those declared in the dataclass ``config``, otherwise those of the command line."""
    if config is not None:
        declared = config.__dataclass_fields__[option].type
        return get_args(declared) if get_origin(declared) is Union else (declared,)
    if action is None:
        return type(default), NoneType
    return (bool if action.nargs == 0 else action.type or str), NoneType


def _keys(given: Mapping[str, Any], known: Known) -> Iterator[Key]:
    """The keys of ``given``; of two keys for one option, the one that ``transformer`` uses comes last."""
    later_keys: list[Key] = []
    for key, value in given.items():
        groups = [group for group, config in GROUPS.items() if key in config.__dataclass_fields__]
        if key in GROUPS and _is_group(value):
            later_keys += [Key(f"{key}_{name}", f"{key}.{name}", x) for name, x in value.items() if name not in _NAMES]
        elif known.reads_groups and groups and key not in (*known.options, *_NAMES):
            later_keys += [Key(f"{group}_{key}", key, value) for group in groups if not _is_group(given.get(group))]
        elif key not in _NAMES:
            yield Key(key, key, value)
    yield from later_keys


def _rest_of_groups(given: Mapping[str, Any], options: dict[str, Any], known: Known) -> dict[str, Any]:
    """fairseq's values for options that a given group leaves open: for ``transformer``, all options of the group.

    For other models, only options that follow from the group: the decoder's input and output width is ``embed_dim``.
    """
    values: dict[str, Any] = {}
    for group, config in GROUPS.items():
        if not _is_group(given.get(group)):
            continue
        declared = {name: field for name, field in config.__dataclass_fields__.items() if name not in _NAMES}
        group_options = {
            name: options[f"{group}_{name}"] for name in declared if options.get(f"{group}_{name}") is not None
        }
        completed = vars(config(**group_options))
        follows = {
            name
            for name, field in declared.items()
            if _is_interpolation(field.default) and "embed_dim" in group_options
        }
        for name in declared if known.reads_groups else follows:
            if completed[name] is not None and f"{group}_{name}" in known.options:
                values[f"{group}_{name}"] = completed[name]
    return values


def _check_twice(name: str, one: Key, other: Key, known: Known) -> None:
    """Raise ConfigurationError for an option with two values, unless the value that is not read is the default.

    fairseq stores all defaults, flat, in addition to the groups of a configuration.
    """
    if one.value == other.value:
        return
    values = f"model.{one.typed} is {one.value!r} and model.{other.typed} is {other.value!r}"
    if one.value != known.defaults.get(one.option):
        raise ConfigurationError(f"{values}; allowed with {name}: one of them")
    logger.warning(f"{values}; {name} reads the latter")


def _check_unread(name: str, key: Key, known: Known) -> None:
    """Raise ConfigurationError for a key that nothing reads, unless it is null and fairseq's ``transformer`` has it."""
    group, _, nested = key.typed.partition(".")
    if key.value is None and (nested in GROUPS[group].__dataclass_fields__ if nested else group in _STOCK_DEFAULTS):
        return
    in_groups = [
        f"{x}.{option.removeprefix(f'{x}_')}" for x in GROUPS for option in known.options if option.startswith(f"{x}_")
    ]
    flat = [*known.options, *(x.partition(".")[0] for x in in_groups)]
    valid = in_groups if in_groups and group in GROUPS else flat
    nearest = difflib.get_close_matches(key.typed, valid, n=1, cutoff=0.0)[0]
    raise ConfigurationError(
        f"model.{key.typed} is {key.value!r}, which {name} does not read; allowed: model.{nearest}"
    )


def _is_unused(name: str, key: Key, known: Known) -> bool:
    """Whether the value is not allowed but is fairseq's default, which nobody chose."""
    action = known.options[key.option]
    if not action or not action.choices or key.value in action.choices:
        return False
    unused = key.value is not None and key.value == _STOCK_DEFAULTS.get(key.option)
    if unused:
        logger.warning(
            f"model.{key.typed} is {key.value!r}, fairseq's default, which {name} has no use for; it has "
            f"{known.defaults[key.option]!r}"
        )
    return unused


def _checked(name: str, key: Key, known: Known) -> Any:
    """The value of ``key``, converted to the type of its option.

    Raises:
        ConfigurationError: it is not allowed.
    """
    action, value = known.options[key.option], key.value
    if _is_interpolation(value) or (value is None and NoneType in known.types[key.option]):
        return value
    refused = f"model.{key.typed} is {value!r}; allowed with {name}:"
    if action and action.choices:
        if value not in action.choices:
            raise ConfigurationError(f"{refused} {', '.join(map(str, action.choices))}")
        return value
    if key.option.endswith(
        "_layers_to_keep"
    ):  # an encoder-decoder's is declared as a list, but fairseq splits a string
        value = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if not all(x.strip().isdigit() for x in value.split(",")):
            raise ConfigurationError(f"{refused} numbers of layers, as 0,2")
        return value
    node, words = next((_TYPES[x] for x in known.types[key.option] if x in _TYPES), (None, None))
    if _is_group(value):
        raise ConfigurationError(f"{refused} {words or 'a value, no group'}")
    if node is None:
        return value
    try:
        return node(value, is_optional=False).validate_and_convert(value)
    except ValidationError as error:
        raise ConfigurationError(f"{refused} {words}") from error


def _is_group(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("${")
