"""The contract of every Decision Transformer, and the literal model of the Flowformer paper's Table 7."""

from types import SimpleNamespace

import pytest
import torch
from fairseq import tasks
from fairseq.models import MODEL_REGISTRY
from torch import Tensor
from torch.nn import functional as F

from common.attention import ATTENTIONS, InnerAttention, record_attention
from common.ops import flow_attention
from fairseq_plugin.criterions.action_mse import ActionMSECriterion
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.episodes import ACTION, LONGEST, STATE, build_decision, described, window
from tests.fairseq_plugin.helpers.series import configuration

#: For models in float64: some mechanisms compute in float32 internally.
TOLERANCE = 1e-5
#: Models that see the state only; their tests are in test_decision_baselines.py.
BASELINES = {"awac_decision", "bc_decision"}
MODELS = sorted(name for name in MODEL_REGISTRY if name.endswith("_decision") and name not in BASELINES)


def pad(batch: dict[str, Tensor], left: int, right: int) -> dict[str, Tensor]:
    """A window between padding that holds large numbers and valid step numbers."""
    padded = {name: F.pad(batch[name], (0, 0, left, right), value=1e3) for name in ("returns", "states", "actions")}
    padded["timesteps"] = F.pad(batch["timesteps"], (left, right), value=LONGEST - 1)
    mask = torch.ones(padded["timesteps"].shape, dtype=torch.bool)
    mask[:, left : left + batch["timesteps"].shape[1]] = False
    return {**padded, "padding_mask": mask}


def loss(model, batch: dict[str, Tensor]) -> float:
    """The criterion's loss for a batch, the mean over real steps."""
    batch = {"padding_mask": torch.zeros_like(batch["timesteps"], dtype=torch.bool), **batch}
    sample = {"net_input": batch, "target": batch["actions"], "nsentences": 2, "ntokens": 6}
    total, size, _ = ActionMSECriterion(None)(model, sample)
    assert size == ACTION * int((~batch["padding_mask"]).sum())
    return float(total) / size


