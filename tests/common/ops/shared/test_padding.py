"""Moving real tokens to the front and back again, against Python lists."""

import pytest
import torch

from common.ops.shared.padding import invert, put_back, real_first, real_positions, take
from tests.common.inputs import SIDES, padding

MASKED = [side for side in SIDES if side != "none"]


@pytest.mark.parametrize("tokens", [1, 2, 13])
@pytest.mark.parametrize("side", MASKED)
def test_the_order_is_that_of_a_stable_partition(side, tokens):
    mask = padding(side, 3, tokens)
    for row, order, positions in zip(mask.tolist(), real_first(mask).tolist(), real_positions(mask).tolist()):
        real = [i for i in range(tokens) if not row[i]]
        assert order == real + [i for i in range(tokens) if row[i]]
        assert positions == [sum(not hidden for hidden in row[:i]) for i in range(tokens)]


@pytest.mark.parametrize("side", MASKED)
def test_put_back_undoes_take(side):
    x, order = torch.randn(3, 2, 13, 4), real_first(padding(side, 3, 13))
    assert torch.equal(put_back(take(x, order), order), x)
    assert torch.equal(take(put_back(x, order), order), x)
    assert torch.equal(invert(invert(order)), order)
    for b in range(3):
        assert torch.equal(take(x, order)[b], x[b][:, order[b]])
    assert torch.equal(take(x, order[:, :5]), take(x, order)[:, :, :5])
