"""Long recordings: features in blocks of frames are those of one pass, with less memory."""

import pytest
import torch
from torch import nn

from tests.common.refusals import refused
from tests.compare import assert_close, weights
from tests.fairseq_plugin.helpers.audio import build_audio, recording
from tests.fairseq_plugin.helpers.masked_models import randomised

#: What a frame of the small models reads, and the samples between two frames.
FIELD, STRIDE = 18, 8


def long_model(kind: str, mode: str, block_frames: int) -> nn.Module:
    """A model of audio in evaluation, whose norms have random weights."""
    options = ("--extractor-mode", mode, "--lineartime-block-frames", str(block_frames))
    return randomised(build_audio(f"flow_{kind}", *options)).eval()


@pytest.mark.parametrize("block_frames", [1, 5, 13])
@pytest.mark.parametrize("mode", ["layer_norm", "default"])
@pytest.mark.parametrize("kind", ["wav2vec2", "hubert", "data2vec_audio"])
def test_blocks_change_no_feature(kind: str, mode: str, block_frames: int) -> None:
    """Without gradients, blocks of any size give what one pass with gradients gives, for every length and padding."""
    model = long_model(kind, mode, block_frames)
    read = []
    model.feature_extractor.conv_layers[0][0].register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].shape))
    for samples in (FIELD, FIELD + STRIDE * (block_frames - 1), 205, 206, 213):
        source, mask = recording(2, samples) + 0.3, torch.zeros(2, samples, dtype=torch.bool)
        mask[1, max(FIELD, samples - 60) :] = True
        options = {"padding_mask": mask, "mask": False, "features_only": True}
        whole = model(source, **options)["x"]
        read.clear()
        with torch.no_grad():
            in_blocks = model(source, **options)["x"]
        assert_close(f"features of {samples} samples", in_blocks, whole, 1e-5)
        assert max(shape[2] for shape in read) <= FIELD + STRIDE * (block_frames - 1) + 4, "no block is longer"


def test_results_of_layers_are_not_kept() -> None:
    """They would fill the memory; with gradients, or without the option, they are there, and weights do not change."""
    model = long_model("wav2vec2", "layer_norm", 5)
    plain = build_audio("flow_wav2vec2").eval()
    assert weights(model.state_dict()).keys() == weights(plain.state_dict()).keys()
    kept = [len(x(recording(1, 99), mask=False, features_only=True)["layer_results"]) for x in (model, plain)]
    with torch.no_grad():
        kept += [len(x(recording(1, 99), mask=False, features_only=True)["layer_results"]) for x in (model, plain)]
    assert kept == [2, 2, 0, 2]


@pytest.mark.parametrize("averaged", [(), ("--ema-transformer-only", "--ema-layers-only")])  # these flags are negative
def test_the_average_of_data2vec_keeps_them(averaged: tuple[str, ...]) -> None:
    """They are its targets, of the encoder or of the whole model: losses are those without the option, and not 0."""
    options = ("--pos-conv-depth", "2", "--encoder-layerdrop", "0", *averaged)
    losses, masked = [], recording(2, 24) > 0
    for further in ((), ("--lineartime-block-frames", "5")):
        model = build_audio("flow_data2vec_audio", *options, *further).train()
        assert model.cfg.ema_transformer_only is not bool(averaged)
        model.set_num_updates(0)
        losses.append(model(recording(2, 206), mask_indices=masked)["losses"]["regression"])
    assert torch.equal(*losses) and losses[0] > 0


@pytest.mark.parametrize("option", ["--lineartime-causal", "--conv-pos-groups=4"])
def test_a_single_convolution_of_positions_has_an_average(option: str) -> None:
    """fairseq copies the encoder when pretraining begins; causal models have one convolution, with weight norm."""
    model = build_audio("flow_data2vec_audio", option, "--encoder-layerdrop", "0").train()
    model.set_num_updates(0)
    source, masked = recording(2, 206), recording(2, 24) > 0
    model(source, mask_indices=masked)["losses"]["regression"].backward()
    positions = model.encoder.pos_conv[0]
    assert positions.weight_v.grad.abs().sum() > 0, "the model's own convolution still learns"
    with torch.no_grad():
        positions.weight_v.add_(1.0)
    model.set_num_updates(1)
    average = model.ema.fp32_params["pos_conv.0.weight_v"]
    assert_close("average", average, positions.weight_v.detach(), 1e-6)


def test_a_block_has_at_least_one_frame() -> None:
    with refused("--lineartime-block-frames", "0", "at least 1"):
        long_model("wav2vec2", "layer_norm", 0)
