"""Token by token, with padding, and after a beam reorder, decoding gives the full forward's logits."""

import pytest
import torch

from tests.compare import assert_close

from .toy import ARCHITECTURES, build_model, tokens

PAD = 1
POSITIONS = {"sinusoidal": [], "learned": ["--decoder-learned-pos"], "none": ["--no-token-positional-embeddings"]}


def _left_padded(real: torch.Tensor, padding) -> torch.Tensor:
    """Rows of ``real`` with their first ``padding[b]`` tokens replaced by padding."""
    padded = real.clone()
    for row, count in enumerate(padding):
        padded[row, :count] = PAD
    return padded


def _decode(model, sequence: torch.Tensor) -> torch.Tensor:
    """Logits (B, T, V) collected one step at a time through fairseq's incremental state."""
    state, steps = {}, []
    for end in range(1, sequence.shape[1] + 1):
        steps.append(model.decoder(sequence[:, :end], incremental_state=state)[0])
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_steps_equal_the_full_forward(arch: str, positions: str) -> None:
    """Also over left-padded prefixes of unequal length in one batch, and across several chunks."""
    model = build_model(arch, *POSITIONS[positions]).eval()
    sequence = _left_padded(tokens(3, 150), (9, 0, 70))
    with torch.no_grad():
        full, stepped = model(sequence)[0], _decode(model, sequence)
    real = sequence.ne(PAD)
    assert (full - stepped)[real].abs().max() <= 1e-4
    assert torch.isfinite(stepped).all() and torch.isfinite(full).all()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_padding_never_changes_real_logits(arch: str, side: str) -> None:
    """A sequence gives the same logits alone and beside padding, whichever side that stands on."""
    model = build_model(arch).eval()
    alone = tokens(2, 70)
    padding = torch.full((2, 13), PAD)
    with torch.no_grad():
        expected = model(alone)[0]
        if side == "left":
            actual = model(torch.cat([padding, alone], dim=1))[0][:, 13:]
        else:
            actual = model(torch.cat([alone, padding], dim=1))[0][:, :70]
    assert (actual - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_row_of_padding_alone_is_not_nan(arch: str) -> None:
    """Forward, backward and decoding."""
    model = build_model(arch)
    sequence = _left_padded(tokens(2, 6), (6, 0))
    model(sequence)[0].sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)
    with torch.no_grad():
        assert torch.isfinite(_decode(model.eval(), sequence)).all()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_reordered_state_continues_the_other_row(arch: str) -> None:
    """What beam search does between steps: rows are dropped, doubled and swapped."""
    model = build_model(arch).eval()
    prefixes = _left_padded(tokens(3, 20), (0, 4, 0))
    order = torch.tensor([2, 0, 0, 1])
    continuation = tokens(4, 8, seed=5)
    sequence = torch.cat([prefixes[order], continuation], dim=1)
    state = {}
    with torch.no_grad():
        for end in range(1, 21):
            model.decoder(prefixes[:, :end], incremental_state=state)
        model.decoder.reorder_incremental_state_scripting(state, order)
        for end in range(21, 29):
            step = model.decoder(sequence[:, :end], incremental_state=state)[0][:, -1]
        assert_close("logits", step, model(sequence)[0][:, -1], tolerance=1e-4)


def _state_size(state) -> int:
    return sum(value.numel() for entry in state.values() for value in entry.values())


@pytest.mark.parametrize("arch", ["flowformer_lm", "linear_lm"])
def test_state_is_of_constant_size(arch: str) -> None:
    """Every entry has the batch first, and none grows with the tokens seen."""
    model = build_model(arch).eval()
    sequence, state, sizes = tokens(3, 40), {}, set()
    with torch.no_grad():
        for end in range(1, 41):
            model.decoder(sequence[:, :end], incremental_state=state)
            sizes.add(_state_size(state))
    assert len(sizes) == 1
    assert all(value.shape[0] == 3 for entry in state.values() for value in entry.values())


def test_future_tokens_change_nothing() -> None:
    """Causality of the whole model: earlier logits are bit-equal, and have no gradient from later embeddings."""
    model = build_model("flowformer_lm").eval()
    sequence = tokens(1, 150)
    changed = sequence.clone()
    changed[0, 100:] = tokens(1, 50, seed=9)[0]
    with torch.no_grad():
        assert torch.equal(model(sequence)[0][:, :100], model(changed)[0][:, :100])
    embedded = []
    model.decoder.embed_tokens.register_forward_hook(lambda module, args, out: embedded.append(out) or out)
    logits = model(sequence)[0]
    (gradient,) = torch.autograd.grad(logits[:, :100].sum(), embedded[-1])
    assert gradient[:, 100:].abs().max() == 0.0 and gradient[:, :100].abs().max() > 0.0
