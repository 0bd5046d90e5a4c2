"""The options of a model: reading them, deriving an attention's options from its declaration, naming them in errors."""

from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, make_dataclass
from enum import Enum
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.utils import safe_getattr
from omegaconf import OmegaConf

from common.attention import ATTENTIONS, Option, options_of
from common.ops.shared.checks import ArgumentError, check_positive_int, check_table

from ..loading.known_options import flag_of, model_options, option_field
from ..modules.multihead_attention import LayerDesign

#: Options that limit the positions of a sequence, and the width of each position's embedding.
_POSITIONS = {
    "max_positions": "encoder_embed_dim",
    "max_source_positions": "encoder_embed_dim",
    "max_target_positions": "decoder_embed_dim",
}


def option(args, config: type, name: str) -> Any:
    """The plain value of an option of ``args``; a missing option has the default of the dataclass ``config``.

    Options are missing if they are newer than the checkpoint, or if the command line left them open.

    Raises:
        ValueError: the value is not among the option's choices.
    """
    value = safe_getattr(args, name, getattr(config, name))
    value, kind = getattr(value, "value", value), config.__dataclass_fields__[name].type
    if isinstance(kind, type) and issubclass(kind, Enum) and value not in [choice.value for choice in kind]:
        raise ValueError(f"{flag_of(name)} is {value!r}; allowed: {', '.join(choice.value for choice in kind)}")
    return value


def checkpointing_field() -> Any:
    """The field of ``--checkpoint-activations``, for models whose fairseq configuration lacks it."""
    return option_field(False, "checkpoint activations at each layer")


def offloading_field() -> Any:
    """The field of ``--offload-activations``."""
    return option_field(False, "move checkpointed activations to CPU; sets --checkpoint-activations")


@dataclass
class DocumentOptions(FairseqDataclass):
    """The option of models that read several documents in a row."""

    lineartime_reset_at_eos: bool = option_field(
        False,
        "each eos ends a document, and no document of a block sees another: sums, windows and positions begin anew",
    )


@dataclass
class PaddingOptions(FairseqDataclass):
    """The option of models of audio that keeps padding away from convolutions."""

    lineartime_mask_padding: bool = option_field(
        False,
        "zeros at padding in front of convolutions over time, of subsampling and of conformers, so that padding "
        "changes no real frame",
    )


def complete_checkpointing(args) -> None:
    """Let ``--offload-activations`` imply ``--checkpoint-activations``, as in fairseq's named architectures."""
    if safe_getattr(args, "offload_activations", False):
        args.checkpoint_activations = True


def check_positions(args) -> None:
    """Raise ValueError for more positions than fit into memory, of which fairseq makes a table, learned or not."""
    if safe_getattr(args, "no_token_positional_embeddings", False):
        return
    for name, width in _POSITIONS.items():
        longest = safe_getattr(args, name)
        if isinstance(longest, int):
            check_table(flag_of(name), longest, (longest, safe_getattr(args, width) or 1))


def plain_options(args) -> Namespace:
    """Options as plain values, without fairseq's enumerations, which cannot be pickled."""
    if OmegaConf.is_config(args):
        return Namespace(**OmegaConf.to_container(args, resolve=True, enum_to_str=True))
    return Namespace(**vars(args))


def plain_options_with_sizes(args, sizes: Iterable[str]) -> Namespace:
    """``plain_options``; ValueError unless each of the options ``sizes`` is a positive integer."""
    args = plain_options(args)
    for name in sizes:
        check_positive_int(flag_of(name), getattr(args, name))
    return args


def attention_config(
    attention: str,
    only: Sequence[str] | None = None,
    prefix: str | None = None,
    causal: bool = False,
    **defaults: Any,
) -> type:
    """A fairseq dataclass of the options that the mechanism ``attention`` declares, or only of those in ``only``.

    The option x of the mechanism NAME is ``--NAME-x``, or has another ``prefix``. A flag that is True by default is
    ``--NAME-no-x``. ``causal`` adds the options that only causal attention has. ``defaults`` replace the declared
    defaults.
    """
    options = options_of(attention, causal)
    values = {**options.defaults(), **defaults}
    declared = {name: described for name, described in options.described().items() if only is None or name in only}
    fields = [_field(prefix or attention, name, described, values[name]) for name, described in declared.items()]
    return make_dataclass(f"{camel_case(attention)}Options", fields, bases=(FairseqDataclass,))


