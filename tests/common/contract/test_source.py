"""Decoder queries attend to a source through a state computed once: `source_state` and `attend_source`."""

import re

import pytest
import torch
from torch import Tensor

from common.attention import INPUTS, InnerAttention
from common.ops.shared.state import State
from tests.common.contract.mechanisms import (
    CASES,
    CHANNELS,
    DEFAULTS,
    LONGEST,
    Case,
    cases,
    cast,
    leaves,
    refused,
    rows,
    tensors,
    tolerance_of,
)
from tests.common.inputs import padding
from tests.common.properties import Elements
from tests.compare import assert_all_close, assert_close, assert_gradients_close, gradients


def is_source(case: Case) -> bool:
    """Whether the module of ``case`` supports a source, which rotated and causal modules do not."""
    return "source" in case.kind.supports and not (case.causal or case.rotary or case.image)


sources = [case for case in DEFAULTS if is_source(case)]
#: Masks of the source and of the queries, by name.
SIDES_OF_BOTH = (("none", "none"), ("left", "right"), ("right", "left"), ("holes", "both"), ("all", "left"))


def state_of(module: InnerAttention, inputs: dict, mask: Tensor | None = None) -> State:
    """The state of the source in ``inputs``."""
    extra = {name: inputs[name] for name in INPUTS if name in inputs}
    return module.source_state(inputs["k"], inputs["v"], mask, **extra)


def attended(
    module: InnerAttention, inputs: dict, key_mask: Tensor | None = None, query_mask: Tensor | None = None
) -> Tensor:
    """The output of the queries in ``inputs`` when they attend to the source in them through its state."""
    return module.attend_source(inputs["q"], state_of(module, inputs, key_mask), query_mask)


def of_source(mask: Tensor, inputs: dict) -> dict[str, Tensor]:
    """The masks of ``forward`` for the source in ``inputs``, and for its queries, none of which is padding."""
    q = inputs["q"]
    return {"key_padding_mask": mask, "query_padding_mask": torch.zeros(len(q), q.shape[2], dtype=torch.bool)}


def one_by_one(module: InnerAttention, q: Tensor, state: State) -> Tensor:
    """The queries as in decoding: each in a separate call, with its position."""
    steps = [
        module.attend_source(q[:, :, t : t + 1], state, positions=torch.full((len(q), 1), t)) for t in range(q.shape[2])
    ]
    return torch.cat(steps, dim=2)


@cases(sources)
@pytest.mark.parametrize("n, m", [(1, 7), (7, 1), (6, 11)])
def test_through_a_state_is_forward_and_the_formula(n, m, case):
    module = case.build()
    inputs = tensors(module, n, m)
    for keys, queries in SIDES_OF_BOTH:
        key_mask, query_mask = padding(keys, 2, m), padding(queries, 2, n)
        for call in (module, module.reference):
            out = attended(module, inputs, key_mask, query_mask)
            expected = call(**inputs, key_padding_mask=key_mask, query_padding_mask=query_mask)
            assert_close(f"out with {keys} and {queries}", out, expected)
            assert_gradients_close(out, expected, leaves(inputs, module))


@cases(case for case in CASES if is_source(case) and case.label != "default")
def test_through_a_state_is_forward_with_every_option(case):
    module = case.build()
    inputs, mask = tensors(module, 6, 11), padding("left", 2, 11)
    out, expected = attended(module, inputs, mask), module(**inputs, **of_source(mask, inputs))
    assert_close("out", out, expected)
    assert_gradients_close(out, expected, leaves(inputs, module))


@cases(sources)
def test_one_by_one_is_all_at_once(case):
    module = case.build()
    inputs, mask = tensors(module, 13, 7), padding("left", 2, 7)
    state = state_of(module, inputs, mask)
    assert_close("out", one_by_one(module, inputs["q"], state), module(**inputs, **of_source(mask, inputs)))


