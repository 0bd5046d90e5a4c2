"""Models of raw audio with our attention: the stock model with softmax, padding, gradients, options, refusals."""

from types import SimpleNamespace

import pytest
import torch
from fairseq.models import build_model
from fairseq.models.wav2vec.wav2vec2 import TransformerEncoder
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from omegaconf import OmegaConf
from torch import Tensor, nn

from common.attention import InnerAttention
from fairseq_plugin.modules.multihead_attention import InnerMultiheadAttention
from tests.common.refusals import refused
from tests.compare import assert_close, weights
from tests.fairseq_plugin.helpers.audio import MOST_FRAMES, build_audio, recording
from tests.fairseq_plugin.helpers.masked_models import randomised
from tests.fairseq_plugin.helpers.registry import AUDIO
from tests.fairseq_plugin.helpers.text import dictionary

#: A model of each attention; HuBERT and data2vec have the same encoder.
WAV2VEC2 = [name for name in AUDIO if name.endswith("wav2vec2")]
SAMPLES = 206  # 24 frames
LAYERS = {
    "post-norm": (),
    "pre-norm": ("--layer-norm-first",),
    "conformer": ("--layer-type", "conformer"),
    "adapters": ("--layer-type", "trf_adp", "--adp-num", "3", "--adp-trf-idx", "0:1"),
    "deep positions": ("--pos-conv-depth", "2"),
    "normalised positions": ("--conv-pos-batch-norm",),
}
#: Those that each of fairseq's models has.
OF_KIND = {
    "wav2vec2": ("post-norm", "pre-norm", "conformer", "deep positions"),
    "hubert": ("post-norm", "pre-norm", "conformer", "normalised positions"),
    "data2vec_audio": ("post-norm", "deep positions"),
}