def test_every_causal_mechanism_has_one() -> None:
    """Only causal mechanisms have a decision model; one has a second name."""
    named = {f"{name}_decision" for name, declaration in ATTENTIONS.items() if "causal" in declaration.supports}
    assert set(MODELS) == named | {"flowformer_decision"}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_padding_on_either_side_gives_the_same_loss(name: str) -> None:
    """Actions and loss of a window do not change with padding before it, after it, or both."""
    model = build_decision(name).double()
    batch = window(2, 7)
    alone, expected = model(**batch), loss(model, batch)
    for left, right in ((5, 0), (0, 5), (2, 3)):
        padded = pad(batch, left, right)
        actions = model(**padded)[:, left : left + 7]
        assert_close(f"actions with {left} and {right} of padding", actions, alone, TOLERANCE)
        assert loss(model, padded) == pytest.approx(expected, rel=TOLERANCE)
    assert torch.isfinite(model(**pad(batch, 2, 3))).all()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_an_action_depends_on_what_was_before_it_alone(name: str) -> None:
    """An action depends on its return and state and on earlier steps, not on itself or later steps."""
    model, batch = build_decision(name).double(), window(2, 9)
    expected = model(**batch)
    later = {key: values.clone() for key, values in batch.items()}
    later["actions"][:, 4:] += 1.0
    later["states"][:, 5:] += 1.0
    later["returns"][:, 5:] += 1.0
    assert_close("the same past", model(**later)[:, :5], expected[:, :5], TOLERANCE)
    for key in ("returns", "states", "actions"):
        earlier = {**batch, key: batch[key].clone()}
        earlier[key][:, 3] += 1.0
        assert (model(**earlier)[:, 4] - expected[:, 4]).norm() > 1e-7, key


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_steps_one_by_one_give_the_same_actions(name: str) -> None:
    """Decoding with a state gives the same actions; the state grows only if it has entries per token."""
    model, batch = build_decision(name).double(), window(2, LONGEST)
    expected, state, sizes = model(**batch), {}, []
    for step in range(LONGEST):
        now = (batch[key][:, step] for key in ("returns", "states", "timesteps"))
        action = model.extend(state, *now, batch["actions"][:, step - 1] if step else None)
        assert_close(f"step {step}", action, expected[:, step], TOLERANCE)
        sizes.append(sum(x.numel() for entries in state.values() for x in entries.values() if x is not None))
    if not any(module.state_tokens() != 0 for module in model.modules() if isinstance(module, InnerAttention)):
        assert len(set(sizes[LONGEST // 2 :])) == 1


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_checkpointed_activations(name: str) -> None:
    """Every parameter learns; gradients are the same with --checkpoint-activations."""
    results = []
    for options in ({}, {"checkpoint_activations": True}):
        model = build_decision(name, **options).train()
        model(**pad(window(2, 9, dtype=torch.float32), 0, 3)).square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(gradient is not None for gradient in gradients)
        results.append(torch.cat([gradient.flatten() for gradient in gradients]))
    assert torch.isfinite(results[0]).all() and results[0].norm() > 0
    assert_close("gradients", results[1], results[0])


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_half_precision(name: str) -> None:
    """fairseq's --fp16, which casts model and input to half precision."""
    model, batch = build_decision(name, std=0.2), pad(window(2, 9, dtype=torch.float32), 0, 3)
    expected = model(**batch)
    halved = {key: values.half() if values.is_floating_point() else values for key, values in batch.items()}
    assert_close("actions", model.half()(**halved).float()[:, :9], expected[:, :9], 2e-2)


@torch.no_grad()
def literal(model, batch: dict[str, Tensor]) -> Tensor:
    """The authors' model, written literally, for whole windows: the actions (B, K, A)."""
    weights = dict(model.named_parameters())

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    steps = weights["embed_timestep.weight"][batch["timesteps"]]
    tokens = [linear(f"embed_{name}", batch[f"{name}s"]) + steps for name in ("return", "state", "action")]
    batch_size, count, width = tokens[0].shape
    x = norm("embed_ln", torch.stack(tokens, dim=1).permute(0, 2, 1, 3).reshape(batch_size, 3 * count, width))
    for i in range(model.args.decoder_layers):
        layer = f"layers.{i}"
        normed = norm(f"{layer}.self_attn_layer_norm", x)
        heads = [linear(f"{layer}.self_attn.{y}_proj", normed).unflatten(-1, (2, -1)).transpose(1, 2) for y in "qkv"]
        attended = flow_attention(*heads, causal=True, form="released", clamp=10.0).transpose(1, 2).flatten(2)
        x = x + linear(f"{layer}.self_attn.out_proj", attended)
        x = x + linear(f"{layer}.fc2", F.relu(linear(f"{layer}.fc1", norm(f"{layer}.final_layer_norm", x))))
    x = norm("layer_norm", x).reshape(batch_size, count, 3, width)
    return torch.tanh(linear("predict_action.0", x[:, :, 1]))


def test_flowformer_is_the_authors_model() -> None:
    """Three embeddings plus the step's, norm, pre-norm layers with ReLU, norm, tanh at the state's token."""
    model = build_decision("flowformer_decision", decoder_layers=2).double()
    batch = window(2, 9)
    assert_close("actions", model(**batch), literal(model, batch), TOLERANCE)


def test_defaults_are_the_papers_size() -> None:
    """3 layers, 4 heads, width 256, clamp 10, dropout 0.1, 1000 steps; the authors' initialisation."""
    task = SimpleNamespace(
        description=described(mean=[0.0] * 17, std=[1.0] * 17, low=[-1.0] * 6, high=[1.0] * 6),
        context=20,
        max_episode_length=1000,
    )
    model = tasks.FairseqTask.build_model(task, configuration("flowformer_decision"))
    embeddings = (1000 + 1 + 17 + 6 + 3 + 2) * 256  # steps, weights and biases of three, a norm
    layer = 4 * (256 + 1) * 256 + (256 + 1) * 1024 + (1024 + 1) * 256 + 4 * 256
    assert sum(parameter.numel() for parameter in model.parameters()) == embeddings + 3 * layer + 512 + 6 * 257
    layer = model.layers[0]
    assert (len(model.layers), layer.fc1.out_features, layer.self_attn.num_heads) == (3, 1024, 4)
    assert layer.normalize_before and layer.dropout_module.p == model.dropout_module.p == 0.1
    assert layer.self_attn.inner.options.clamp == 10.0 and layer.self_attn.inner.options.form == "released"
    assert layer.fc1.weight.std().item() == pytest.approx(0.02, rel=0.02) and layer.fc1.bias.abs().max() == 0.0
    assert model.embed_timestep.weight.std().item() == pytest.approx(1.0, rel=0.02)


def test_attention_can_be_recorded() -> None:
    """One record per layer, with three tokens per step; padded steps have weight 0."""
    model = build_decision("flowformer_decision", decoder_layers=2).float()
    with torch.no_grad(), record_attention(model) as records:
        model(**pad(window(2, 9, dtype=torch.float32), 0, 2))
    assert len(records) == 2 and records[0].competition.shape == (2, 2, 33)


def test_what_cannot_be_read_is_refused() -> None:
    """Errors name too many steps, wrong sizes, another task, and options that are not allowed."""
    model = build_decision("flowformer_decision").float()
    batch = window(1, 5, dtype=torch.float32)
    for name, size in (("returns", 1), ("states", STATE), ("actions", ACTION)):
        with pytest.raises(ValueError, match=rf"{name} has shape \(1, 5, {size + 1}\); allowed"):
            model(**{**batch, name: torch.zeros(1, 5, size + 1)})
    for bad in (LONGEST, -1):
        with pytest.raises(ValueError, match=f"timesteps .* allowed: 0 to {LONGEST - 1}"):
            model(**{**batch, "timesteps": torch.full((1, 5), bad)})
    with pytest.raises(ValueError, match="--decoder-embed-dim is 0; allowed"):
        build_decision("flowformer_decision", decoder_embed_dim=0)
    with pytest.raises(ValueError, match="--decoder-attention-heads is 3; allowed"):
        build_decision("linear_decision", decoder_attention_heads=3)
    with pytest.raises(ValueError, match="--flow-clamp is -1"):
        build_decision("flowformer_decision", flow_clamp=-1.0)
    with pytest.raises(ValueError, match="--task is SimpleNamespace; allowed .*offline_rl"):
        tasks.FairseqTask.build_model(SimpleNamespace(), configuration("linear_decision"))


@pytest.mark.parametrize("name, options", [("rfa_gate", {}), ("linear", {"linear_forget": "head"})])
def test_gates_begin_as_their_mechanism_has_them(name: str, options: dict[str, str]) -> None:
    """Layers are initialised as in GPT-2, except gates, whose bias of 0 would forget all but two tokens."""
    config = configuration(
        f"{name}_decision", decoder_layers=1, decoder_embed_dim=32, decoder_attention_heads=4, **options
    )
    task = SimpleNamespace(description=described(), context=None, max_episode_length=LONGEST)
    attention = tasks.FairseqTask.build_model(task, config).layers[0].self_attn
    gate = next(module for key, module in attention.inner.named_modules() if key.endswith("gate_proj"))
    assert (gate.bias > 1).all()
    assert attention.out_proj.bias.eq(0).all() and attention.out_proj.weight.std() < 0.025
