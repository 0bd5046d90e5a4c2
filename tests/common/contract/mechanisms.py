"""Every mechanism with small sizes, and inputs for it, derived from what the mechanism declares.

A new mechanism is tested without an edit here. Its special settings are in ``exceptions.py``, or in variables of
``MODULE_case.py`` next to the module of an external mechanism. If options only matter together, ``VARIANTS``
adds them, a dict from a label to options. ``WITHOUT``, a dict from a promise to a reason, removes promises.
``NOT_CAUSAL``, a dict from a label "option=value" to a reason, lists options refused in causal attention. ``SMALL``,
a dict of options, replaces ``COUNT`` where setting every option to it would test little, and ``LONG`` replaces 65
where setting every option to it would take too long on thousands of tokens.
"""

import functools
import importlib.util
import inspect
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from common.attention import INPUTS, InnerAttention, Option, RotaryAttention, build_attention, supporting
from common.modules.forget_gate import FORGETS
from tests.common.contract.exceptions import EXCEPTIONS
from tests.common.contract.registry import KINDS
from tests.compare import TOLERANCES

#: H, d, and the longest sequence in the tests with small inputs.
HEADS, CHANNELS, LONGEST = 2, 4, 41
#: Value of every integer option (tokens in a chunk, row or window, or a rank): odd, and shorter than most inputs.
COUNT = 5
#: Other values for options of each type; values that an option refuses are skipped.
OTHER_VALUES = {int: (1, 65, None), float: (0.5, float("inf"), None), bool: (False, True), str: ()}
#: The mechanisms that are also tested after a short convolution: one with queries and keys of different widths, and
#: one that needs the tokens themselves.
WITH_SHORT_CONV = ("daft_conv", "rfa_gate")
#: The mechanisms that are also tested with rotary positions: one for self-attention only, and one for cross-attention.
#: The rotation does not depend on the mechanism; ``test_rotary.py`` tests that it fits every mechanism.
WITH_ROTARY = ("local", "linear")
#: The bidirectional mechanisms that TorchScript supports; a named image model promises it.
IN_TORCHSCRIPT = supporting("torchscript")


def is_linear(attention: InnerAttention | type[InnerAttention]) -> bool:
    """Whether a mechanism declares time and memory linear in the tokens, hence a decoding state of constant size."""
    return attention.linear_cost


def takes_images(kind: type[InnerAttention]) -> bool:
    """Whether the mechanism can be built for images, with ``spatial_dims=2``."""
    return "bidirectional" in kind.supports


def takes_images_alone(kind: type[InnerAttention]) -> bool:
    """Whether every call needs the height and width of an image."""
    return "spatial_shape" in kind.needs


class Case(NamedTuple):
    """A mechanism with options."""

    name: str
    causal: bool
    label: str = "default"
    options: dict[str, Any] = {}
    rotary: bool = False  # in RotaryAttention
    image: bool = False
    short_conv: int | None = None
    forget: str = "none"

    @property
    def kind(self) -> type[InnerAttention]:
        """The mechanism's class."""
        return KINDS[self.name]

    def build(
        self,
        dtype: torch.dtype = torch.float64,
        std: float = 0.5,
        max_tokens: int = LONGEST,
        channels: int = CHANNELS,
    ) -> InnerAttention:
        """Build the attention in evaluation mode, with parameters large enough to affect the output."""
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(1)  # for buffers that are drawn at random
            module = self.new(max_tokens, channels)
        generator = torch.Generator().manual_seed(1)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=std, generator=generator)
        if self.rotary:
            module = RotaryAttention(module, channels)
        return module.to(dtype).eval()

    def new(self, max_tokens: int = LONGEST, channels: int = CHANNELS) -> InnerAttention:
        """Build the attention as its constructor leaves it, without rotary positions."""
        shape = {"num_heads": HEADS, "head_dim": channels, "max_tokens": max_tokens, "spatial_dims": 1 + self.image}
        options = {**counts(self.kind), **_declared(self.name, "SMALL"), **self.options}
        around = {"forget": self.forget, "short_conv": self.short_conv}
        return build_attention(self.name, self.causal, **shape, **around, **options)

    def __str__(self) -> str:
        kinds = [name for name in ("rotary", "image", "short_conv") if getattr(self, name)]
        kinds += [] if self.forget == "none" else [f"forget_{self.forget}"]
        return "-".join(
            [self.name, "causal" if self.causal else "full", *kinds] + ([] if self.label == "default" else [self.label])
        )