def features(model: nn.Module, source: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """Features (B, frames, C) of recordings, without masks; 0 at padding."""
    out = model(source, padding_mask=padding_mask, mask=False, features_only=True)
    return out["x"] if out["padding_mask"] is None else out["x"].masked_fill(out["padding_mask"][..., None], 0.0)


@pytest.mark.parametrize(("kind", "layers"), [(kind, layers) for kind, names in OF_KIND.items() for layers in names])
def test_softmax_is_the_stock_model(kind: str, layers: str) -> None:
    """Same parameter names and, with the same weights, the same features, also of a padded batch."""
    stock = randomised(build_audio(kind, *LAYERS[layers])).eval()
    ours = build_audio(f"softmax_{kind}", *LAYERS[layers]).eval()
    assert weights(ours.state_dict()).keys() == stock.state_dict().keys()
    ours.load_state_dict(stock.state_dict())
    source, mask = recording(2, SAMPLES), torch.zeros(2, SAMPLES, dtype=torch.bool)
    mask[1, 150:] = True
    # A conformer's convolution mixes what attention gives at padding, which is 0 here, into real frames.
    for padding_mask in (None,) if layers == "conformer" else (None, mask):
        assert_close("features", features(ours, source, padding_mask), features(stock, source, padding_mask), 1e-5)


@pytest.mark.parametrize("arch", AUDIO)
def test_every_parameter_learns(arch: str) -> None:
    """Each parameter of the encoder has a nonzero finite gradient, in training mode with masks."""
    model = randomised(build_audio(arch)).train()
    out = model(recording(2, SAMPLES), mask=False, features_only=True)["x"]
    (out * torch.randn_like(out)).sum().backward()
    for name, parameter in model.encoder.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize(
    ("arch", "layers"),
    [
        *((arch, layers) for arch in WAV2VEC2 for layers in ("post-norm", "conformer")),
        ("flow_wav2vec2", "deep positions"),
        ("flow_hubert", "post-norm"),
        ("flow_hubert", "conformer"),
        ("flow_hubert", "normalised positions"),
    ],
)
def test_padding_changes_no_real_frame(arch: str, layers: str) -> None:
    """With normalised layers in the feature extractor; where fairseq leaks, with ``--lineartime-mask-padding``."""
    leaks = layers != "post-norm" or "hubert" in arch
    options = ("--lineartime-mask-padding",) if leaks else ()
    model = randomised(build_audio(arch, *LAYERS[layers], *options).double()).eval()
    source = recording(2, SAMPLES).double()
    mask = torch.zeros(2, SAMPLES + 61, dtype=torch.bool)
    mask[:, SAMPLES:] = True
    alone = features(model, source, torch.zeros(2, SAMPLES, dtype=torch.bool))
    beside = features(model, nn.functional.pad(source, (0, 61)), mask)[:, : alone.shape[1]]
    assert_close("features with padding", beside, alone)


@pytest.mark.parametrize("layers", [*OF_KIND["wav2vec2"], "adapters"])
def test_activation_checkpointing_changes_nothing(layers: str) -> None:
    """Outputs and gradients are equal, also where the mask of a conformer is read again in the backward pass."""
    source, mask = recording(2, SAMPLES), torch.zeros(2, SAMPLES, dtype=torch.bool)
    mask[1, 150:] = True
    results = []
    for options in ((), ("--checkpoint-activations",)):
        model = randomised(build_audio("flow_wav2vec2", *LAYERS[layers], "--lineartime-mask-padding", *options)).train()
        keys = {"corpus_key": [1, 1]} if layers == "adapters" else {}
        batches = ((source, mask), (source + 1, torch.zeros_like(mask)))
        outs = [model(x, padding_mask=real, mask=False, features_only=True, **keys)["x"] for x, real in batches]
        sum(out.square().sum() for out in outs).backward()
        results.append([outs[0], *(x.grad for x in model.encoder.parameters() if x.grad is not None)])
    for plain, checkpointed in zip(*results, strict=True):
        assert_close("output or gradient", checkpointed, plain, 1e-5, floor=1e-3)


def test_the_attention_keeps_its_own_initial_values() -> None:
    """fairseq draws every linear layer of the encoder again; a mechanism's own layers are left out."""
    model = build_audio("combiner_wav2vec2")
    attentions = [x for x in model.modules() if isinstance(x, InnerMultiheadAttention)]
    inner = [x for attention in attentions for x in attention.inner.modules() if isinstance(x, nn.Linear)]
    assert inner and all(layer.bias.any() for layer in inner)
    assert not any(attention.q_proj.bias.any() for attention in attentions)
    model.encoder.apply(init_bert_params)
    assert not any(layer.bias.any() for layer in inner), "apply leaves modules out after the model is built"


def test_a_stack_has_several_attentions() -> None:
    """``hybrid_wav2vec2`` and the other hybrids repeat a pattern."""
    for kind in OF_KIND:
        pattern = ("--encoder-layers", "3", "--lineartime-layers", "linear,softmax*2")
        model = build_audio(f"hybrid_{kind}", *pattern, short=False)
        attentions = [module.name for module in model.modules() if isinstance(module, InnerAttention)]
        assert attentions == ["linear", "softmax", "softmax"]


def test_only_the_encoder_of_the_mechanism_is_drawn() -> None:
    """The model holds one encoder, whose layers are ours."""
    model = build_audio("flow_wav2vec2")
    encoders = [module for module in model.modules() if isinstance(module, TransformerEncoder)]
    assert len(encoders) == 1 and len(encoders[0].layers) == 2


def test_an_odd_number_of_frames_may_be_the_longest() -> None:
    """The encoder pads its input to an even number, for which DAFT-full needs a row too."""
    model = build_audio("daft_full_wav2vec2", "--lineartime-max-frames", "25").eval()
    assert features(model, recording(1, SAMPLES + 8)).shape[1] == 25


def test_fine_tuning_lets_everything_learn() -> None:
    """Also if only new parameters learned in an attention transfer before."""
    model = build_audio("hedgehog_wav2vec2", "--lineartime-trained-parameters", "new")
    assert {".inner." in name for name, x in model.named_parameters() if x.requires_grad} == {True}
    model.remove_pretraining_modules()
    assert all(x.requires_grad for x in model.parameters())


@pytest.mark.parametrize("kind", OF_KIND)
def test_a_configuration_is_read_or_refused(kind: str) -> None:
    """As from hydra: known keys reach the model, and an unknown one is an error."""
    sizes = {"encoder_embed_dim": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "conv_pos_groups": 2}
    task = SimpleNamespace(cfg=SimpleNamespace(sample_rate=16_000), dictionaries=[dictionary()])

    def configured(**further: object) -> nn.Module:
        model = {"_name": f"local_{kind}", **sizes, **further}
        return build_model(OmegaConf.create({"task": {"label_rate": 50}, "model": model}).model, task)

    (layer,) = configured(local_window=7).encoder.layers
    assert layer.self_attn.embed_dim == 32 and layer.self_attn.inner.options.window == 7
    with refused("model.local_windw", "7", "model.local_window"):
        configured(local_windw=7)


@pytest.mark.parametrize(
    ("arch", "arguments", "message"),
    [
        ("flow_wav2vec2", ("--layer-type", "conformer", "--pos-enc-type", "rope"), ("--pos-enc-type", "rope", "abs")),
        (
            "flow_wav2vec2",
            ("--layer-type", "conformer", "--attn-type", "espnet"),
            ("--attn-type", "ESPNETMultiHeadedAttention", "not given"),
        ),
        ("flow_wav2vec2", ("--encoder-attention-heads", "3"), ("--encoder-attention-heads", "3", "divisor")),
        ("flow_wav2vec2", ("--conv-feature-layers", "exit()"), ("conv_feature_layers", "exit()", "no code")),
        ("flow_wav2vec2", ("--conv-feature-layers", "[(1, 1, 1)] * 101"), ("conv_feature_layers", "* 101", "no code")),
        (
            "flow_wav2vec2",
            ("--conv-feature-layers", "[(1, 1, 1)] * 99999999 * 0 + [(1, 1, 1)]"),
            ("conv_feature_layers", "99999999", "no code"),
        ),
        ("flow_wav2vec2", ("--crop-seq-to-multiple", "0"), ("--crop-seq-to-multiple", "0", "at least 1")),
        (
            "cosformer_wav2vec2",
            ("--required-seq-len-multiple", "0"),
            ("--required-seq-len-multiple", "0", "at least 1"),
        ),
        ("cosformer_wav2vec2", ("--lineartime-max-frames", "0"), ("--lineartime-max-frames", "0", "at least 1")),
    ],
)
def test_bad_options_are_refused(arch: str, arguments: tuple[str, ...], message: tuple[str, str, str]) -> None:
    with refused(*message):
        build_audio(arch, *arguments)


@pytest.mark.parametrize("kind", OF_KIND)
def test_an_attention_that_needs_the_number_of_frames(kind: str) -> None:
    """Without the option, and with more frames than it says, there is an error; padding does not count."""
    model = build_audio(f"cosformer_{kind}").eval()
    samples = 8 * MOST_FRAMES
    assert features(model, recording(1, samples)).shape[1] <= MOST_FRAMES
    mask = torch.zeros(1, 2 * samples, dtype=torch.bool)
    with refused("the input", "tokens", "--lineartime-max-frames"):
        features(model, recording(1, 2 * samples), mask)
    mask[:, samples:] = True
    features(model, recording(1, 2 * samples), mask)
    with refused("source", "3 samples", "a frame"):
        features(model, recording(1, 3))
    with refused("--lineartime-max-frames", "not given", "50 a second"):
        build_audio(f"cosformer_{kind}", short=False)


@pytest.mark.parametrize("kind", OF_KIND)
def test_a_recording_without_a_frame_is_refused_beside_others(kind: str) -> None:
    """fairseq would take its padding for audio."""
    model = build_audio(f"flow_{kind}").eval()
    mask = torch.zeros(2, SAMPLES, dtype=torch.bool)
    mask[1, 17:] = True
    with refused("source", "17 samples", "a frame"):
        model.extract_features(recording(2, SAMPLES), mask)
    mask[1, 17] = False
    model.extract_features(recording(2, SAMPLES), mask)


def test_cropping_leaves_a_frame() -> None:
    """With ``--crop-seq-to-multiple`` too; the longest recording of a batch sets how much is cropped."""
    model, mask = build_audio("flow_wav2vec2", "--crop-seq-to-multiple", "4").eval(), torch.zeros(2, 49, dtype=bool)
    mask[1, 18:] = True
    for padding_mask in (None, mask):
        assert features(model, recording(2, 49), padding_mask).shape[1] == 4
        with refused("source", "41 samples, which are 3 frames", "--crop-seq-to-multiple 4"):
            features(model, recording(2, 41), None if padding_mask is None else mask[:, :41])


@pytest.mark.parametrize(
    "arch", ["flow_wav2vec2", "local_wav2vec2", "nystrom_wav2vec2", "flow_hubert", "daft_full_hubert"]
)
def test_features_of_a_layer_are_those_of_a_model_that_ends_there(arch: str) -> None:
    """fairseq's scripts make the targets of HuBERT of them, and its tests compare them with stored ones."""
    model = randomised(build_audio(arch)).eval()
    shorter = build_audio(arch, "--encoder-layers", "1").eval()
    shorter.load_state_dict({name: model.state_dict()[name] for name in shorter.state_dict()})
    source = recording(1, SAMPLES)
    if "hubert" in arch:
        of_layer = model.extract_features(source, output_layer=1)[0]
    else:
        of_layer = model.extract_features(source, None, layer=0)["x"]
    assert_close("features", of_layer, features(shorter, source))
