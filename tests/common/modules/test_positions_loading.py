"""A Toeplitz bias takes the middle of a longer one: fine-tuning with a smaller chunk than in pretraining."""

import logging

import pytest
import torch

from common.modules.gated_attention_unit import GatedAttentionUnit
from common.modules.relative_bias import ToeplitzBias
from tests.compare import assert_close


def test_distances_keep_their_bias(caplog: pytest.LogCaptureFixture) -> None:
    """Every remaining distance keeps its stored number, the caller's dict is unchanged, and the log reports the cut."""
    stored, bias = ToeplitzBias(8, heads=2), ToeplitzBias(3, heads=2)
    state = stored.state_dict()
    with caplog.at_level(logging.INFO, logger="common.modules.relative_bias"):
        bias.load_state_dict(state)
    for distance in range(-2, 3):
        assert torch.equal(bias.weight[:, distance + 2], stored.weight[:, distance + 7])
    assert torch.equal(bias(2), stored(2)) and state["weight"].shape == (2, 15)
    assert [record.getMessage() for record in caplog.records] == ["weight: a relative bias for 8 tokens is read for 3"]


def test_a_bias_of_the_same_length_is_taken_whole(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is cut, and nothing logged."""
    stored, bias = ToeplitzBias(5), ToeplitzBias(5)
    with caplog.at_level(logging.INFO, logger="common.modules.relative_bias"):
        bias.load_state_dict(stored.state_dict())
    assert torch.equal(bias.weight, stored.weight) and not caplog.records


@pytest.mark.parametrize(("tokens", "heads"), [(2, 2), (8, 1)], ids=["shorter", "other heads"])
def test_what_does_not_fit_is_refused(tokens: int, heads: int) -> None:
    """A bias for fewer tokens lacks the far distances, and one for another number of heads lacks some heads."""
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        ToeplitzBias(3, heads=2).load_state_dict(ToeplitzBias(tokens, heads=heads).state_dict())


def test_an_even_number_of_entries_is_refused() -> None:
    """An even number of entries has no middle."""
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        ToeplitzBias(3).load_state_dict({"weight": torch.zeros(1, 8)})


def test_a_unit_with_smaller_chunks_loads() -> None:
    """Within one short chunk both units see every token, and differ only by the divisor C."""
    large, small = (GatedAttentionUnit(8, query_dim=4, chunk_size=size, linear=False) for size in (16, 4))
    for parameter in large.parameters():
        torch.nn.init.normal_(parameter)
    small.load_state_dict(large.state_dict())
    x = torch.randn(2, 4, 8)
    assert not torch.allclose(small(x), large(x), atol=1e-3)
    with torch.no_grad():
        small.gamma[0] *= 4 / 16
        small.beta[0] *= 4 / 16
    assert_close("output", small(x), large(x))
