"""Any invalid argument of a mechanism raises a ValueError that begins with the argument's name."""

import re

import pytest
import torch

from common.attention import FACTS, SUPPORTS, build_attention
from tests.common.contract.mechanisms import (
    CASES,
    CHANNELS,
    DEFAULTS,
    HEADS,
    LONGEST,
    PLAIN,
    Case,
    arguments_of_op,
    at,
    both,
    cases,
    counts,
    is_linear,
    not_causal,
    refused,
    takes_images,
    takes_images_alone,
    tensors,
    without,
)
from tests.common.contract.registry import KINDS
from tests.compare import assert_close

names = pytest.mark.parametrize("name", KINDS)
NOT_CAUSAL = {"bidirectional", "images", "source"}
#: Values of each option type that every option of the type refuses.
WRONG_OPTIONS = {
    str: ("no such value", None, 1),
    bool: (1, 0, "yes", None),
    int: (-1, 2.5, "4", True),
    float: (0.0, -1.0, float("nan"), "x"),
}
#: Those of a mechanism that is one function: its options may be any numbers.
WRONG_OF_FUNCTIONS = {**WRONG_OPTIONS, int: (2.5, "4", True), float: (float("nan"), "x")}
#: The tensor arguments of a function that hold tokens; ``test_tensors`` tests their shapes.
TOKENS = ("q", "k", "v", "x", "source_q")
FLOOR = {"num_heads": HEADS, "head_dim": CHANNELS, "max_tokens": LONGEST}


def build(name, **changes):
    kind = KINDS[name]
    causal = not kind.supports & NOT_CAUSAL
    dims = 2 if takes_images_alone(kind) else 1
    return build_attention(name, **{"causal": causal, "spatial_dims": dims, **FLOOR, **counts(kind), **changes})


@names
def test_declarations_are_of_known_words(name):
    kind = KINDS[name]
    assert kind.supports <= set(SUPPORTS) and kind.supports & {"causal", *NOT_CAUSAL} and kind.name == name
    for described in kind.Options.described().values():
        assert described.help and described.type in (str, int, float, bool)
    assert kind.Options(**kind.Options.defaults()) == kind.Options()


@names
@pytest.mark.parametrize("fact", FACTS)
def test_facts(fact, name):
    for wrong in (0, -1, 2.0, True, "4"):
        with refused(fact):
            build(name, **{fact: wrong})
    if fact in KINDS[name].needs:
        with refused(fact):
            build(name, **{fact: None})
    else:
        build(name, **{fact: None})


@pytest.mark.parametrize(("name", "label"), [pair for pair in not_causal() if "=" in pair[1]])
def test_what_causal_attention_refuses(name, label):
    option, value = label.split("=")
    build(name, causal=False, **{option: value})
    with refused(option):
        build(name, causal=True, **{option: value})


@names
def test_what_is_not_supported(name):
    kind = KINDS[name]
    for causal, words in ((True, {"causal"}), (False, NOT_CAUSAL)):
        if not words & kind.supports:
            with refused("causal"):
                build(name, causal=causal)
    unknown = {0, 3} | ({1} if takes_images_alone(kind) else set()) | (set() if takes_images(kind) else {2})
    for dims in unknown:
        with refused("spatial_dims"):
            build(name, spatial_dims=dims)


@pytest.mark.parametrize(
    "name", [name for name, kind in KINDS.items() if takes_images(kind) and not takes_images_alone(kind)]
)
def test_an_image_is_the_sequence_of_its_tokens_unless_its_shape_is_asked_for(name):
    sequence, image = (build(name, causal=False, spatial_dims=dims) for dims in (1, 2))
    if "spatial_shape" not in image.needs:
        image.load_state_dict(sequence.state_dict())
        inputs = tensors(sequence, 6, dtype=torch.float32)
        assert torch.equal(image.eval()(**inputs), sequence.eval()(**inputs))


@names
def test_options(name):
    with pytest.raises(ValueError, match=f"(?s)attention '{name}'.*'no_such_option'.*allowed"):
        build(name, no_such_option=1)
    wrong = WRONG_OF_FUNCTIONS if hasattr(KINDS[name], "function") else WRONG_OPTIONS
    for option, described in KINDS[name].Options.described().items():
        for value in wrong[described.type]:
            with refused(option):
                build(name, **{option: value})


#: The same for functions, where a numeric option may be 0, and any value can stand for True or False.
WRONG_ARGUMENTS = {**WRONG_OPTIONS, float: (-1.0, float("nan")), bool: ()}


@cases(case for case in PLAIN if case.kind.__module__.startswith("common."))
def test_the_function_refuses_what_the_module_does(case, monkeypatch):
    """Functions of common.ops without their module: options, another direction, parameters of other shapes."""
    module, op = case.build(), case.kind.op
    arguments = arguments_of_op(case, module, monkeypatch, **tensors(module, 6, grad=False))
    for option, described in case.kind.Options.described().items():
        for value in WRONG_ARGUMENTS[described.type] if option in arguments else ():
            with refused(option):
                op(**{**arguments, option: value})
    if not case.kind.supports & NOT_CAUSAL and "causal" in arguments:
        with pytest.raises(ValueError, match="causal.*allowed"):
            op(**{**arguments, "causal": False})

    def is_refused(name: str, x: torch.Tensor) -> bool:
        try:
            op(**{**arguments, name: x})
        except ValueError as error:
            return "allowed" in str(error)
        except RuntimeError:  # torch's own error: at least one of the shorter tensors must be refused by our checks
            return False
        return False

    for name, x in arguments.items():  # a vector may hold one number per head, or a single one for all heads
        if isinstance(x, torch.Tensor) and x.dim() > 1 and name not in TOKENS:
            assert is_refused(name, x[None]), f"{name} with a dimension more"
            shorter = [x.narrow(dim, 0, x.shape[dim] - 1) for dim in range(x.dim())]
            assert not x.is_floating_point() or any(is_refused(name, y) for y in shorter), f"a shorter {name}"


