"""Kimi Delta Attention beyond the contract: its relative, and decays of any strength."""

import pytest
import torch

from common.ops import gated_delta_attention, kimi_delta_attention
from common.ops.kimi_delta.reference import kimi_delta_attention_reference
from tests.common.inputs import qkv
from tests.compare import assert_close


def test_one_decay_for_all_channels_is_the_gated_delta_rule():
    inputs, generator = qkv(70), torch.Generator().manual_seed(1)
    beta, decay = torch.rand(2, *inputs[0].shape[:3], generator=generator, dtype=torch.float64)
    out = kimi_delta_attention(*inputs, beta=beta, log_decay=-decay.unsqueeze(-1).expand_as(inputs[1]))
    assert_close("out", out, gated_delta_attention(*inputs, beta=beta, log_decay=-decay))


@pytest.mark.parametrize("strength", [1e-3, 1.0, 1e3])
def test_decays_of_any_strength_are_exact_in_float32(strength):
    """Products of decays are formed by themselves: one channel forgets all while another one forgets nothing."""
    inputs, generator = [x.detach().float() for x in qkv(50)], torch.Generator().manual_seed(1)
    beta = torch.rand(inputs[0].shape[:3], generator=generator)
    log_decay = -strength * torch.rand(inputs[1].shape, generator=generator).square()
    log_decay[..., ::2] *= torch.rand(log_decay[..., ::2].shape, generator=generator) < 0.1  # mostly 0
    out = kimi_delta_attention(*inputs, beta=beta, log_decay=log_decay)
    exact = kimi_delta_attention_reference(
        *(x.double() for x in inputs), beta=beta.double(), log_decay=log_decay.double()
    )
    assert_close("out", out, exact, 1e-5)
