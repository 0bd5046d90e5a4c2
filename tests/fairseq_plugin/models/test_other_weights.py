"""Options that determine a model's weights: if one differs from the checkpoint's, the error names it."""

from argparse import Action, ArgumentParser
from collections.abc import Iterator

import pytest
from fairseq.models import MODEL_REGISTRY
from torch import nn

from recipes.models import model_options
from tests.compare import weights
from tests.fairseq_plugin.helpers import encoder_decoders
from tests.fairseq_plugin.helpers.language_models import build, flags_of
from tests.fairseq_plugin.helpers.registry import CAUSAL, MASKED, SHORT

#: One model per attention, the causal one if there is one, and stacks of several attentions.
MODELS = [*CAUSAL, *(x for x in MASKED if f"{x[:-4]}_lm" not in CAUSAL), "flash_mlm"]


def _command(name: str, *arguments: str) -> list[str]:
    side, task = ("decoder", "language_modeling") if name in CAUSAL else ("encoder", "masked_lm")
    command = ["data", "--task", task, "--arch", name, "--tokens-per-sample", "40"]
    command += ["--criterion", "cross_entropy" if name in CAUSAL else task]
    command += f"--{side}-layers 2 --{side}-embed-dim 16 --{side}-ffn-embed-dim 16 --{side}-attention-heads 2".split()
    command += "--decoder-input-dim 16 --decoder-output-dim 16".split() if name in CAUSAL else []
    all_flags = flags_of(name)
    return [
        *command,
        *(x for end, n in SHORT.items() for flag in all_flags if flag.endswith(end) for x in (flag, n)),
        *arguments,
    ]


def _own_options(name: str) -> list[Action]:
    """The options that fairseq's own model does not have."""
    parser, stock = (ArgumentParser(allow_abbrev=False) for _ in range(2))
    MODEL_REGISTRY[name].add_args(parser)
    MODEL_REGISTRY["transformer_lm" if name in CAUSAL else "roberta"].add_args(stock)
    all_flags, stock_options = flags_of(name), {action.dest for action in stock._actions}
    return [x for x in parser._actions if x.dest not in stock_options and set(x.option_strings) & set(all_flags)]


def _others(name: str, option: Action) -> Iterator[tuple[nn.Module, list[str]]]:
    """Models with different values of an option, and their command lines."""
    values = [x for x in option.choices or () if str(x) != str(option.default)] or ["13", "12"]
    for value in [[]] if option.nargs == 0 else [[str(x)] for x in values]:
        command = _command(name, option.option_strings[0], *value)
        try:
            yield build(command), command
        except ValueError:  # value not allowed
            continue


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in weights(model.state_dict()).items()}


@pytest.mark.parametrize("name", MODELS)
def test_an_option_that_decides_weights_is_named(name: str) -> None:
    """Options that do not determine weights, such as a chunk size, are not refused."""
    model, decide = build(_command(name)), []
    for option in _own_options(name):
        for other_model, command in _others(name, option):
            if _shapes(other_model) == _shapes(model):
                continue
            decide.append(option.option_strings[0])
            with pytest.raises(ValueError, match=f"does not fit .*{option.option_strings[0]}[ :,)]"):
                other_model.load_state_dict(model.state_dict(), model_cfg=model_options(command))
    assert decide or name in ("hybrid_mlm", "hybrid_lm")


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        ("flow,hedgehog", "flow,softmax", "flow,hedgehog in the checkpoint and flow,softmax here: --lineartime-layers"),
        ("flow,hedgehog", "flow", r"flow,hedgehog in the checkpoint and flow\*2 here: .* 'flow' here"),
    ],
)
def test_the_attentions_of_all_layers_are_said(there: str, here: str, said: str) -> None:
    command = _command("hybrid_lm", "--lineartime-layers", here)
    stored = build(_command("hybrid_lm", "--lineartime-layers", there)).state_dict()
    with pytest.raises(ValueError, match=f"decoder.layers.*.self_attn is {said}"):
        build(command).load_state_dict(stored, model_cfg=model_options(command))


@pytest.mark.parametrize(("arch", "option"), [("flow", "t2r"), ("hybrid", "linear")])
def test_another_cross_attention_is_said(arch: str, option: str) -> None:
    stored = encoder_decoders.build_model(arch, "--lineartime-cross-attention", option).state_dict()
    with pytest.raises(ValueError, match=rf"decoder.layers.\*.encoder_attn is {option}\*2 in the checkpoint"):
        encoder_decoders.build_model(arch, "--lineartime-cross-attention", "favor").load_state_dict(stored)
