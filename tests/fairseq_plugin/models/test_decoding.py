"""Decoding token by token, with padding and beam reordering, gives the logits of the full forward."""

import pytest
import torch

from tests.fairseq_plugin.helpers.language_models import ARCHITECTURES, awake, build_model
from tests.fairseq_plugin.helpers.text import tokens

PAD = 1
POSITIONS = {"learned": ["--decoder-learned-pos"], "none": ["--no-token-positional-embeddings"]}
#: Models whose decoding state does not grow with the number of tokens.
CONSTANT = ("flowformer_lm", "linear_lm", "flash_lm", "mc_transformer_pp_lm", "performer_lm", "daft_conv_lm")
LAYERS, HEADS, WIDTH, EXPANDED, QUERY, CHUNK = 2, 4, 32, 64, 128, 16  # of the models of toy.build_model


def _model(arch: str, *arguments: str):
    return awake(build_model(arch, *arguments)).eval()


def _decode(model, sequence: torch.Tensor) -> torch.Tensor:
    """Logits (B, T, V) collected one step at a time through fairseq's incremental state."""
    state, steps = {}, []
    for end in range(1, sequence.shape[1] + 1):
        steps.append(model.decoder(sequence[:, :end], incremental_state=state)[0])
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_steps_equal_the_full_forward(arch: str, positions: str) -> None:
    """Also for left-padded prefixes of unequal length in one batch, and across several chunks."""
    model = _model(arch, *POSITIONS[positions])
    sequence = tokens(3, 101)
    sequence[0, :9] = sequence[2, :50] = PAD
    with torch.no_grad():
        full, stepped = model(sequence)[0], _decode(model, sequence)
    real = sequence.ne(PAD)
    assert (full - stepped)[real].abs().max() <= 1e-4
    assert torch.isfinite(stepped).all() and torch.isfinite(full).all()


def _state_sizes(arch: str, length: int):
    """The size of the state in elements after each of ``length`` steps of three rows, and the last state."""
    model = build_model(arch).eval()
    sequence, state, sizes = tokens(3, length), {}, []
    with torch.no_grad():
        for end in range(1, length + 1):
            model.decoder(sequence[:, :end], incremental_state=state)
            sizes.append(sum(value.numel() for entry in state.values() for value in entry.values()))
    return sizes, state


@pytest.mark.parametrize("arch", CONSTANT)
def test_state_is_of_constant_size(arch: str) -> None:
    """Every entry has the batch first, and after the first chunk none is larger than before."""
    sizes, state = _state_sizes(arch, 3 * CHUNK + 8)
    assert max(sizes) == max(sizes[: 2 * CHUNK])
    assert all(value.shape[0] == 3 for entry in state.values() for value in entry.values())


@pytest.mark.parametrize("arch", sorted(set(ARCHITECTURES) - {*CONSTANT, "flowformer_lm_wiki103"}))
def test_state_of_quadratic_models_grows_by_the_token(arch: str) -> None:
    """Each step adds the same number of elements, so that memory is O(T) and not O(T²); the batch comes first.

    Combiner is the exception: its state keeps less of each full row.
    """
    sizes, state = _state_sizes(arch, 24)
    grown = set(torch.tensor(sizes).diff().tolist())
    assert max(grown) > 0 and (len(grown) == 1 or (arch == "combiner_lm" and len(grown) == 2 and sizes[-1] > sizes[0]))
    assert all(value.shape[0] == 3 for entry in state.values() for value in entry.values())


@pytest.mark.parametrize(
    ("arch", "heads", "s", "e"),
    [("flash_lm", HEADS, QUERY, EXPANDED // HEADS), ("mc_transformer_pp_lm", HEADS, WIDTH // HEADS, WIDTH // HEADS)],
)
def test_state_is_one_matrix_and_a_chunk_of_rows(arch: str, heads: int, s: int, e: int) -> None:
    """Per layer and head: the s x e sum over earlier chunks, and C rows of two keys and a value."""
    _, state = _state_sizes(arch, 3 * CHUNK)
    (entries,) = {frozenset(entry) for entry in state.values()}
    assert len(state) == LAYERS and entries == {"count", "sum_kv", "ring", "block"}
    for entry in state.values():
        assert entry["count"].tolist() == [3 * CHUNK] * 3
        assert entry["sum_kv"].shape == (3, heads, s, e)
        assert entry["ring"].shape == (3, heads, CHUNK, 2 * s + e)
        assert entry["block"].shape == (3, heads, 0, 2 * s + e)  # a full chunk is in the ring


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_future_tokens_change_nothing(arch: str) -> None:
    """Causality of the whole model: earlier logits do not change, and later embeddings get no gradient from them."""
    model = _model(arch)
    sequence = tokens(1, 101)
    changed = sequence.clone()
    changed[0, 70:] = tokens(1, 31, seed=9)[0]
    with torch.no_grad():
        assert torch.equal(model(sequence)[0][:, :70], model(changed)[0][:, :70])
    embedded = []
    model.decoder.embed_tokens.register_forward_hook(lambda module, args, out: embedded.append(out) or out)
    logits = model(sequence)[0]
    (gradient,) = torch.autograd.grad(logits[:, 69].square().sum(), embedded[-1])
    assert gradient[:, 70:].abs().max() == 0.0
    # All earlier tokens are seen.
    assert gradient[0, :70].abs().amax(-1).min() > 1e-5 * gradient.abs().max()