def counts(kind: type[InnerAttention], value: int = COUNT) -> dict[str, Any]:
    """``value`` for every integer option that allows it."""
    described = kind.Options.described()
    return {name: value for name, x in described.items() if x.type is int and _allows(x, name, value)}


def long_options(kind: type[InnerAttention]) -> dict[str, Any]:
    """Options for thousands of tokens: 65 for every integer unless the case overrides it."""
    return {**counts(kind, 65), **_declared(kind.name, "LONG")}


def _other_values(name: str, described: Option, default: Any) -> Iterable[Any]:
    """Values of one option other than its default and ``COUNT``."""
    for value in described.choices or OTHER_VALUES[described.type]:
        if _allows(described, name, value) and value != (COUNT if described.type is int else default):
            yield value


def _allows(described: Option, name: str, value: Any) -> bool:
    try:
        described.parse(name, value)
    except ValueError:
        return False
    return True


def _variants(kind: type[InnerAttention]) -> dict[str, dict[str, Any]]:
    """Options by label: the default, each other value of each option by itself, and the case's variants."""
    variants: dict[str, dict[str, Any]] = {"default": {}}
    defaults = kind.Options.defaults()
    for name, described in kind.Options.described().items():
        for value in _other_values(name, described, defaults[name]):
            variants[f"{name}={value}"] = {name: value}
    return {**variants, **_declared(kind.name, "VARIANTS")}


def _declared(name: str, what: str) -> dict[str, Any]:
    """The dict ``what`` of the mechanism's exceptions, or an empty dict."""
    case = f"{KINDS[name].__module__}_case"
    if importlib.util.find_spec(case):
        return getattr(importlib.import_module(case), what, {})
    return EXCEPTIONS.get(name, {}).get(what, {})


def not_causal() -> list[tuple[str, str]]:
    """Mechanisms, and options "option=value", that causal attention refuses."""
    return [(name, label) for name in KINDS for label in _declared(name, "NOT_CAUSAL")]


def without(name: str) -> dict[str, str]:
    """The promises that a mechanism cannot keep, with the reasons."""
    return _declared(name, "WITHOUT")


def takes_one_mask(case: Case) -> bool:
    """Whether a call may pass only a mask of the keys, or only one of the queries.

    Not where queries may be other tokens than the keys and one that is padding changes other outputs: by its flow, or
    because positions are counted.
    """
    other_tokens = not case.causal and "cross" in case.kind.supports
    return not (other_tokens and (case.rotary or "one_mask" in without(case.name)))


def refused(argument: str):
    """Expect a ValueError about ``argument`` that states what is allowed."""
    return pytest.raises(ValueError, match=rf"(?s)^{argument}(?!\w).*allowed")


def _cases(kind: type[InnerAttention]) -> Iterable[Case]:
    for causal in (False, True):
        supported = {"causal"} if causal else {"bidirectional", "source"}
        if takes_images_alone(kind) or not supported & kind.supports:
            continue
        refused = _declared(kind.name, "NOT_CAUSAL") if causal else {}
        variants = {label: options for label, options in _variants(kind).items() if label not in refused}
        yield from (Case(kind.name, causal, label, options) for label, options in variants.items())
        if kind.name in WITH_ROTARY:
            yield Case(kind.name, causal, rotary=True)
    if kind.name in WITH_SHORT_CONV:
        yield Case(kind.name, True, short_conv=3)
    if "forget" in kind.supports:
        yield from (Case(kind.name, True, forget=forget) for forget in FORGETS)
    image = Case(kind.name, False, image=True)
    if takes_images_alone(kind):
        yield from (image._replace(label=label, options=options) for label, options in _variants(kind).items())
    elif takes_images(kind) and "spatial_shape" in image.build().needs:
        yield image  # for all other mechanisms, an image is the sequence of its tokens


#: Every mechanism with every option.
CASES = [case for kind in KINDS.values() for case in _cases(kind)]
#: Every mechanism with its default options, and some with rotary positions, for images, after a short convolution, or
#: with sums that forget.
DEFAULTS = [case for case in CASES if case.label == "default"]
#: Every mechanism with only its default options.
PLAIN = [case for case in DEFAULTS if not case.rotary and case.short_conv is None and case.forget == "none"]
#: The cases without those that only have another number, which goes through the same code.
PATHS = [case for case in CASES if not re.fullmatch(r"\w+=[\d.]+", case.label)]
#: Every mechanism with every option but the defaults.
OPTIONS = [case for case in CASES if case.label != "default"]