@cases(sources)
@pytest.mark.parametrize("side", ["left", "holes"])
def test_positions_are_counted_by_the_mask_or_given(side, case):
    """Positions at padding are not read."""
    module, mask = case.build(), padding(side, 2, 13)
    inputs = tensors(module, 13, 7)
    state, counted = state_of(module, inputs), (~mask).cumsum(1) - 1
    masked_positions = counted.masked_fill(mask, 10**6)
    out = module.attend_source(inputs["q"], state, mask, masked_positions)
    assert_close("out", out, module.attend_source(inputs["q"], state, mask))


@cases(sources)
def test_a_target_does_not_depend_on_later_ones(case):
    module = case.build()
    inputs = tensors(module, 13, 7)
    state = state_of(module, inputs)
    whole = module.attend_source(inputs["q"], state)
    for t in (1, 5, 12):
        assert_close(f"the first {t}", module.attend_source(inputs["q"][:, :, :t], state), whole[:, :, :t])
        later = torch.arange(13)[:, None] >= t
        for loud in (50 * inputs["q"], torch.full_like(inputs["q"], float("nan"))):
            changed = {**inputs, "q": torch.where(later, loud, inputs["q"])}
            for out in (module(**changed), module.attend_source(changed["q"], state)):
                assert_close(f"the first {t}, before others", out[:, :, :t], whole[:, :, :t], 1e-12)
        (gradient,) = gradients(whole[:, :, :t], [inputs["q"]], retain_graph=True)
        assert (gradient[:, :, t:] == 0).all() and (gradient[:, :, t - 1] != 0).any()


@cases(sources)
@pytest.mark.parametrize("side, poison", [("left", float("nan")), ("holes", float("inf")), ("all", 1e30)])
def test_what_stands_in_padding_of_the_source_changes_no_bit(side, poison, case):
    module, mask = case.build(torch.float32), padding(side, 2, 14)
    clean = tensors(module, 5, 14, dtype=torch.float32)
    hidden = mask[:, None, :, None]
    loud = {
        name: x if name == "q" else x.detach().masked_fill(hidden, poison).requires_grad_() for name, x in clean.items()
    }
    states = [state_of(module, inputs, mask) for inputs in (clean, loud)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    results = []
    for inputs, state in zip((clean, loud), states):
        out = module.attend_source(inputs["q"], state)
        results.append((out, *gradients(out, leaves(inputs, module).values())))
    for name, actual, expected in zip(("out", *leaves(clean, module)), *results):
        assert torch.equal(actual, expected) and torch.isfinite(actual).all(), name
    if side == "all":
        assert (results[0][0][0] == 0).all(), "no source gives 0"


@cases(sources)
@pytest.mark.parametrize("side", ["left", "holes"])
def test_each_source_is_what_it_is_alone_without_padding(side, case):
    module, mask = case.build(), padding(side, 3, 14)
    inputs = tensors(module, 5, 14, batch=3)
    out = attended(module, inputs, mask)
    for b in range(3):
        row = rows(inputs, slice(b, b + 1))
        alone = {name: x if name == "q" else x[:, :, ~mask[b]] for name, x in row.items()}
        assert_close(f"row {b}", out[b : b + 1], attended(module, alone))


@cases(sources)
def test_neighbours_in_the_batch_change_nothing(case):
    module = case.build()
    inputs = tensors(module, 5, 9, batch=3)
    loud = {name: x.detach().clone() for name, x in inputs.items()}
    for x in loud.values():
        x[0], x[2] = 1e3 * x[0], float("inf")
    alone = attended(module, rows(inputs, slice(1, 2)))
    assert_close("row 1", attended(module, inputs)[1:2], alone)
    assert_close("row 1 beside infinite rows", attended(module, loud)[1:2], alone)


@cases(sources)
@torch.no_grad()
def test_hypotheses_of_a_sentence_share_its_state(case):
    """Beam search repeats and reorders the state by one index_select; reading the state does not change it."""
    module, order = case.build(), torch.tensor([1, 1, 0])
    inputs, mask = tensors(module, 5, 9), padding("left", 2, 9)
    state = state_of(module, inputs, mask)
    before = {name: x.clone() for name, x in state.items()}
    q = tensors(module, 5, 9, batch=3, seed=1)["q"]
    out = module.attend_source(q, {name: x.index_select(0, order) for name, x in state.items()})
    whole = {**rows(inputs, order), "q": q}
    assert_close("out", out, module(**whole, **of_source(mask[order], whole)))
    module.attend_source(inputs["q"], state)
    assert list(state) == list(before) and all(torch.equal(state[name], before[name]) for name in state)


@cases(sources)
@torch.no_grad()
def test_the_state_and_its_cost_do_not_depend_on_the_source(case):
    """Counted memory and time: proportional to the source once, and constant for each query."""
    module = case.build(torch.float32, max_tokens=640)
    shapes, created, read = [], [], []
    for m in (40, 320, 640):
        inputs = tensors(module, 3, m, batch=1, dtype=torch.float32, grad=False)
        with Elements() as counted:
            state = state_of(module, inputs)
        created.append(counted.total)
        shapes.append({name: tuple(x.shape) for name, x in state.items()})
        with Elements() as counted:
            module.attend_source(inputs["q"], state)
        read.append(counted.total)
    assert shapes[0] == shapes[1] == shapes[2] and read[0] == read[1] == read[2]
    assert created[2] <= 2.05 * created[1]


@cases(sources)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype, case):
    """Results are compared with float64 on the same numbers; state sums are float32, outputs have the query dtype."""
    module, exact = case.build(dtype), case.build(dtype).double()
    inputs, mask = tensors(module, 6, 21, dtype=dtype), padding("left", 2, 21)
    state = state_of(module, inputs, mask)
    assert all(x.dtype == torch.float32 and len(x) == 2 for x in state.values())
    out, wide = module.attend_source(inputs["q"], state), cast(inputs, torch.float64)
    expected, tolerance = exact(**wide, **of_source(mask, wide)), tolerance_of(module, dtype)
    assert out.dtype == dtype
    assert_close("out", out, expected, tolerance)
    names, actual = list(leaves(inputs, module)), gradients(out, leaves(inputs, module).values())
    assert all(gradient.dtype == dtype for gradient in actual)
    assert_all_close(names, actual, gradients(expected, leaves(wide, exact).values()), tolerance)