def wrong_tensors(inputs: dict, causal_or_self: bool):
    """Changes of ``inputs``, each of which introduces one error."""
    names = [x for x in ("q", "k", "v", "x", "source_q") if inputs.get(x) is not None]
    for which in names:
        x = inputs[which].detach()
        yield {which: x[0]}
        yield {which: x[None]}
        yield {which: x.tolist()}
        yield {which: x.long()}
        if which != "x":
            yield {which: x[..., :0]}
        if len(names) == 1:  # there is no other tensor whose size it must match
            continue
        yield {which: x[:1]}
        yield {which: x.to("meta")}
        if which != "x":  # autocast may leave it in another dtype
            yield {which: x.float()}
            yield {which: x[:, :1]}
        if which in ("k", "v", "source_q") or causal_or_self:
            yield {which: x[..., 1:, :]}
    yield {which: inputs[which][:, :, :0].detach() for which in ("q", "k", "v") if inputs[which] is not None}


@cases(DEFAULTS)
def test_tensors(case):
    """The message may begin with the name of a tensor that the wrong one does not match."""
    module = case.build()
    inputs = tensors(module, 6)
    for change in wrong_tensors(inputs, case.causal or "cross" not in case.kind.supports):
        with refused("(q|k|v|x|source_q|the input|spatial_shape)"):
            module(**{**inputs, **change})
        if case.causal:
            with refused("(q|k|v|x|the input)"):
                module.extend(**{**inputs, **change})


def wrong_masks(n: int):
    """Masks that do not match two rows of n tokens."""
    yield torch.zeros(2, n)
    yield torch.zeros(2, n, dtype=torch.uint8)
    yield torch.zeros(2, n, dtype=torch.long)
    yield [[False] * n] * 2
    yield torch.zeros(1, n, dtype=torch.bool)
    yield torch.zeros(2, n - 1, dtype=torch.bool)
    yield torch.zeros(2, n + 1, dtype=torch.bool)
    yield torch.zeros(n, dtype=torch.bool)
    yield torch.zeros(n, n, dtype=torch.bool)
    yield torch.zeros(2, HEADS, n, dtype=torch.bool)
    yield torch.zeros(2, n, dtype=torch.bool, device="meta")


@cases(DEFAULTS)
def test_masks(case):
    module = case.build()
    inputs = tensors(module, 6)
    for mask in wrong_masks(6):
        for argument in ("key_padding_mask", "query_padding_mask"):
            with refused(argument):
                module(**inputs, **{argument: mask})
        if case.causal:
            with refused("padding_mask"):
                module.extend(**inputs, padding_mask=mask)


@cases((case for case in DEFAULTS if not case.image), causal=False)
def test_extend_of_what_is_not_causal(case):
    module = case.build()
    with refused("causal"):
        module.extend(**tensors(module, 3))


@cases(DEFAULTS, causal=True)
def test_states(case):
    module = case.build()
    inputs = tensors(module, 6)
    _, state = module.extend(**inputs)
    wrong = [{}, [1], tuple(state.values()), {"k": 1}, {**state, "more": state}]
    wrong += [{name: tensor for name, tensor in state.items() if name != missing} for missing in state]
    for whole in wrong:
        with refused("initial_state"):
            module.extend(**inputs, state=whole)
    for name, tensor in state.items():
        entries = [1.0, None, tensor[:1], tensor[None], tensor.to(torch.int16), tensor.to("meta")]
        if is_linear(module) and tensor.is_floating_point():
            entries.append(tensor.half())  # rounding would make the sum wrong
        for entry in entries:
            with refused(re.escape(f"initial_state['{name}']")):
                module.extend(**inputs, state={**state, name: entry})
    module.extend(**inputs, state=state)


@cases(case for case in CASES if "max_tokens" in case.kind.needs and case.label == "default" and not case.rotary)
def test_more_tokens_than_the_longest_length(case: Case):
    """The limit applies to real tokens: a batch may be padded beyond it."""
    module = case.build()
    module(**tensors(module, LONGEST))
    with refused("the input"):
        module(**tensors(module, LONGEST + 1))
    if case.causal:
        _, state = module.extend(**tensors(module, LONGEST))
        with refused("the input"):
            module.extend(**tensors(module, 1), state=state)
    if "padding_beyond_the_longest" in without(case.name):
        return
    mask = (torch.arange(2 * LONGEST) % 2 == 1).expand(2, -1)
    inputs = tensors(module, 2 * LONGEST)
    assert_close("real tokens", module(**inputs, **both(mask))[:, :, ::2], module(**at(inputs, slice(None, None, 2))))
    with refused("the input"):
        module(**inputs, **both(mask & (torch.arange(2 * LONGEST) != 1)))


@cases(case for case in DEFAULTS if case.image)
def test_shapes_of_images(case):
    module = case.build()
    inputs = tensors(module, 6)
    for wrong in (None, (2, 4), (6,), (1, 2, 3)):
        with refused("spatial_shape"):
            module(**{**inputs, "spatial_shape": wrong})


@cases((case for case in DEFAULTS if "cross" in case.kind.supports), causal=True)
def test_keys_of_another_sequence_in_causal_attention(case):
    module = case.build()
    with refused("k"):
        module(**tensors(module, 7, 2))
