"""The chunk size of flowformer_lm and linear_lm affects speed and memory, never the result."""

import pytest
import torch

from tests.compare import assert_close, gradients
from tests.fairseq_plugin.helpers.language_models import SMALL, build_model
from tests.fairseq_plugin.helpers.text import tokens


@pytest.mark.parametrize("arch, option", [("flowformer_lm", "--flow-chunk-size"), ("linear_lm", "--linear-chunk-size")])
def test_logits_and_gradients(arch, option):
    sequence, models = tokens(2, 101), []
    for size in ("64", "1", "7", "16", "101", "1000"):
        models.append(build_model(arch, option, size, "--dropout", "0", sizes=SMALL).double())
    parameters = dict(models[0].named_parameters())
    expected = models[0](sequence)[0]
    expected_gradients = gradients(expected, parameters.values())
    for model in models[1:]:
        out = model(sequence)[0]
        assert_close("logits", out, expected)
        assert model.decoder.layers[0].self_attn.inner.options.chunk_size != 64
        for name, gradient, expected_gradient in zip(
            parameters, gradients(out, model.parameters()), expected_gradients
        ):
            if expected_gradient.norm() > 1e-9:  # exact zeros are rounding errors on both sides
                assert_close(f"gradient of {name}", gradient, expected_gradient, 1e-8)


@pytest.mark.parametrize("arch, option", [("flowformer_lm", "--flow-chunk-size"), ("linear_lm", "--linear-chunk-size")])
@torch.no_grad()
def test_the_decoding_state_of_one_chunk_size_continues_under_another(arch, option):
    models = [build_model(arch, option, size, sizes=SMALL).double().eval() for size in ("7", "64")]
    inners = [model.decoder.layers[0].self_attn.inner for model in models]
    q, k, v = torch.randn(3, 2, 4, 50, 8, dtype=torch.float64)
    states = [inner.extend(q, k, v)[1] for inner in inners]
    for name in states[0]:
        assert_close(f"state {name}", states[0][name].double(), states[1][name].double())
    first, second = (inner.extend(q, k, v, state=state)[0] for inner, state in zip(inners, reversed(states)))
    assert_close("out", first, second)
