"""The contract of every model of the plugin, over fairseq's registry; a new mechanism needs no line here."""

from argparse import ArgumentParser, Namespace
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from omegaconf import OmegaConf
from torch import Tensor, nn

from common.attention import ATTENTIONS, supporting
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.language_models import awake, flags_of
from tests.fairseq_plugin.helpers.masked_models import randomised
from tests.fairseq_plugin.helpers.registry import CAUSAL, OURS, SHORT
from tests.fairseq_plugin.helpers.text import dictionary, tokens

PAD = 1
#: Models of one token sequence; the others have test files of their own.
MODELS = [name for name in OURS if name.endswith(("_lm", "_mlm", "_classifier"))]
BIDIRECTIONAL = [name for name in MODELS if not name.endswith("_lm")]
TASKS = {"lm": "language_modeling", "mlm": "masked_lm", "classifier": "sentence_prediction"}
MASKS = {"mlm": "<mask>", "classifier": "[MASK]"}
CRITERIA = {"language_modeling": "cross_entropy"}
#: One model of each mechanism is saved and loaded, the causal one if there is one: stored options are
#: the same in all of its models. A masked model and a classifier represent the other kinds.
SAVED = [*CAUSAL, *(name for name in BIDIRECTIONAL if name.endswith("_mlm") and f"{name[:-4]}_lm" not in CAUSAL)]
SAVED += ["flowformer_mlm", "flowformer_classifier"]
LENGTH = 27
LIMIT = 40


configuration_flags = cache(flags_of)


@cache
def parsed(name: str, *arguments: str) -> Namespace:
    """The parsed ``fairseq-train --arch NAME ARGUMENTS`` with a tiny size, for the task of the model."""
    side, task = "decoder" if name in CAUSAL else "encoder", TASKS[name.rpartition("_")[2]]
    command = ["data", "--task", task, "--criterion", CRITERIA.get(task, task), "--arch", name]
    command += f"--{side}-layers 2 --{side}-embed-dim 16 --{side}-ffn-embed-dim 16 --{side}-attention-heads 2".split()
    if name in CAUSAL:
        command += "--decoder-input-dim 16 --decoder-output-dim 16".split()
    command += ["--max-positions" if name.endswith("classifier") else "--tokens-per-sample", str(LIMIT)]
    command += ["--num-classes", "3"] * name.endswith("classifier")
    for ending, value in SHORT.items():
        command += [x for flag in configuration_flags(name) if flag.endswith(ending) for x in (flag, value)]
    command += ["--dropout", "0", *arguments]
    return options.parse_args_and_arch(options.get_training_parser(), command)


def build(name: str, *arguments: str) -> nn.Module:
    """A tiny model in evaluation mode, without dropout, whose attention clearly affects its outputs.

    Built from the parsed command line. The conversion that fairseq-train makes takes most of a second, and is
    what ``test_saved_models_load`` stores.
    """
    symbols = dictionary()
    if name not in CAUSAL:
        symbols.add_symbol(MASKS[name.rpartition("_")[2]])  # as the task does
    task = SimpleNamespace(source_dictionary=symbols, target_dictionary=symbols, max_positions=lambda: LIMIT)
    torch.default_generator.manual_seed(1)
    model = tasks.FairseqTask.build_model(task, deepcopy(parsed(name, *arguments)))
    if name.endswith("classifier"):
        model.register_classification_head("sentence_classification_head", num_classes=3)
    return awake(model).eval()


def build_shown(name: str) -> nn.Module:
    """As ``build``; encoders in float64 with large weights, since RoBERTa's initial attention is near zero."""
    return build(name) if name in CAUSAL else randomised(build(name).double())


def outputs(model: nn.Module, sequence: Tensor) -> Tensor:
    """Logits or features (B, T, ...) of sequence (B, T)."""
    return model(sequence)[0]


def pad(sequence: Tensor, left: int, right: int) -> Tensor:
    """sequence (B, T) between padding."""
    return nn.functional.pad(sequence, (left, right), value=PAD)


def test_every_mechanism_has_its_models() -> None:
    """One language model per causal mechanism, a masked model and a classifier for each other one."""
    for name in ATTENTIONS:
        kinds = [("causal", "lm"), ("bidirectional", "mlm"), ("bidirectional", "classifier")]
        for supported, kind in kinds:
            assert (name in supporting(supported)) == (f"{name}_{kind}" in MODELS), f"{name}_{kind}"
    assert {"flowformer_lm", "flowformer_mlm", "flowformer_classifier"} <= set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_command_line(name: str) -> None:
    """``--help`` explains every option that fairseq's own models do not have."""
    parser, stock = (ArgumentParser(allow_abbrev=False) for _ in range(2))
    MODEL_REGISTRY[name].add_args(parser)
    MODEL_REGISTRY["transformer_lm" if name in CAUSAL else "roberta"].add_args(stock)
    assert f"usage: {parser.prog}" in parser.format_help()
    stock_options = {action.dest for action in stock._actions}
    own_actions = [action for action in parser._actions if action.dest not in stock_options]
    assert all(len(action.help) >= 15 for action in own_actions), [action.dest for action in own_actions]


