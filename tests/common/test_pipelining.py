"""torch splits models into pipeline stages, or the error says why it cannot."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipeline

from common.attention import build_attention
from tests.compare import assert_close
from tests.torch_versions import NEWER_THAN_2_6

#: More than the smallest chunk of any mechanism.
TOKENS = 9


class Layer(nn.Module):
    """Attention on a projection of the tokens."""

    def __init__(self, name: str, **options) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.attention = build_attention(name, True, num_heads=2, head_dim=4, max_tokens=TOKENS, **options)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, n, 8)."""
        q = self.proj(x).unflatten(2, (2, 4)).transpose(1, 2)
        return self.attention(q, q, q, **self.attention.inputs(x=x)).transpose(1, 2).flatten(2)


class Two(nn.Module):
    """Two named layers, since torch 2.6 does not split ``nn.Sequential``."""

    def __init__(self, name: str, **options) -> None:
        super().__init__()
        self.first, self.second = Layer(name, **options), Layer(name, **options)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, n, 8)."""
        return self.second(self.first(x))


@pytest.mark.parametrize(("name", "options"), [("daft_full", {}), ("flow", {"clamp": None, "forget": "head"})])
def test_two_stages_are_the_model(name, options):
    model, x = Two(name, **options), torch.randn(1, TOKENS, 8)
    expected = model(x)
    pipe = pipeline(model, mb_args=(x,), split_spec={"second": SplitPoint.BEGINNING})
    assert pipe.num_stages == 2
    (out,) = pipe(x)
    assert_close("out", out, expected)


@pytest.mark.skipif(not NEWER_THAN_2_6, reason="torch 2.6 cannot tell torch.export from torch.compile")
def test_directions_that_are_drawn_anew_are_refused_in_words():
    with pytest.raises(ValueError, match="redraw is 2.*allowed in torch.export.*pipelining"):
        torch.export.export(Layer("favor", redraw=2), (torch.randn(1, 9, 8),), strict=False)
