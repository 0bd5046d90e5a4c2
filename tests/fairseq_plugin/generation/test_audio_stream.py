"""A causal model of audio reads a recording in parts: the features are those of one pass, and of each prefix."""

import pytest
import torch
from torch import nn

from common.attention import supporting
from fairseq_plugin.generation.audio_stream import AudioStream
from fairseq_plugin.modules.causal_positions import CausalPositions
from tests.common.refusals import refused
from tests.compare import assert_close, weights
from tests.fairseq_plugin.helpers.audio import MOST_FRAMES, recording
from tests.fairseq_plugin.helpers.kinds import build
from tests.fairseq_plugin.helpers.masked_models import randomised

MECHANISMS = sorted(set(supporting("causal")) & set(supporting("bidirectional")))
#: The samples of each part: of no frame, of one, of several; the last has samples of no frame.
PARTS = (5, 9, 4, 1, 63, 8, 0, 16, 101, 40, 3)


def causal_model(arch: str, *options: str) -> nn.Module:
    """A causal model of audio in evaluation."""
    return randomised(build(arch, "--lineartime-causal", *options)).eval()


@pytest.mark.parametrize(
    "arch", [*(f"{name}_wav2vec2" for name in MECHANISMS), "linear_hubert", "linear_data2vec_audio"]
)
@torch.no_grad()
def test_parts_are_one_pass(arch: str) -> None:
    """Features do not depend on what follows, and the caller may fill the buffer of a part again."""
    model, source, buffer = causal_model(arch), recording(2, sum(PARTS)), torch.empty(2, max(PARTS))
    whole = model(source, mask=False, features_only=True)["x"]
    prefix = model(source[:, :150], mask=False, features_only=True)["x"]
    assert_close("features of a prefix", prefix, whole[:, : prefix.shape[1]], 1e-5)
    stream, parts = AudioStream(model), []
    for part in source.split(PARTS, 1):
        buffer[:, : part.shape[1]] = part
        parts.append(stream.read(buffer[:, : part.shape[1]]))
        buffer.fill_(9.0)
    assert [len(part[0]) for part in parts[:5]] == [0, 0, 1, 0, 8]
    assert_close("features in parts", torch.cat(parts, 1), whole, 1e-5)


@pytest.mark.parametrize("size", [1, 4, 7])
def test_positions_are_those_of_fairseq_moved_into_the_past(size: int) -> None:
    """A frame gets what fairseq gives to the frame in the middle of those that it reads."""
    stock = build("wav2vec2", "--conv-pos", str(size)).encoder.pos_conv
    moved, x = size - 1 - size // 2, torch.randn(2, 16, 20)
    assert_close("positions", CausalPositions(stock)(x)[:, :, moved:], stock(x)[:, :, : 20 - moved], 1e-5)


def test_a_stock_checkpoint_can_be_the_start_of_a_causal_model() -> None:
    causal, stock = causal_model("softmax_wav2vec2"), build("wav2vec2")
    assert weights(causal.state_dict()).keys() == stock.state_dict().keys()


def test_bad_streams_are_refused() -> None:
    with refused("model", "FlowWav2vec2Model", "--lineartime-causal"):
        AudioStream(build("flow_wav2vec2").eval())
    with refused("model", "training", "eval"):
        AudioStream(build("flow_wav2vec2", "--lineartime-causal"))
    stream = AudioStream(causal_model("flow_wav2vec2"))
    stream.read(recording(2, 30))
    for samples in (recording(1, 30), recording(2, 30)[None]):
        with refused("samples", str(tuple(samples.shape)), "(B, n)"):
            stream.read(samples)
    stream.model.train()
    with refused("model", "training", "eval"):
        stream.read(recording(2, 30))
    stream = AudioStream(causal_model("cosformer_wav2vec2"))  # with a constant for each frame
    for part in recording(1, 8 * MOST_FRAMES).split(100, 1):
        stream.read(part)
    with refused("the input", "71 tokens", "--lineartime-max-frames"):
        stream.read(recording(1, 100))


@pytest.mark.parametrize(
    ("arch", "options", "message"),
    [
        ("flow_wav2vec2", ("--extractor-mode", "default"), ("--extractor-mode", "default", "layer_norm")),
        ("flow_wav2vec2", ("--layer-type", "conformer"), ("--layer-type", "conformer", "transformer")),
        ("flow_wav2vec2", ("--pos-conv-depth", "2"), ("--pos-conv-depth", "2", "1")),
        ("flow_wav2vec2", ("--crop-seq-to-multiple", "2"), ("--crop-seq-to-multiple", "2", "1")),
        ("flow_hubert", ("--conv-pos-batch-norm",), ("--conv-pos-batch-norm", "True", "False")),
        ("nystrom_wav2vec2", (), ("--lineartime-causal", "True", "nystrom")),
    ],
)
def test_parts_that_see_the_future_are_refused(arch: str, options: tuple[str, ...], message: tuple[str, ...]) -> None:
    with refused(*message):
        causal_model(arch, *options)
