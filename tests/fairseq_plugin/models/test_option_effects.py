"""Every option of the papers' models changes each layer: its parameters, or its outputs at equal parameters."""

from collections.abc import Iterator
from dataclasses import Field, fields
from enum import Enum

import pytest
import torch
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from torch import nn

from tests.compare import assert_close
from tests.fairseq_plugin.helpers.language_models import DAFT_FAMILY, FLASH_FAMILY, awake, build_model
from tests.fairseq_plugin.helpers.masked_models import MASKED, build_random, features
from tests.fairseq_plugin.helpers.text import tokens

CAUSAL = (*FLASH_FAMILY, *DAFT_FAMILY)
LENGTH = 37  # odd; two chunks of 16 and a remainder, four rows of 8 and a remainder
#: Values of options that are neither flags nor choices, different from the small models' values.
VALUES = {
    "bias_dim": "5",
    "chunk_size": "8",
    "divisor": "9",
    "gumbel_temperature": "0.5",
    "query_dim": "8",
    "row_length": "5",
    "short_conv": "3",
    "window": "5",
}
#: An option that requires another one, and an option that affects speed only.
NEEDED = {"--flash-separate-ffn": "--flash-no-gate --flash-separate-ffn"}
SPEED_ALONE = "flash_cumulative_sum"
#: Values that are the defaults.
IN_FORCE = {"--flash-norm layernorm": CAUSAL, "--flash-norm scalenorm": MASKED}
IN_FORCE["--flash-relative-bias toeplitz"] = (*CAUSAL, *MASKED)
#: More options of fairseq for masked models, which need not affect the layers.
HOST = "learned-pos|ffn-embed-dim 48|embed-dim 16|layers 3|attention-heads 2".split("|")
HOST = [*(f"--encoder-{x}" for x in HOST), "--layernorm-embedding", "--untie-weights-roberta"]


def _options(arch: str) -> list[Field]:
    classes = [MODEL_DATACLASS_REGISTRY[arch]] if arch in CAUSAL else MODEL_REGISTRY[arch].option_classes
    return [field for options in classes for field in fields(options) if field.name.startswith(("flash_", "daft_"))]


def _flags() -> Iterator[tuple[str, str]]:
    """Pairs of each architecture and each of its own options."""
    for arch in (*CAUSAL, *MASKED):
        for field in _options(arch):
            flag, values = f"--{field.name.replace('_', '-')}", [VALUES.get(field.name.partition("_")[2])]
            if field.type is bool:
                yield arch, NEEDED.get(flag, flag)
                continue
            if isinstance(field.type, type) and issubclass(field.type, Enum):
                default = getattr(field.default, "value", field.default)
                values = [choice.value for choice in field.type if choice.value != default or flag == "--flash-norm"]
            for value in values if field.name != SPEED_ALONE else ():
                if arch not in IN_FORCE.get(f"{flag} {value}", ()):
                    yield arch, f"{flag} {value}"
    yield "flash_lm", "--flash-overlap --flash-relative-bias none"


def _build(arch: str, *arguments: str) -> nn.Module:
    if arch in MASKED:
        return build_random(arch, *arguments)
    return awake(build_model(arch, *arguments)).double().eval()


def _layers(model: nn.Module) -> nn.ModuleList:
    return model.decoder.layers if hasattr(model, "decoder") else model.encoder.sentence_encoder.layers


def _output(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The output for x (T, B, C) of a layer of either kind."""
    out = layer(x, None)
    return out if isinstance(out, torch.Tensor) else out[0]


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(("arch", "flags"), _flags(), ids=lambda value: value.replace("--", "").replace(" ", "-"))
def test_every_option_changes_every_layer(arch: str, flags: str) -> None:
    """New options are tested without a line here, except numbers."""
    plain, changed = _build(arch), _build(arch, *flags.split())
    x = torch.randn(LENGTH, 2, 32, dtype=torch.float64)
    for before, after in zip(_layers(plain), _layers(changed), strict=True):
        if _shapes(before) == _shapes(after):
            after.load_state_dict(before.state_dict(), strict=False)  # stored options differ
            assert (_output(before, x) - _output(after, x)).abs().max() > 1e-4
        assert torch.isfinite(_output(after, x)).all()


def _host_flags() -> list[tuple[str, str]]:
    transformers = [arch for arch in MASKED if not arch.startswith("flash")]
    return [(arch, flags) for arch in MASKED for flags in HOST] + [
        (arch, "--activation-fn relu") for arch in transformers
    ]


@pytest.mark.parametrize(("arch", "flags"), _host_flags())
def test_options_of_fairseq_change_masked_models(arch: str, flags: str) -> None:
    """They change the parameters, or the features at equal parameters."""
    plain, changed = build_random(arch), build_random(arch, *flags.split())
    if _shapes(plain) == _shapes(changed):
        changed.load_state_dict(plain.state_dict())
        sequence = tokens(1, LENGTH)
        assert (features(plain, sequence) - features(changed, sequence)).abs().max() > 1e-4
    assert torch.isfinite(features(changed, tokens(1, 9))).all()


@pytest.mark.parametrize("arch", ["daft_full_lm", "performer_lm"])
def test_options_without_effect_say_so(arch: str) -> None:
    """Heads of DAFT-full; token-by-token Performer has Performer-Matmul's logits and gradients (Table 11)."""
    flags = "--decoder-attention-heads 2" if arch == "daft_full_lm" else "--flash-cumulative-sum scan"
    plain, changed = awake(build_model(arch)).eval(), awake(build_model(arch, *flags.split())).eval()
    changed.load_state_dict(plain.state_dict())
    outputs = [model(tokens(2, 101))[0] for model in (changed, plain)]
    assert_close("logits", *outputs)
    (outputs[0].square().mean() + outputs[1].square().mean()).backward()
    keys = [_layers(model)[0].self_attn.k_proj.weight.grad for model in (changed, plain)]
    assert_close("gradient", *keys, tolerance=1e-4)
