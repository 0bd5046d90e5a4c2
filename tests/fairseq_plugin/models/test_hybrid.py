"""Stacks of several attentions: the attention of each layer, checkpoints, pruning, and errors."""

from pathlib import Path

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task

from common.attention import layer_kinds
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.checkpoint_files import save_model
from tests.fairseq_plugin.helpers.encoder_decoders import build_model as build_encoder_decoder
from tests.fairseq_plugin.helpers.language_models import build_model
from tests.fairseq_plugin.helpers.masked_models import build_masked
from tests.fairseq_plugin.helpers.text import tokens

FLAG = "--lineartime-layers"


def kinds(layers: torch.nn.ModuleList) -> list[str]:
    return [layer.self_attn.inner.name for layer in layers.children()]


def test_a_pattern_repeats_and_is_cut_where_the_layers_end():
    names = ["flow", "softmax", "local"]
    assert layer_kinds("flow*3,softmax", names, range(6)) == ["flow"] * 3 + ["softmax"] + ["flow"] * 2
    assert layer_kinds(" local , flow*2", names, range(4)) == ["local", "flow", "flow", "local"]
    assert layer_kinds("flow*3,softmax", names, [1, 3, 7], whole=False) == ["flow", "softmax", "softmax"]
    assert layer_kinds("flow*3,softmax", names, [0, 1], whole=False) == ["flow", "flow"]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("", "with ''; allowed: NAME or NAME"),
        ("flow*0", r"with 'flow\*0'; allowed"),
        ("flow softmax", "with 'flow softmax'; allowed"),
        ("softmax,flo", "with 'flo'; allowed: flow, softmax"),
        ("flow*2,softmax", "a pattern of 3 layers; allowed: of at most 2"),
    ],
)
def test_patterns_that_fit_nothing(pattern, said):
    with pytest.raises(ValueError, match=said):
        layer_kinds(pattern, ["flow", "softmax"], range(2))


def test_every_model_of_several_attentions():
    """A model offers the attentions that suit it, each with its own options."""
    model = build_model("hybrid_lm", FLAG, "gla,local", "--local-window", "7")
    assert (
        kinds(model.decoder.layers) == ["gla", "local"] and model.decoder.layers[1].self_attn.inner.options.window == 7
    )
    for arch in ("hybrid_mlm", "hybrid_classifier"):
        layers = build_masked(arch, FLAG, "nystrom,softmax").encoder.sentence_encoder.layers
        assert kinds(layers) == ["nystrom", "softmax"]
    model = build_encoder_decoder("hybrid", FLAG, "nystrom,linear")
    assert kinds(model.encoder.layers) == ["nystrom", "linear"]
    assert kinds(model.decoder.layers) == ["softmax", "linear"]  # softmax replaces non-causal mechanisms in decoders


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("gla*3", "--lineartime-layers is 'gla.3', a pattern of 3 layers; allowed: of at most 2"),
        ("nystrom", "--lineartime-layers is 'nystrom', with 'nystrom'; allowed: .*softmax"),
        ("flow --local-window 3", "--local-window is 3 and --lineartime-layers 'flow'; allowed: with local"),
        ("flow,local --local-window 0", "--local-window is 0; allowed"),
    ],
)
def test_bad_input(arguments, said):
    with pytest.raises(ValueError, match=said):
        build_model("hybrid_lm", FLAG, *arguments.split())


@pytest.mark.parametrize("kept", [(1, 2), (0, 1)], ids=str)
def test_layers_that_are_kept_keep_their_attention(kept: tuple[int, int], tmp_path: Path, data_bin: str):
    """fairseq's --decoder-layers-to-keep loads the chosen layers of a checkpoint with their own weights."""
    arguments = (FLAG, "flow,softmax,linear", "--decoder-layers", "3")
    path, options = tmp_path / "model.pt", {"data": data_bin, "decoder_layers_to_keep": ",".join(map(str, kept))}
    whole = save_model(path, "cfg", "hybrid_lm", *arguments).eval()
    (pruned,), *_ = load_model_ensemble_and_task([str(path)], arg_overrides=options)
    assert kinds(pruned.decoder.layers) == [("flow", "softmax", "linear")[i] for i in kept]
    for layer, original in zip(pruned.decoder.layers, [whole.decoder.layers[i] for i in kept], strict=True):
        x = torch.randn(5, 1, 32, generator=torch.Generator().manual_seed(0))
        assert_close("layer", layer.eval()(x)[0], original(x)[0])


def test_a_checkpoint_remembers_the_attention_of_each_layer(tmp_path: Path, data_bin: str):
    path = tmp_path / "model.pt"
    model = save_model(path, "cfg", "hybrid_lm", FLAG, "rfa_gate,softmax").eval()
    (loaded,), *_ = load_model_ensemble_and_task([str(path)], arg_overrides={"data": data_bin})
    assert kinds(loaded.decoder.layers) == ["rfa_gate", "softmax"]
    assert_close("logits", loaded.eval()(tokens(2, 9))[0], model(tokens(2, 9))[0])
    with pytest.warns(UserWarning, match="attention"):
        other_model = build_model("hybrid_lm", FLAG, "softmax,linear")
        other_model.load_state_dict(
            {**other_model.state_dict(), **{k: v for k, v in model.state_dict().items() if ".1." in k}}
        )