def attention_options(args, attention: str, config: type, prefix: str | None = None) -> dict[str, Any]:
    """The options of ``attention`` that are fields of ``config``, as arguments of ``build_attention``.

    Raises:
        ValueError: a value is not allowed; the message names the command-line option.
    """
    options = options_of(attention, causal=True)
    parsed = {}
    for name, described in options.described().items():
        field_name, negated = _field_name(prefix or attention, name, described, options.defaults()[name])
        if hasattr(config, field_name):
            value = option(args, config, field_name)
            value = not value if negated else value
            parsed[name] = described.parse(flag_of(field_name), value)
    return parsed


def design_of(
    attention: str, options: dict[str, Any], causal: bool, max_tokens: int | None, two_sides: bool = False
) -> LayerDesign:
    """The design of a layer with ``attention`` and ``options`` from ``attention_options``.

    If it has no causal form, a causal layer has softmax attention. With ``two_sides``, an encoder and a decoder share
    the options, and each takes those that it has.
    """
    if causal and "causal" not in ATTENTIONS[attention].supports:
        return LayerDesign("softmax")
    own, described = dict(options), options_of(attention, causal).described()
    rotary = own.pop("rotary", False)
    own = {name: value for name, value in own.items() if name in described or not two_sides}
    return LayerDesign(attention, own, rotary=rotary, max_tokens=max_tokens)


@contextmanager
def errors_with_options(model: type, prefix: str, side: str) -> Iterator[None]:
    """Inside, an ``ArgumentError`` becomes a ValueError that names the command-line options of ``model``.

    ``prefix`` is the prefix of its attention's options, ``side`` (encoder or decoder) that of fairseq's layers.
    """
    try:
        yield
    except ArgumentError as error:
        raise ValueError(error.with_names(_typed_names(model_options(model), prefix, side))) from None


def _typed_names(options: Collection[str], prefix: str, side: str) -> dict[str, str]:
    """A dictionary from Python arguments, and "NAME=True" or "NAME=False" for flags, to command-line options."""
    heads, width = f"--{side}-attention-heads", f"--{side}-embed-dim"
    names = {
        **dict.fromkeys(("heads", "num_heads"), heads),
        **dict.fromkeys(("dim", "embed_dim"), width),
        "head_dim": f"{width} / {heads}",
        "expanded_dim": f"--{side}-ffn-embed-dim",
        "xformers_att_config": f"--{side}-xformers-att-config",
        "bias": "--flash-relative-bias",
        "max_tokens": flag_of(_longest(options, side)),
    }
    for name in options:
        argument = name.removeprefix(f"{prefix}_")
        names[name] = names[argument] = names[f"{argument}=True"] = flag_of(name)
        names[f"{argument.removeprefix('no_')}=False"] = flag_of(name)
    return names


def _longest(options: Collection[str], side: str) -> str:
    """The option of a model that limits the tokens of ``side``."""
    if side == "decoder":
        return "max_target_positions"
    return "max_positions" if "max_positions" in options else "max_source_positions"


def camel_case(name: str) -> str:
    """``daft_conv`` -> ``DaftConv``, for the names of classes."""
    return "".join(part.capitalize() for part in name.split("_"))


def _field(prefix: str, name: str, described: Option, default: Any) -> tuple[str, Any, Any]:
    """The field of an option, in the form that ``make_dataclass`` expects."""
    field_name, negated = _field_name(prefix, name, described, default)
    if described.type is bool:
        help = f"turn off: {described.help}" if negated else described.help
        return field_name, bool, option_field(False, help)
    # fairseq reads Optional[...], not "... | None".
    kind = ChoiceEnum(described.choices) if described.choices else Optional[described.type]  # noqa: UP045
    return field_name, kind, option_field(default, described.help)


def _field_name(prefix: str, name: str, described: Option, default: Any) -> tuple[str, bool]:
    """The name of an option's field, and whether the field is a flag that turns the option off."""
    negated = described.type is bool and default is True
    return f"{prefix}_no_{name}" if negated else f"{prefix}_{name}", negated
