"""The criterion ``awac``: which steps it learns from, its losses by hand, and that it prefers what paid off."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from fairseq_plugin.criterions.awac import AWACCriterion, transitions
from fairseq_plugin.data.episodes import collate
from tests.fairseq_plugin.helpers.episodes import ACTION, STATE, build_decision

SCALE, LONGEST = 10.0, 6


def windows() -> dict[str, Tensor]:
    """Three windows of at most 3 steps: within an episode, at its end, and at the end of one that the clock ended."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for returns, first in (([9.0, 7.0, 4.0], 0), ([5.0, 2.0], 2), ([8.0, 3.0], LONGEST - 2)):
        steps = len(returns)
        made.append(
            {
                "returns": torch.tensor(returns)[:, None] / SCALE,
                "states": torch.randn(steps, STATE, generator=generator),
                "actions": torch.rand(steps, ACTION, generator=generator) * 2 - 1,
                "timesteps": torch.arange(first, first + steps),
            }
        )
    return collate(made)


def build_criterion(context: int | None = 3, **options: float) -> AWACCriterion:
    """The criterion in a task of such windows."""
    description = SimpleNamespace(longest=LONGEST)
    task = SimpleNamespace(context=context, cfg=SimpleNamespace(return_scale=SCALE), description=description)
    return AWACCriterion(task, **{"awac_lambda": 1.0, "awac_discount": 0.5, "awac_max_weight": 100.0, **options})


def test_which_steps_are_learned_from() -> None:
    """Rewards are differences of returns; the last step of a window counts where the environment ended the episode."""
    batch = windows()
    found = transitions(batch, SCALE, 3, LONGEST)
    assert found.rewards.tolist() == pytest.approx([2.0, 3.0, 3.0, 2.0, 5.0])
    assert found.ends.tolist() == [False, False, False, True, False]
    rows, steps = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 1, 0, 1, 0])
    assert torch.equal(found.states, batch["states"][rows, steps])
    kept = ~found.ends
    assert torch.equal(found.next_states[kept], batch["states"][rows, (steps + 1).clamp(max=2)][kept])
    whole = transitions(batch, SCALE, None, LONGEST)
    assert whole.rewards.tolist() == pytest.approx([2.0, 3.0, 4.0, 3.0, 2.0, 5.0])
    assert whole.ends.tolist() == [False, False, True, False, True, False]


def test_losses_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both critics to the reward and the lesser slow critic; likelihood weighed by the advantage over the policy."""
    model = build_decision("awac_decision", decoder_layers=1, decoder_embed_dim=8).train()
    monkeypatch.setattr(
        model, "sample", lambda states: model.policy(states)
    )  # the likeliest action in place of a random one
    criterion, batch = build_criterion(awac_lambda=2.0, awac_max_weight=1.2), windows()
    sample = {"net_input": batch, "target": batch["actions"], "nsentences": 3, "ntokens": 21}
    losses, count, logged = criterion(model, sample, reduce=False)
    found = transitions(batch, SCALE, 3, LONGEST)
    expected = []
    for s, a, r, later, end in zip(*found):
        q = [critic(torch.cat([s, a])) for critic in model.critics]
        slow = [critic(torch.cat([later, model.policy(later)])) for critic in model.targets]
        usual = [critic(torch.cat([s, model.policy(s)])) for critic in model.critics]
        wanted = r + (0.0 if end else 0.5 * min(slow))
        weight = min(1.2, float(torch.exp((min(q) - min(usual)).detach() / 2.0)))
        likelihood = Normal(model.policy(s), model.log_std.clamp(-6.0, 0.0).exp()).log_prob(a).sum()
        expected.append(sum((one - wanted) ** 2 for one in q) - weight * likelihood)
    torch.testing.assert_close(losses.detach(), torch.cat(expected).detach())
    assert count == 5 == logged["sample_size"]
    real = ~batch["padding_mask"]
    errors = (model(**batch)[real] - batch["actions"][real]).square()
    assert float(logged["action_errors"]) == pytest.approx(errors.sum().item()) and logged["action_numbers"] == 14


def test_gradients_of_policy_and_critics_are_apart() -> None:
    """The critics learn from their errors alone; slow critics have no gradient."""
    model = build_decision("awac_decision", decoder_layers=1, decoder_embed_dim=8).train()
    found = transitions(windows(), SCALE, 3, LONGEST)
    (
        -build_criterion().weights(model, found) * model.distribution(found.states).log_prob(found.actions).sum(1)
    ).sum().backward()
    assert all(parameter.grad is None for parameter in [*model.critics.parameters(), *model.targets.parameters()])
    assert all(parameter.grad is not None for parameter in [*model.policy.parameters(), model.log_std])


def test_it_prefers_the_action_that_paid_off() -> None:
    """One step, two actions in one state, of which one has a reward: the policy goes to it, a clone to their mean."""
    torch.manual_seed(1)
    model = build_decision("awac_decision", decoder_layers=1, decoder_embed_dim=16).train()
    optimizer = torch.optim.Adam([x for x in model.parameters() if x.requires_grad], lr=0.01)
    good = torch.arange(32) % 2 == 0
    actions = torch.where(good, 0.8, -0.8)[:, None, None].expand(32, 1, ACTION)
    batch = {
        "returns": torch.where(good, 3.0, 0.0)[:, None, None] / SCALE,
        "states": torch.zeros(32, 1, STATE),
        "actions": actions,
        "timesteps": torch.zeros(32, 1, dtype=torch.long),
        "padding_mask": torch.zeros(32, 1, dtype=torch.bool),
    }
    criterion = build_criterion(context=None, awac_lambda=0.5)
    for update in range(150):
        model.set_num_updates(update)
        loss, size, _ = criterion(model, {"net_input": batch, "target": actions, "nsentences": 32, "ntokens": 96})
        optimizer.zero_grad()
        (loss / size).backward()
        optimizer.step()
    assert model(**batch).min() > 0.5


@pytest.mark.parametrize(
    ("option", "value"),
    [("awac_lambda", 0.0), ("awac_max_weight", float("inf")), ("awac_discount", 1.5), ("context", 1)],
)
def test_what_cannot_be_is_refused(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"--{option.replace('_', '-')} is {value}; allowed"):
        build_criterion(**{option: value})
