"""Several tokens after a state, in every causal model: equal to single steps and to the full forward."""

import pytest
import torch
from torch import Tensor, nn

from tests.compare import assert_close
from tests.fairseq_plugin.helpers.encoder_decoders import build_model as build_encoder_decoder
from tests.fairseq_plugin.helpers.language_models import awake, build_model, build_tiny
from tests.fairseq_plugin.helpers.registry import CAUSAL, SHORT
from tests.fairseq_plugin.helpers.text import tokens

PAD = 1
LENGTH, LIMIT = 41, 48
POSITIONS = {
    "sinusoids": ("flowformer_lm",),
    "learned": ("linear_lm", "--decoder-learned-pos"),
    "scaled sinusoids": ("flash_lm",),
    "none": ("softmax_lm", "--no-token-positional-embeddings"),
}


def _build(name: str, limit: int = LIMIT) -> nn.Module:
    """A tiny model in evaluation mode whose attention clearly affects its outputs."""
    return build_tiny(name, SHORT, limit)


def _unequal() -> Tensor:
    """Three rows, two of which begin with padding."""
    sequence = tokens(3, LENGTH)
    sequence[1, :13] = PAD
    sequence[2, :3] = PAD
    return sequence


def _in_parts(model: nn.Module, sequence: Tensor, sizes, state: dict) -> Tensor:
    parts = [model.decoder.extend_features(part, state)[0] for part in sequence.split(sizes, dim=1)]
    return model.decoder.output_layer(torch.cat(parts, dim=1))


@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_parts_are_the_whole_and_the_steps(name: str) -> None:
    """Parts of any size, also one token; left padding, reordering, then single steps as in fairseq."""
    model, sequence = _build(name), _unequal()
    whole, real = model(sequence)[0], sequence.ne(PAD)
    for sizes in ([LENGTH], [1, 7, 9, 16, LENGTH - 33], [1] * LENGTH):
        parts = _in_parts(model, sequence, sizes, {})
        assert_close(f"parts of {sizes}", parts[real], whole[real], 2e-5)
    state, order = {}, torch.tensor([2, 0, 0, 1])
    _in_parts(model, sequence[:, :21], [16, 5], state)
    model.decoder.reorder_incremental_state_scripting(state, order)
    sequence, whole = sequence[order], whole[order]
    after = _in_parts(model, sequence[:, 21:30], [9], state)
    assert_close("after the reordering", after, whole[:, 21:30], 2e-5)
    for end in range(31, LENGTH + 1):
        step = model.decoder(sequence[:, :end], incremental_state=state)[0]
        assert_close(f"step {end}", step[:, 0], whole[:, end - 1], 2e-5)


@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_half_precision(name: str) -> None:
    """A model in half precision, as with --fp16: parts give the full forward up to rounding."""
    model, sequence = _build(name).half(), _unequal()
    whole, real = model(sequence)[0], sequence.ne(PAD)
    parts = _in_parts(model, sequence, [16, 16, LENGTH - 32], {})
    assert parts.dtype == torch.float16
    assert_close("parts", parts[real].float(), whole[real].float(), 2e-2)


@pytest.mark.parametrize("kind", POSITIONS)
@torch.no_grad()
def test_positions_go_on_from_each_row(kind: str) -> None:
    """All position embeddings continue per row; the table of sinusoids grows beyond its first size."""
    arch, *arguments = POSITIONS[kind]
    model = awake(build_model(arch, *arguments)).eval()
    sequence = tokens(2, 250)
    sequence[0, :90] = PAD
    if kind == "sinusoids":  # beyond --tokens-per-sample, which does not limit it
        sequence = torch.cat([sequence, tokens(2, 90)], dim=1)
    whole, real, state = model(sequence)[0], sequence.ne(PAD), {}
    parts = _in_parts(model, sequence[:, :-5], 60, state)
    ends = range(sequence.shape[1] - 4, sequence.shape[1] + 1)
    steps = [model.decoder(sequence[:, :end], incremental_state=state)[0] for end in ends]
    assert_close("parts, then steps", torch.cat([parts, *steps], dim=1)[real], whole[real], 2e-5)


@torch.no_grad()
def test_checkpointed_layers_read_on_too() -> None:
    """Layers wrapped by --checkpoint-activations extend their states too."""
    model = awake(build_model("flowformer_lm", "--checkpoint-activations")).eval()
    assert_close("parts", _in_parts(model, _unequal(), 10, {}), model(_unequal())[0], 2e-5)


@torch.no_grad()
def test_layers_that_are_dropped_are_those_of_the_forward_pass() -> None:
    """--decoder-layerdrop draws once per pass; the layers that run receive their states."""
    model, sequence = awake(build_model("flowformer_lm", "--decoder-layerdrop", "0.5", "--dropout", "0")), tokens(2, 9)
    model.train()
    for seed in range(6):
        torch.manual_seed(seed)
        whole, state = model(sequence)[0], {}
        torch.manual_seed(seed)
        assert_close(f"seed {seed}", _in_parts(model, sequence, [9], state), whole, 2e-5)


@torch.no_grad()
def test_what_is_refused() -> None:
    """Too many tokens for a table over all parts, a state without a position count, attention to a source."""
    model = _build("daft_full_lm", LIMIT)
    state = {}
    model.decoder.extend_features(tokens(2, LIMIT - 8), state)
    with pytest.raises(ValueError, match=f"{LIMIT + 1} tokens; allowed: {LIMIT}"):
        model.decoder.extend_features(tokens(2, 9), state)
    steps = {}
    model.decoder(tokens(2, 1), incremental_state=steps)
    with pytest.raises(ValueError, match="single steps"):
        model.decoder.extend_features(tokens(2, 3), steps)
    with pytest.raises(ValueError, match="encoder"):
        build_encoder_decoder("flowformer").decoder.extend_features(tokens(2, 3), {})