def cases(chosen: Iterable[Case] = DEFAULTS, causal: bool | None = None):
    """Decorator that runs the test for each of the ``chosen`` cases, passed as the argument ``case``."""
    wanted = [case for case in chosen if causal is None or case.causal == causal]
    return pytest.mark.parametrize("case", wanted, ids=str)


def tensors(
    module: InnerAttention,
    n: int,
    m: int | None = None,
    *,
    batch: int = 2,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    scale: float = 1.0,
    grad: bool = True,
    channels: int = CHANNELS,
) -> dict[str, Any]:
    """The keyword arguments of ``module`` for n queries and m keys: leaf tensors, and an image's height and width."""
    generator = torch.Generator().manual_seed(seed)
    widths, m = module.projections(channels), n if m is None else m

    def leaf(*shape: int) -> Tensor:
        x = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(dtype).requires_grad_(grad)

    lengths = {"q": n, "k": m, "v": m}
    leaf_tensors = {x: leaf(batch, HEADS, lengths[x], widths[x]) if x in widths else None for x in lengths}
    available = {
        "x": leaf(batch, n, HEADS * channels),
        "spatial_shape": image_shape(n),
        "source_q": leaf(batch, HEADS, m, channels),
    }
    assert {*available, "log_decay"} == set(INPUTS), f"{set(INPUTS) - set(available)} is not made here"
    return {**leaf_tensors, **module.inputs(**available)}


def arguments_of_op(case: Case, module: InnerAttention, monkeypatch: pytest.MonkeyPatch, **call: Any) -> dict[str, Any]:
    """The keyword arguments that ``module(**call)`` passes to the function that the class of ``case`` declares."""
    kind, calls = case.kind, []

    @functools.wraps(kind.op)
    def recorded(*args, **kwargs):
        calls.append(inspect.signature(recorded).bind(*args, **kwargs).arguments)
        return recorded.__wrapped__(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "op", staticmethod(recorded))
        module(**call)
    return calls[-1]


def image_shape(n: int) -> tuple[int, int]:
    """Height and width of n tokens, as square as possible."""
    height = max(x for x in range(1, int(n**0.5) + 1) if n % x == 0)
    return height, n // height


def leaves(inputs: dict[str, Any], module: nn.Module) -> dict[str, Tensor]:
    """Everything that an output may depend on, by name: the tensors of ``inputs`` and the parameters of ``module``."""
    named_tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    return {**named_tensors, **dict(module.named_parameters())}


def at(inputs: dict[str, Any], tokens: Any) -> dict[str, Any]:
    """Select from ``inputs`` the tokens in a slice or at indices."""
    dim = {"q": 2, "k": 2, "v": 2, "x": 1, "source_q": 2}

    def some(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x[:, :, tokens] if dim[name] == 2 else x[:, tokens]

    return {name: some(name, x) for name, x in inputs.items()}


def rows(inputs: dict[str, Any], which: Any) -> dict[str, Any]:
    """Select rows of the batch from ``inputs``."""
    return {name: x[which] if isinstance(x, Tensor) else x for name, x in inputs.items()}


def cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Copy the inputs to new leaves of ``dtype``."""
    return {
        name: x.detach().to(dtype).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for name, x in inputs.items()
    }


def both(mask: Tensor | None) -> dict[str, Tensor | None]:
    """``mask`` of the keys and of the queries."""
    return {"key_padding_mask": mask, "query_padding_mask": mask}


def run_in_parts(module: InnerAttention, inputs: dict[str, Any], parts: Iterable[int], mask: Tensor | None = None):
    """Run ``extend`` over parts of the given lengths: the concatenated outputs, and the state after each part."""
    outputs, states, begin, state = [], [], 0, None
    for length in parts:
        part = slice(begin, begin + length)
        out, state = module.extend(
            **at(inputs, part), padding_mask=None if mask is None else mask[:, part], state=state
        )
        outputs.append(out)
        states.append(state)
        begin += length
    return torch.cat(outputs, dim=2), states


def tolerance_of(module: nn.Module, dtype: torch.dtype) -> float:
    """The tolerance for ``dtype``, doubled if layers inside the module round to it."""
    return TOLERANCES[dtype] * (2 if list(module.parameters()) else 1)
