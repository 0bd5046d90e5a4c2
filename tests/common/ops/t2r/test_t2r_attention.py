"""T2R beyond the contract: its floor, its scale and its initial map."""

import torch

from common.attention import build_attention
from common.ops import t2r_attention
from tests.common.inputs import qkv
from tests.compare import assert_close

H, D = 2, 4


def a_map(features: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = (H, features, D), (H, features)
    return tuple(torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)


def test_a_query_that_no_key_answers_gives_zero():
    """relu may leave only zeros; a small normaliser is raised to the floor."""
    q, k, v = (x.detach() for x in qkv(6, d=D))
    weight, _ = a_map()
    out = t2r_attention(q, k, v, weight, torch.full((H, 5), -100.0, dtype=torch.float64))
    assert torch.equal(out, torch.zeros_like(out))
    low, high = (t2r_attention(q, k, v, *a_map(), floor=floor) for floor in (1e5, 2e5))
    assert_close("out", low, 2 * high)


def test_queries_alone_are_divided_by_the_root_of_their_channels():
    q, k, v = (x.detach() for x in qkv(6, d=D))
    weight, _ = a_map()
    nothing = torch.zeros(H, 5, dtype=torch.float64)
    scores = (q * D**-0.5 @ weight.transpose(1, 2)).relu() @ (k @ weight.transpose(1, 2)).relu().transpose(-2, -1)
    expected = scores / scores.sum(-1, keepdim=True).clamp(min=1e-2) @ v
    assert_close("out", t2r_attention(q, k, v, weight, nothing), expected)


def test_maps_begin_as_a_layer_of_torch_does():
    torch.manual_seed(0)
    module = build_attention("t2r", num_heads=3, head_dim=16, features=64)
    layer = torch.nn.Linear(16, 3 * 64)
    for parameter, source in ((module.map_weight, layer.weight), (module.map_bias, layer.bias)):
        assert parameter.numel() == source.numel() and parameter.abs().max() <= 16**-0.5
        assert_close("spread", parameter.std(), source.std(), 0.1)