@pytest.mark.parametrize("name", MODELS)
def test_errors_name_what_was_typed(name: str) -> None:
    """Errors name options as typed: fairseq's with their side, the attention's with the model's prefix."""
    side = "decoder" if name in CAUSAL else "encoder"
    with pytest.raises(ValueError, match=f"^--{side}-attention-heads is 3; allowed: .* --{side}-[a-z-]+, 16"):
        build(name, f"--{side}-attention-heads", "3")
    flags = [flag for flag in configuration_flags(name) if flag.endswith(("-chunk-size", "-row-length", "-query-dim"))]
    for flag in flags:
        with pytest.raises(ValueError, match=f"^{flag} is -1; allowed"):
            build(name, flag, "-1")


@pytest.mark.parametrize("name", ["daft_conv_mlm", "daft_conv_classifier"])
def test_errors_of_windows_name_what_was_typed(name: str) -> None:
    """Errors that only the built attention can raise: a window without a middle token."""
    with pytest.raises(ValueError, match="^--daft-conv-window is 8; allowed when not causal"):
        build(name, "--daft-conv-window", "8")


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_padding_and_neighbours_never_change_a_token(name: str) -> None:
    """Padding on either side and rows of other lengths change nothing; rows of only padding are finite."""
    model, sequence = build_shown(name), tokens(2, LENGTH)
    alone = outputs(model, sequence)
    for left, right in ((5, 0), (0, 7), (3, 2)):
        beside = outputs(model, pad(sequence, left, right))[:, left : left + LENGTH]
        assert_close(f"outputs with {left} and {right} of padding", beside, alone, 2e-5)
    short, single = pad(sequence[:1, :6], LENGTH - 6, 0), pad(sequence[:1, :1], 0, LENGTH - 1)
    batch = torch.cat([sequence, short, single, torch.full((1, LENGTH), PAD)])
    together = outputs(model, batch)
    assert torch.isfinite(together).all()
    assert_close("rows beside others", together[:2], alone, 2e-5)
    assert_close("a short row", together[2, LENGTH - 6 :], outputs(model, sequence[:1, :6])[0], 2e-5)
    assert_close("a row of one token", together[3, :1], outputs(model, sequence[:1, :1])[0], 2e-5)


