"""The options of a model: reading them, and deriving those of an attention from its declaration."""

from collections.abc import Sequence
from dataclasses import field, make_dataclass
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.utils import safe_getattr

from common.attention import ATTENTIONS, Option
from common.ops.shared.checks import check_positive_int


def option(args, config: type, name: str) -> Any:
    """An option of ``args``, without its enumeration; one that is missing has the default of the dataclass ``config``.

    Missing are options that are newer than a checkpoint, and those a command line left open.
    """
    value = safe_getattr(args, name, getattr(config, name))
    return getattr(value, "value", value)


def attention_config(attention: str, only: Sequence[str] | None = None, **defaults: Any) -> type:
    """A fairseq dataclass of the options that the mechanism called ``attention`` declares, or of ``only`` some.

    The option x of the mechanism NAME is ``--NAME-x``. A flag that is True by default is ``--NAME-no-x``. ``defaults``
    stand in place of the declared ones.
    """
    options = ATTENTIONS[attention].Options
    values = {**options.defaults(), **defaults}
    declared = {name: found for name, found in options.described().items() if only is None or name in only}
    fields = [_field(attention, name, found, values[name]) for name, found in declared.items()]
    return make_dataclass(f"{camel_case(attention)}Options", fields, bases=(FairseqDataclass,))


def attention_options(args, attention: str, config: type) -> dict[str, Any]:
    """The options of ``attention`` that are fields of ``config``, as ``build_attention`` takes them.

    Raises:
        ValueError: a value that an option does not allow; it names the option of the command line.
    """
    options = ATTENTIONS[attention].Options
    read = {}
    for name, described in options.described().items():
        field_name, negated = _field_name(attention, name, described, options.defaults()[name])
        if hasattr(config, field_name):
            value = option(args, config, field_name)
            value = not value if negated else value
            read[name] = described.parse(flag_of(field_name), value)
    return read


def count_option(args, config: type, name: str) -> int:
    """``option``, a ValueError unless it is an integer of at least 1; it names the option of the command line."""
    value = option(args, config, name)
    check_positive_int(flag_of(name), value)
    return value


def flag_of(name: str) -> str:
    """How a command line spells an option: ``flash_chunk_size`` as ``--flash-chunk-size``."""
    return f"--{name.replace('_', '-')}"


def camel_case(name: str) -> str:
    """``daft_conv`` as ``DaftConv``, for the names of classes."""
    return "".join(part.capitalize() for part in name.split("_"))


def _field(attention: str, name: str, described: Option, default: Any) -> tuple[str, Any, Any]:
    """One field, as ``make_dataclass`` takes it."""
    field_name, negated = _field_name(attention, name, described, default)
    if described.type is bool:
        help = f"turn off: {described.help}" if negated else described.help
        return field_name, bool, field(default=False, metadata={"help": help})
    # fairseq reads Optional[...], not "... | None".
    kind = ChoiceEnum(described.choices) if described.choices else Optional[described.type]  # noqa: UP045
    return field_name, kind, field(default=default, metadata={"help": described.help})


def _field_name(attention: str, name: str, described: Option, default: Any) -> tuple[str, bool]:
    """The name of an option's field, and whether that is a flag which turns the option off."""
    negated = described.type is bool and default is True
    return f"{attention}_no_{name}" if negated else f"{attention}_{name}", negated
