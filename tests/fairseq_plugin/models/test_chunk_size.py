"""The chunk size of flowformer_lm and linear_lm affects speed and memory, never the result."""

import pytest
import torch

from tests.compare import assert_close
from tests.fairseq_plugin.helpers.language_models import SMALL, build_model


@pytest.mark.parametrize("arch, option", [("flowformer_lm", "--flow-chunk-size"), ("linear_lm", "--linear-chunk-size")])
@torch.no_grad()
def test_the_decoding_state_of_one_chunk_size_continues_under_another(arch, option):
    models = [build_model(arch, option, size, sizes=SMALL).double().eval() for size in ("7", "64")]
    inners = [model.decoder.layers[0].self_attn.inner for model in models]
    assert [inner.options.chunk_size for inner in inners] == [7, 64]
    q, k, v = torch.randn(3, 2, 4, 50, 8, dtype=torch.float64)
    states = [inner.extend(q, k, v)[1] for inner in inners]
    for name in states[0]:
        assert_close(f"state {name}", states[0][name].double(), states[1][name].double())
    first, second = (inner.extend(q, k, v, state=state)[0] for inner, state in zip(inners, reversed(states)))
    assert_close("out", first, second)
