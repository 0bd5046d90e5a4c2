"""Behaviour cloning and AWAC: they see the state only; critics are saved; target critics follow."""

import pytest
import torch

from tests.compare import assert_close
from tests.fairseq_plugin.helpers.episodes import ACTION, LONGEST, STATE, build_decision, window

MODELS = ("bc_decision", "awac_decision")
SIZES = {"decoder_layers": 2, "decoder_embed_dim": 8}


def build(name: str, **options) -> torch.nn.Module:
    """A tiny model; these have no option for heads."""
    return build_decision(name, **SIZES, **options)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_an_action_depends_on_its_state_alone(name: str) -> None:
    """Returns, actions and other steps have no effect; decoding gives the same; range -1 to 1."""
    model, batch = build(name).double(), window(2, 9)
    expected = model(**batch)
    other_batch = {**window(2, 9, seed=1), "states": batch["states"]}
    assert torch.equal(model(**other_batch), expected) and expected.abs().max() < 1.0
    assert expected.shape == (2, 9, ACTION)
    changed = {**batch, "states": batch["states"].clone()}
    changed["states"][:, 3] += 1.0
    steps = [step for step in range(9) if not torch.equal(model(**changed)[:, step], expected[:, step])]
    assert steps == [3]
    now = (batch[key][:, 4] for key in ("returns", "states", "timesteps"))
    assert_close("a step", model.extend({}, *now, batch["actions"][:, 3]), expected[:, 4], 1e-9)


def test_two_hidden_layers_are_cloned() -> None:
    model = build("bc_decision")
    assert [tuple(x.shape) for x in model.parameters()] == [
        (8, STATE), (8,), (8, 8), (8,), (ACTION, 8), (ACTION,)
    ]  # fmt: skip


@torch.no_grad()
def test_slow_critics_follow_once_after_each_update() -> None:
    """They move by the given rate, once per update; a loaded model continues."""
    model = build("awac_decision", awac_target_rate=0.25)
    slow, fast = model.targets[0][0].weight, model.critics[0][0].weight
    slow.zero_(), fast.fill_(1.0)
    model.set_num_updates(0)
    assert slow.abs().max() == 0.0
    for _ in range(2):
        model.set_num_updates(1)
        assert torch.all(slow == 0.25)
    resumed = build("awac_decision", awac_target_rate=0.25)
    resumed.load_state_dict(model.state_dict())
    resumed.set_num_updates(1)
    assert torch.all(resumed.targets[0][0].weight == 0.25)
    resumed.set_num_updates(2)
    assert torch.all(resumed.targets[0][0].weight == 0.4375)
    assert not any(parameter.requires_grad for parameter in model.targets.parameters())


def test_what_cannot_be_is_refused() -> None:
    batch = window(1, 5, dtype=torch.float32)
    for name in MODELS:
        with pytest.raises(ValueError, match=r"states has shape \(1, 5, 4\); allowed"):
            build(name).float()(**{**batch, "states": torch.zeros(1, 5, STATE + 1)})
        with pytest.raises(ValueError, match=f"timesteps .* allowed: 0 to {LONGEST - 1}"):
            build(name).float()(**{**batch, "timesteps": torch.full((1, 5), LONGEST)})
    with pytest.raises(ValueError, match="--decoder-embed-dim is 0; allowed"):
        build_decision("bc_decision", decoder_embed_dim=0, decoder_layers=1)
    for rate in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"--awac-target-rate is {rate}; allowed"):
            build("awac_decision", awac_target_rate=rate)