@cases(sources)
def test_autocast_leaves_the_state_in_float32(case):
    """This holds whether autocast is on when the state is created or when it is read."""
    module = case.build(torch.float32, std=0.3)
    halves = tensors(module, 6, 2048 if "max_tokens" not in module.needs else LONGEST, dtype=torch.bfloat16, grad=False)
    inputs = cast(halves, torch.float32)
    expected = module(**inputs)
    for autocast_state, read in ((True, True), (True, False), (False, True)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast_state):
            state = state_of(module, halves if autocast_state else inputs)
        assert all(x.dtype == torch.float32 for x in state.values())
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=read):
            out = module.attend_source((halves if read else inputs)["q"], state)
        assert out.dtype == (torch.bfloat16 if read else torch.float32)
        assert_close("out", out.float(), expected, tolerance_of(module, torch.bfloat16))


@cases(sources)
@torch.no_grad()
def test_it_compiles_into_one_graph(case):
    torch._dynamo.reset()
    module = case.build(torch.float32)
    inputs = tensors(module, 6, 11, dtype=torch.float32, grad=False)
    mask, positions = padding("left", 2, 11), torch.arange(6).expand(2, -1)

    def both(inputs: dict) -> Tensor:
        return module.attend_source(inputs["q"], state_of(module, inputs, mask), positions=positions)

    compiled = torch.compile(both, backend="eager", fullgraph=True)
    assert_close("out", compiled(inputs), both(inputs))


