"""Models of audio and speech: long recordings in blocks, pretraining, first weights, features of layers, refusals."""

import pytest
import torch
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from torch import nn

from fairseq_plugin.modules.multihead_attention import InnerMultiheadAttention
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.kinds import build, call, kind_of, noise, shown
from tests.fairseq_plugin.helpers.text import dictionary

pytestmark = pytest.mark.usefixtures("plain_pytorch")


@pytest.mark.parametrize("mode", ["layer_norm", "default"])
@pytest.mark.parametrize("kind", ["wav2vec2", "hubert", "data2vec_audio"])
def test_blocks_of_a_long_recording_change_no_feature(kind: str, mode: str) -> None:
    """Without gradients, blocks of any size give what one pass with gradients gives, for every length and padding."""
    for frames in (1, 5):
        model, read = shown(f"flow_{kind}", "--extractor-mode", mode, "--lineartime-block-frames", str(frames)), []
        first = model.feature_extractor.conv_layers[0][0]
        first.register_forward_pre_hook(lambda _, inputs, read=read: read.append(inputs[0].shape[2]))
        for samples in (18, 205, 213):
            mask = torch.zeros(2, samples, dtype=torch.bool)
            mask[1, max(18, samples - 60) :] = True
            given = {"padding_mask": mask, "mask": False, "features_only": True}
            whole = model(noise(2, samples) + 0.3, **given)["x"]
            read.clear()
            with torch.no_grad():
                blocks = model(noise(2, samples) + 0.3, **given)["x"]
            assert_close(f"features of {samples} samples", blocks, whole, 1e-5)
            assert max(read) <= 18 + 8 * (frames - 1) + 4, "no block is longer"


@pytest.mark.parametrize("averaged", [(), ("--ema-transformer-only", "--ema-layers-only")])
def test_data2vec_learns_from_its_own_average(averaged: tuple[str, ...]) -> None:
    """The results of layers are its targets, also with blocks; a causal model's single convolution has an average."""
    losses, masked = [], noise(2, 24) > 0
    for further in ((), ("--lineartime-block-frames", "5")):
        words = ("--pos-conv-depth", "2", "--encoder-layerdrop", "0", *averaged, *further)
        model = build("flow_data2vec_audio", *words).train()
        model.set_num_updates(0)
        losses.append(model(noise(2, 206).float(), mask_indices=masked)["losses"]["regression"])
    assert torch.equal(*losses) and losses[0] > 0
    model = build("flow_data2vec_audio", "--lineartime-causal", "--encoder-layerdrop", "0").train()
    model.set_num_updates(0)
    positions = model.encoder.pos_conv[0]
    with torch.no_grad():
        positions.weight_v.add_(1.0)
    model.set_num_updates(1)
    assert_close("average", model.ema.fp32_params["pos_conv.0.weight_v"], positions.weight_v.detach(), 1e-6)


def test_attention_keeps_its_own_initial_values_and_fine_tuning_lets_everything_learn() -> None:
    """fairseq draws every linear layer of the encoder again; a mechanism's own layers are left out."""
    model = build("combiner_wav2vec2")
    attentions = [x for x in model.modules() if isinstance(x, InnerMultiheadAttention)]
    inner = [x for attention in attentions for x in attention.inner.modules() if isinstance(x, nn.Linear)]
    assert inner and all(x.bias.any() for x in inner) and not any(x.q_proj.bias.any() for x in attentions)
    model.encoder.apply(init_bert_params)
    assert not any(x.bias.any() for x in inner), "apply leaves modules out after the model is built"
    model = build("hedgehog_wav2vec2", "--lineartime-trained-parameters", "new")
    assert {".inner." in name for name, x in model.named_parameters() if x.requires_grad} == {True}
    model.remove_pretraining_modules()
    assert all(x.requires_grad for x in model.parameters())


@torch.no_grad()
def test_features_of_a_layer_are_those_of_a_model_that_ends_there() -> None:
    for arch in ("flow_wav2vec2", "flow_hubert"):
        model, shorter = shown(arch), build(arch, "--encoder-layers", "1").double().eval()
        shorter.load_state_dict({name: model.state_dict()[name] for name in shorter.state_dict()})
        source, kind = noise(1, 206), kind_of(arch)
        given = {"output_layer": 1} if "hubert" in arch else {"padding_mask": None, "layer": 0}
        found = model.extract_features(source, **given)
        found = found["x"] if isinstance(found, dict) else found[0]
        assert_close("features", found, call(shorter, kind, {"source": source, "mask": False, "features_only": True}))


@pytest.mark.parametrize("version", ["s2t_transformer", "convtransformer"])
@torch.no_grad()
def test_without_the_option_padding_leaks_as_in_the_stock_model(version: str) -> None:
    """The reason of --lineartime-mask-padding, which changes nothing without padding.

    fairseq's convolutions mix the bias at padding into real frames.
    """
    source, unpadded = noise(2, 88, 10).float(), []
    for words, leaks in (((), True), (("--lineartime-mask-padding",), False)):
        model = shown("s2t_flow", "--conv-version", version, *words).float()
        alone = model.encoder(source[1:, :61], torch.tensor([61]))["encoder_out"][0]
        beside = model.encoder(source, torch.tensor([88, 61]))["encoder_out"][0][: len(alone), 1:]
        assert (((alone - beside).norm() / alone.norm()).item() > 1e-3) == leaks
        unpadded.append(alone)
    assert_close("without padding", *unpadded)


def test_the_ctc_loss_gets_its_logits() -> None:
    criterion = ("--criterion", "label_smoothed_cross_entropy_with_ctc", "--ctc-weight", "0.3")
    model, batch = build("s2t_flow", *criterion), kind_of("s2t_flow").rows(2, 15)
    out = model(batch["src_tokens"].float(), torch.tensor([61, 40]), batch["prev_output_tokens"])
    log_probabilities, lengths = model.get_ctc_output(out, None)
    assert log_probabilities.shape[1:] == (2, len(dictionary())) and lengths.tolist() == [16, 10]
