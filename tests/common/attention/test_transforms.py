"""torch.compile, TorchScript, torch.export and functorch take the modules as they are."""

import pytest
import torch

from common.attention import build_attention
from tests.common.attention.build import build, narrow
from tests.common.inputs import padding, qkv
from tests.compare import assert_close

LINEAR_TIME = ["flow", "linear"]
causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def detached(*args, **kwargs):
    return [x.detach() for x in qkv(*args, **kwargs)]


@pytest.mark.parametrize("name", ["flow", "linear", "softmax"])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_torchscript_of_the_full_form(masked, name, tmp_path):
    module = build_attention(name)
    torch.jit.script(module).save(tmp_path / "module.pt")
    scripted = torch.jit.load(tmp_path / "module.pt")
    for dtype in (torch.float64, torch.bfloat16):
        inputs = detached(11, 17, dtype=dtype)
        masks = (padding("right", 2, 17), padding("left", 2, 11)) if masked else (None, None)
        out = scripted(*inputs, *masks)
        assert out.dtype == dtype
        assert_close("out", out, module(*inputs, *masks))


@pytest.mark.parametrize("options", [{}, {"gumbel_temperature": 0.5}, {"local_only": True}, None], ids=str)
@pytest.mark.parametrize("query", [True, False], ids=["gated", "ungated"])
def test_torchscript_of_daft(query, options, tmp_path):
    """DAFT-conv over an image, a selection as it is indexed in evaluation, and DAFT-full; no mask for either."""
    if options is None:
        module, more = build("daft_full", query=query), {}
    else:
        module, more = build("daft_conv", query=query, window=(5, 3), **options).eval(), {"spatial_shape": (3, 7)}
    torch.jit.script(module).save(tmp_path / "module.pt")
    scripted = torch.jit.load(tmp_path / "module.pt")
    for dtype in (torch.float64, torch.bfloat16):
        q, k, v = detached(21, d=4, e=4, dtype=dtype)
        q, k = q if query else None, narrow(module, k)
        with torch.autograd.profiler.profile() as profile:
            out = scripted(q, k, v, **more)
        assert out.dtype == dtype
        assert_close("out", out, module(q, k, v, **more))
        convolves = any(event.name == "aten::conv2d" for event in profile.function_events)
        assert convolves == (options is not None and "gumbel_temperature" not in options)
        with pytest.raises(torch.jit.Error, match="a mask is given"):
            scripted(q, k, v, torch.zeros(2, 21, dtype=torch.bool), **more)


@pytest.mark.parametrize("name", LINEAR_TIME)
def test_torchscript_of_the_causal_form_is_refused_by_name(name):
    scripted = torch.jit.script(build_attention(name, causal=True))
    with pytest.raises(torch.jit.Error, match="causal is True; allowed in TorchScript: causal=False"):
        scripted(*detached(5))


@pytest.mark.parametrize("name", LINEAR_TIME)
def test_torchscript_stays_precise_under_autocast(name):
    inputs = detached(300, dtype=torch.float32)
    module = build_attention(name)
    scripted = torch.jit.script(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = scripted(*inputs)
    assert_close("out", out.float(), module(*inputs), 1e-2)
