"""Whole language models under autocast in bfloat16 at 32,768 tokens: hidden states within 1e-2 of float32."""

import pytest
import torch

from tests.compare import assert_close
from tests.fairseq_plugin.helpers.language_models import awake, build_model
from tests.fairseq_plugin.helpers.text import tokens

LENGTH = 32768


@pytest.mark.parametrize("arch", ["flowformer_lm", "linear_lm", "performer_lm", "flash_lm", "daft_conv_lm"])
@torch.no_grad()
def test_hidden_states(arch):
    model = awake(build_model(arch, "--tokens-per-sample", str(LENGTH), "--max-target-positions", str(LENGTH))).eval()
    sequence = tokens(1, LENGTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(sequence, features_only=True)[0]
    expected = model(sequence, features_only=True)[0]
    assert_close("hidden states", out.float(), expected, 1e-2)
    assert_close("the last of them", out[:, -100:].float(), expected[:, -100:], 1e-2)
