"""Every mechanism agrees with its literal reference formula, in outputs and in all gradients."""

import torch

from tests.common.contract.mechanisms import (
    DEFAULTS,
    OPTIONS,
    PLAIN,
    Case,
    both,
    cases,
    cast,
    is_linear,
    leaves,
    long_options,
    run_in_parts,
    takes_one_mask,
    tensors,
    tolerance_of,
)
from tests.common.inputs import padding
from tests.compare import assert_all_close, assert_close, assert_gradients_close, gradients

#: One token, a chunk of five plus one, and a prime.
LENGTHS = (1, 5, 6, 17)


def assert_agrees(case: Case, n: int, side: str = "none", training: bool = False) -> None:
    """Check ``case`` against its reference in float64, for n tokens with padding on one side."""
    module = case.build().train(training)
    inputs, masks = tensors(module, n), both(padding(side, 2, n))
    wanted = leaves(inputs, module)
    torch.default_generator.manual_seed(3)
    out = module(**inputs, **masks)
    torch.default_generator.manual_seed(3)
    expected = module.reference(**inputs, **masks)
    assert_close(f"out of {n} tokens", out, expected)
    assert_gradients_close(out, expected, wanted)


@cases(DEFAULTS)
def test_lengths(case):
    for n in LENGTHS:
        assert_agrees(case, n)


@cases(DEFAULTS)
def test_padding(case):
    """For other sides, ``test_independence.py`` shows that each row is what it is alone."""
    for side in ("holes", "all"):
        assert_agrees(case, 12, side)


@cases(DEFAULTS)
def test_masks_of_keys_and_of_queries_are_two_things(case):
    module = case.build()
    inputs = tensors(module, 12)
    two = {"key_padding_mask": padding("left", 2, 12), "query_padding_mask": padding("right", 2, 12)}
    alone = [{name: mask} for name, mask in two.items()] if takes_one_mask(case) else []
    for masks in (*alone, two):
        out, expected = module(**inputs, **masks), module.reference(**inputs, **masks)
        assert_close(f"out with {list(masks)}", out, expected)
        assert_gradients_close(out, expected, leaves(inputs, module))


@cases(OPTIONS)
def test_options(case):
    """Also in training mode, where random draws come from torch's generator."""
    assert_agrees(case, 13, "left")
    assert_agrees(case, 6, training=True)


@cases(DEFAULTS)
def test_dtypes(case):
    """Results are compared with float64 on the same numbers and have the dtype of the inputs."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_precise(case, dtype)


def assert_precise(case: Case, dtype: torch.dtype) -> None:
    module, exact = case.build(dtype), case.build(dtype).double()
    inputs = tensors(module, 21, dtype=dtype)
    masks = both(padding("right", 2, 21))
    out, doubled = module(**inputs, **masks), cast(inputs, torch.float64)
    expected = exact(**doubled, **masks)
    assert out.dtype == dtype
    tolerance = tolerance_of(module, dtype)
    assert_close("out", out, expected, tolerance)
    names, actual = list(leaves(inputs, module)), gradients(out, leaves(inputs, module).values())
    assert all(gradient.dtype == dtype for gradient in actual)
    assert_all_close(names, actual, gradients(expected, leaves(doubled, exact).values()), tolerance)


@cases(DEFAULTS)
def test_the_default_dtype_of_torch_changes_no_bit(case):
    """A constant in a formula must not bring in the default dtype."""
    module, mask = case.build(torch.float32), padding("left", 2, 13)
    inputs = tensors(module, 13, dtype=torch.float32)

    def run() -> list[torch.Tensor]:
        out = module(**inputs, **both(mask))
        decoded = run_in_parts(module, inputs, (4, 1, 8), mask)[0] if case.causal and not case.image else out
        return [module(**inputs), out, decoded, *gradients(out, leaves(inputs, module).values())]

    expected = run()
    try:
        torch.set_default_dtype(torch.float64)
        actual = run()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(x.dtype == torch.float32 and torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


@cases(case for case in PLAIN if not case.image)
def test_long_sums_keep_their_precision_under_autocast(case):
    """Sums over thousands of tokens exceed bfloat16's 8 bits; superlinear mechanisms are tested with fewer tokens."""
    long = 8192 if is_linear(case.kind) else 1024
    module = case._replace(options=long_options(case.kind)).build(torch.float32, 0.3, long)
    inputs = cast(tensors(module, long, batch=1, dtype=torch.bfloat16), torch.float32)
    expected, tolerance = module(**inputs), tolerance_of(module, torch.bfloat16)
    halves = {
        name: x if name == "x" else y
        for name, x, y in zip(inputs, inputs.values(), cast(inputs, torch.bfloat16).values())
    }
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(**halves)
    assert_close("out", out, expected, tolerance)
    assert_close("last tokens", out[:, :, -100:], expected[:, :, -100:], tolerance)
    actual, wanted = (gradients(y, leaves(x, module).values()) for x, y in ((halves, out), (inputs, expected)))
    for name, gradient, other in zip(leaves(inputs, module), actual, wanted):
        assert_close(f"gradient of {name}", gradient, other, tolerance)


@cases((case for case in DEFAULTS if "cross" in case.kind.supports), causal=False)
def test_queries_of_one_sequence_and_keys_of_another(case):
    module = case.build()
    for n, m, queries, keys in (
        *((1, 7, "none", "none"), (7, 2, "left", "right"), (6, 11, "none", "none")),
        *((6, 11, "left", "right"), (6, 11, "all", "holes"), (6, 11, "both", "all")),
    ):
        inputs = tensors(module, n, m)
        masks = {"query_padding_mask": padding(queries, 2, n), "key_padding_mask": padding(keys, 2, m)}
        out, expected = module(**inputs, **masks), module.reference(**inputs, **masks)
        assert_close(f"out with {queries} and {keys}", out, expected)
        assert_gradients_close(out, expected, leaves(inputs, module))