@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_every_token_sees_every_token(name: str) -> None:
    """First, middle and last token see every third of the sequence; relu² has zeros, so not every token."""
    model, embedded = build_shown(name), []
    model.encoder.sentence_encoder.embed_tokens.register_forward_hook(lambda *given: embedded.append(given[-1]))
    out = outputs(model, tokens(1, LIMIT - 2))[0]
    for seeing in (0, LIMIT // 2, -1):
        (gradient,) = torch.autograd.grad(out[seeing].square().sum(), embedded, retain_graph=True)
        visible = (gradient[0] != 0).any(dim=-1)
        assert all(third.any() for third in visible.chunk(3)), (
            f"token {seeing} sees {visible.nonzero().flatten().tolist()}"
        )
    (gradient,) = torch.autograd.grad(out.square().sum(), embedded)
    assert (gradient[0] != 0).any(dim=-1).all(), "every token is seen"


@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_decoding_is_the_full_forward(name: str) -> None:
    """Prefixes and single steps equal the full forward, also after reordering beams with padded rows."""
    model, sequence = build(name), tokens(3, LENGTH)
    sequence[1, :4] = PAD
    whole, real = outputs(model, sequence), sequence.ne(PAD)
    for length in (1, 8, 9, 20):
        prefix = outputs(model, sequence[:, :length])
        assert_close(f"the first {length}", prefix[real[:, :length]], whole[:, :length][real[:, :length]], 2e-5)
    state, steps = {}, []
    for end in range(1, 18):
        steps.append(model.decoder(sequence[:, :end], incremental_state=state)[0])
    assert_close("steps", torch.cat(steps, dim=1)[real[:, :17]], whole[:, :17][real[:, :17]], 2e-5)
    order = torch.tensor([2, 1, 1])
    sequence, whole = sequence[order], whole[order]
    model.decoder.reorder_incremental_state_scripting(state, order)
    for end in range(18, LENGTH + 1):
        step = model.decoder(sequence[:, :end], incremental_state=state)[0]
        assert_close(f"step {end} after the reordering", step[:, 0], whole[:, end - 1], 2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_checkpointed_activations(name: str) -> None:
    """Gradients are finite with a row of only padding, and equal with --checkpoint-activations.

    Checkpointing runs layers twice; offloading implies it.
    """
    results = []
    for arguments in ((), ("--checkpoint-activations",), ("--offload-activations",)):
        model = build(name, *arguments).train()
        calls = []
        stack = model.decoder if name in CAUSAL else model.encoder.sentence_encoder
        for layer in stack.layers:
            part = layer.unit if hasattr(layer, "unit") else layer.self_attn
            part.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        batch = torch.cat([pad(tokens(2, LENGTH), 0, 2), torch.full((1, LENGTH + 2), PAD)])
        outputs(model, batch)[:, :LENGTH].square().mean().backward()
        gradients = [parameter.grad for parameter in stack.layers.parameters() if parameter.grad is not None]
        results.append((len(calls), torch.cat([gradient.flatten() for gradient in gradients])))
    assert [calls for calls, _ in results] == [2, 4, 4]
    assert torch.isfinite(results[0][1]).all()
    for _, gradients in results[1:]:
        assert_close("gradients", gradients, results[0][1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "autocast"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """fairseq's --fp16, which casts the model, and autocast: outputs near those of float32, at 200 tokens."""
    limit = "--max-positions" if name.endswith("classifier") else "--tokens-per-sample"
    model, sequence = build(name, limit, "205"), pad(tokens(1, 200), 2, 3)
    real, expected = sequence.ne(PAD), outputs(model, sequence)
    if dtype == torch.float16:
        actual = outputs(model.half(), sequence)
        assert actual.dtype == dtype
    else:
        with torch.autocast("cpu", dtype=dtype):
            actual = outputs(model, sequence)
    assert_close("outputs", actual[real].float(), expected[real], 0.1 if dtype == torch.bfloat16 else 2e-2)


@pytest.mark.parametrize("name", MODELS)
def test_it_learns(name: str) -> None:
    """The loss on next words, input words or labels falls within a few updates."""
    model, sequence = build(name).train(), tokens(8, LENGTH)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        if name.endswith("classifier"):
            head = {"features_only": True, "classification_head_name": "sentence_classification_head"}
            scores, targets = model(sequence, **head)[0], sequence[:, 0] % 3
        else:
            targets = sequence[:, 1:] if name in CAUSAL else sequence[:, :-1]
            scores, targets = outputs(model, sequence)[:, :-1].flatten(0, 1), targets.flatten()
        loss = nn.functional.cross_entropy(scores.float(), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", SAVED)
@torch.no_grad()
def test_saved_models_load(name: str, tmp_path: Path) -> None:
    """``from_pretrained`` of a fairseq-train checkpoint gives equal outputs; ``load_state_dict`` is strict."""
    model, sequence = build(name), tokens(2, LENGTH)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    key = next(key for key in state if key.endswith("fc2.weight") or key.endswith("out_proj.weight"))
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        build(name).load_state_dict({**state, key: state[key][:-1]})
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        build(name).load_state_dict({entry: value for entry, value in state.items() if entry != key})
    dictionary().save(str(tmp_path / "dict.txt"))
    if name.endswith("classifier"):
        for part in ("input0", "label"):
            (tmp_path / part).mkdir()
            dictionary().save(str(tmp_path / part / "dict.txt"))
    stored = {
        "cfg": OmegaConf.to_container(convert_namespace_to_omegaconf(parsed(name)), enum_to_str=True),
        "args": None,
        "model": state,
        "optimizer_history": [{"num_updates": 0, "lr_scheduler_state": {}}],
        "extra_state": {"train_iterator": {"epoch": 1}},
        "task_state": {},
    }
    torch.save(stored, tmp_path / "model.pt")
    hub = ARCH_MODEL_REGISTRY[name].from_pretrained(str(tmp_path), "model.pt", data_name_or_path=str(tmp_path))
    loaded = hub.models[0] if hasattr(hub, "models") else hub.model
    assert type(loaded) is type(model)
    loaded.eval()  # it returns None for a loaded language model
    assert_close("outputs", outputs(loaded, sequence), outputs(model, sequence))


@pytest.mark.parametrize("name", ["daft_full_mlm", "daft_conv_mlm", "daft_full_classifier", "daft_full_lm"])
def test_attention_with_fewer_projections(name: str) -> None:
    flag = "--daft-no-query" if name in ("daft_full_lm",) else f"--{name.rpartition('_')[0].replace('_', '-')}-no-query"
    model = build(name, flag)
    attention = [x for x in model.modules() if hasattr(x, "q_proj")]
    assert len(attention) == 2 and all(
        not list(x.q_proj.parameters()) and list(x.k_proj.parameters()) for x in attention
    )
    assert torch.isfinite(outputs(model, tokens(2, 9))).all()
