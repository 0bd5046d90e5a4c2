"""TorchScript beyond the contract: masks, as used for a batch of images of several sizes."""

import pytest
import torch

from common.attention import build_attention
from tests.common.attention.build import build, narrow
from tests.common.inputs import padding, qkv
from tests.compare import assert_close


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_flow_takes_masks_and_keys_of_another_sequence(dtype):
    module = build_attention("flow")
    inputs = [x.detach() for x in qkv(11, 17, dtype=dtype)]
    masks = padding("right", 2, 17), padding("left", 2, 11)
    out = torch.jit.script(module)(*inputs, *masks)
    assert out.dtype == dtype
    assert_close("out", out, module(*inputs, *masks))


@pytest.mark.parametrize("name, more", [("daft_conv", {"spatial_shape": (3, 7)}), ("daft_full", {})])
@pytest.mark.parametrize("query", [True, False], ids=["gated", "ungated"])
def test_daft_takes_none(query, name, more):
    module = build(name, query=query, **({"window": (5, 3)} if more else {})).eval()
    q, k, v = (x.detach() for x in qkv(21, d=4, e=4))
    q, k, scripted = q if query else None, narrow(module, k), torch.jit.script(module)
    assert_close("out", scripted(q, k, v, **more), module(q, k, v, **more))
    with pytest.raises(torch.jit.Error, match="mask"):
        scripted(q, k, v, torch.zeros(2, 21, dtype=torch.bool), **more)