@cases(sources)
def test_empty_batches_and_the_meta_device_have_shapes(case):
    module = case.build()
    inputs = tensors(module, 5, 7, batch=0)
    assert attended(module, inputs, torch.zeros(0, 7, dtype=torch.bool)).shape == (0, *inputs["q"].shape[1:])
    inputs = {name: x.to("meta") for name, x in tensors(module, 5, 7).items()}
    out = attended(module.to("meta"), inputs, torch.zeros(2, 7, dtype=torch.bool, device="meta"))
    assert out.is_meta and out.shape == inputs["q"].shape


@cases(case for case in DEFAULTS if not (is_source(case) or case.image))
def test_others_have_no_state_of_a_source(case):
    """Softmax attention, causal attention, and wrappers around another attention."""
    module, x = case.build(), torch.randn(2, 2, 3, CHANNELS)
    around = case.rotary or case.forget != "none"
    argument = "causal" if "source" in case.kind.supports and not around else "attention"
    with refused(argument):
        module.source_state(x, x)
    with refused(argument):
        module.attend_source(x, {})


@cases(sources)
def test_tensors_and_masks(case):
    module = case.build()
    inputs = tensors(module, 5, 7, grad=False)
    for name in [name for name in inputs if name != "q"]:
        x = inputs[name]
        for wrong in (x[0], x.tolist(), x.long(), x[:1], x[:, :1], x[:, :, 1:], x[..., :0], x.float(), x.to("meta")):
            with refused("(k|v|source_q)"):
                state_of(module, {**inputs, name: wrong})
    state = state_of(module, inputs)
    for wrong in (inputs["q"][0], inputs["q"].tolist(), inputs["q"].long(), inputs["q"][:, :, :0]):
        with refused("q"):
            module.attend_source(wrong, state)
    masks = (torch.zeros(2, 9), torch.zeros(2, 9, dtype=torch.bool), [[False] * 5] * 2, torch.zeros(1, 5).bool())
    for wrong in masks:
        with refused("key_padding_mask"):
            state_of(module, inputs, wrong)
        with refused("query_padding_mask"):
            module.attend_source(inputs["q"], state, wrong)
    for wrong in (3, [[0] * 5] * 2, torch.zeros(2, 4).long(), torch.zeros(5).long(), torch.zeros(2, 5)):
        with refused("positions"):
            module.attend_source(inputs["q"], state, positions=wrong)
    with refused("positions"):
        module.attend_source(inputs["q"], state, positions=torch.zeros(2, 5, device="meta").long())


@cases(sources)
def test_states(case):
    module = case.build()
    inputs = tensors(module, 5, 7, grad=False)
    state = state_of(module, inputs)
    wrong = [None, {}, [1], tuple(state.values()), {"k": 1}, {**state, "more": inputs["q"]}]
    wrong += [{name: x for name, x in state.items() if name != missing} for missing in state]
    for whole in wrong:
        with refused("state"):
            module.attend_source(inputs["q"], whole)
    for name, x in state.items():
        for entry in (1.0, None, x[:1], x[None], x[:, :1], x[:, :, :1], x.half(), x.to(torch.int16), x.to("meta")):
            with refused(re.escape(f"state['{name}']")):
                module.attend_source(inputs["q"], {**state, name: entry})
    other = tensors(module, 5, 7, batch=3, grad=False)["q"]
    with refused(r"state\['.*'\]"):
        module.attend_source(other, state)


@cases(case for case in sources if "max_tokens" in case.kind.needs)
def test_more_tokens_than_the_longest_length(case):
    """The limit applies to the source and to the position of a query."""
    module = case.build()
    inputs = tensors(module, 1, LONGEST)
    state = state_of(module, inputs)
    long = tensors(module, 1, LONGEST + 1)
    with refused("the input"):
        state_of(module, long)
    state_of(module, long, padding("left", 2, LONGEST + 1))
    with refused("the input"):
        module.attend_source(long["k"], state)
    last = torch.full((2, 1), LONGEST - 1)
    module.attend_source(inputs["q"], state, positions=last)
    with refused("the input"):
        module.attend_source(inputs["q"], state, positions=last + 1)
    with refused("positions"):
        module.attend_source(inputs["q"], state, positions=torch.tensor([[0], [-1]]))
