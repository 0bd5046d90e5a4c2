"""torch.compile of every kind of layer: same outputs and gradients, and no new graph for a new length.

``tests/common/contract`` tests that every mechanism compiles into one graph; this file tests the code around them.
"""

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from tests.compare import assert_close, gradients
from tests.fairseq_plugin.helpers.language_models import awake, build_model
from tests.fairseq_plugin.helpers.masked_models import build_masked, randomised
from tests.fairseq_plugin.helpers.text import padded, tokens
from tests.torch_versions import NEWER_THAN_2_6

#: fairseq's layer, a layer with other norms and positions, gated attention units, parameters that limit the length.
CAUSAL = ("flowformer_lm", "transformer_pp_lm", "flash_lm", "flash_quad_lm", "daft_full_lm")
MASKED = ("transformer_pp_mlm", "flash_mlm")
#: No length fills the last chunk, row or block of any model; all fill the same number of DAFT-full's blocks.
LENGTHS = (71, 69, 90)
FIRST = LENGTHS[0]
#: If parameters limit the length, one additional small graph reads it.
LIMITED = ("flash_quad_lm", "daft_full_lm")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def causal(arch: str) -> nn.Module:
    """A language model of one layer, in training without dropout."""
    return awake(build_model(arch, "--decoder-layers", "1", "--dropout", "0"))


def masked(arch: str) -> nn.Module:
    """A masked language model of one layer, in training without dropout."""
    return randomised(build_masked(arch, "--encoder-layers", "1", "--dropout", "0", "--attention-dropout", "0"), 0.3)


def assert_same(compiled: nn.Module, model: nn.Module, sequence: Tensor) -> None:
    """Assert that logits and the gradients of all parameters are equal."""
    out, expected = compiled(sequence)[0], model(sequence)[0]
    assert_close("logits", out, expected)
    parameters = dict(model.named_parameters())
    expected_gradients = gradients(expected, parameters.values())
    for name, gradient, expected_gradient in zip(parameters, gradients(out, parameters.values()), expected_gradients):
        # Exact zeros, such as the gradient of a key's bias under softmax, are rounding errors on both sides.
        if expected_gradient.norm() > 1e-4 or gradient.norm() > 1e-4:
            # The gradient of the positions' scale is one number, a sum over all tokens with much cancellation.
            assert_close(
                f"gradient of {name}", gradient, expected_gradient, 5e-4 if expected_gradient.numel() == 1 else 5e-5
            )


def breaks_and_graphs(model: nn.Module, sequence: Tensor) -> tuple:
    """The numbers of graph breaks and of graphs of ``model``."""
    counter = CompileCounterWithBackend("eager")
    torch.compile(model, backend=counter, dynamic=True)(sequence)
    return sum(counters["graph_break"].values()), counter.frame_count


def assert_any_length(model: nn.Module, sequences: list) -> tuple:
    """Assert that a model compiled for the first sequence serves the others; its graph breaks and graphs."""
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, dynamic=True)
    assert_same(compiled, model, sequences[0])
    breaks = sum(counters["graph_break"].values())
    with torch.compiler.set_stance("fail_on_recompile" if NEWER_THAN_2_6 else "default"):
        for sequence in sequences[1:]:
            assert_same(compiled, model, sequence)
    return breaks, counter.frame_count


@cache
def of_stock(name: str) -> tuple:
    """``breaks_and_graphs`` of fairseq's own model, whose code branches on padding, with this torch."""
    if name == "roberta":
        numbers = breaks_and_graphs(build_masked(name), padded(tokens(2, FIRST), 3, 4))
    else:
        numbers = breaks_and_graphs(build_model(name), tokens(2, FIRST))
    torch._dynamo.reset()
    counters.clear()
    return numbers


@pytest.mark.parametrize("arch", CAUSAL)
def test_causal_models_of_any_length(arch):
    model, sequences = causal(arch), [tokens(2, length, seed=length) for length in LENGTHS]
    breaks, graphs = of_stock("transformer_lm")
    our_breaks, our_graphs = assert_any_length(model, sequences)
    if NEWER_THAN_2_6 or arch != "flash_lm":  # torch 2.6 breaks the graph in a gated attention unit
        assert our_breaks == breaks and our_graphs <= graphs + (arch in LIMITED)


@pytest.mark.parametrize("arch", MASKED)
def test_masked_models_of_any_length(arch):
    model, sequences = masked(arch), [padded(tokens(2, length - 7, seed=length), 3, 4) for length in LENGTHS]
    stock = of_stock("roberta")
    breaks, graphs = assert_any_length(model, sequences)
    # One more than RoBERTa: the final norm. torch 2.6 breaks the graph in a gated attention unit.
    if NEWER_THAN_2_6 or arch != "flash_mlm":
        assert breaks == stock[0] and graphs <= stock[1] + 1


def test_lengths_below_one_chunk():
    assert_any_length(causal("flash_lm"), [tokens(2, length) for length in (13, 7, 11)])


# It decomposes as the default backend does. "aot_eager" relies on torch's layout of
# native_dropout_backward's and elu_backward's results, wrong for (T, B, C) in torch 2.15, also for stock models.
@pytest.mark.parametrize("arch", ["flowformer_lm", "flash_lm", "flash_mlm"])
def test_the_backward_pass_is_traced_too(arch):
    model = masked(arch) if arch in MASKED else causal(arch)
    compiled = torch.compile(model, backend="aot_eager_decomp_partition", dynamic=False)
    assert_same(compiled, model, padded(tokens(2, 31), 6, 0))
