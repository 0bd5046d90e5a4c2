"""Models from speech to text: the stock model with softmax, padding, cross-attention, beam search, CTC, refusals."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq.models import FairseqEncoderDecoderModel
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from common.attention import InnerAttention
from fairseq_plugin.criterions.attention_transfer import by_group
from fairseq_plugin.distill.attention_transfer import AttentionLoss
from fairseq_plugin.modules.converted import converted_attentions
from recipes.models import model_options
from tests.common.refusals import refused
from tests.compare import assert_close, weights
from tests.fairseq_plugin.helpers.audio import FEATURES, build_speech
from tests.fairseq_plugin.helpers.masked_models import randomised
from tests.fairseq_plugin.helpers.registry import SPEECH
from tests.fairseq_plugin.helpers.text import dictionary, tokens

#: Frames of two recordings of a batch.
FRAMES, LONGER = 61, 88
STOCK = {"s2t_softmax": "s2t_transformer", "s2t_conformer_softmax": "s2t_conformer"}


def spoken(batch: int, frames: int, seed: int = 0) -> Tensor:
    """Features (batch, frames, FEATURES) of a recording of noise."""
    return torch.randn(batch, frames, FEATURES, generator=torch.Generator().manual_seed(seed))


def logits(model: nn.Module, source: Tensor, lengths: list[int], targets: Tensor) -> Tensor:
    """Logits (B, T, V) of ``targets`` (B, T)."""
    return model(source, torch.tensor(lengths), targets)[0]


def check_normalized_probabilities(model: nn.Module, out: tuple[Tensor, dict]) -> None:
    """What fairseq's own tests assert of an encoder-decoder's output, and that probabilities add up."""
    assert isinstance(model, FairseqEncoderDecoderModel) and len(out) == 2
    log_probabilities, probabilities = (model.get_normalized_probs(out, log_probs=x) for x in (True, False))
    assert log_probabilities.batch_first and probabilities.batch_first
    assert_close("probabilities", probabilities, log_probabilities.exp())
    assert_close("sum", probabilities.sum(-1), torch.ones(probabilities.shape[:2]))


@pytest.mark.parametrize("arch", STOCK)
def test_softmax_is_the_stock_model(arch: str) -> None:
    """Same parameter names and, with the same weights, the same logits, also of a padded batch."""
    stock, ours = randomised(build_speech(STOCK[arch])).eval(), build_speech(arch).eval()
    assert weights(ours.state_dict()).keys() >= stock.state_dict().keys() - {"decoder.version"}
    ours.load_state_dict(stock.state_dict())
    # A conformer's convolution mixes what attention gives at padding, which is 0 here, into real frames.
    arguments = spoken(2, FRAMES), [FRAMES, FRAMES if "conformer" in arch else 40], tokens(2, 9)
    assert_close("logits", logits(ours, *arguments), logits(stock, *arguments), 1e-5)


@pytest.mark.parametrize("arch", SPEECH)
def test_every_parameter_learns_and_padding_changes_nothing(arch: str) -> None:
    """Each parameter has a nonzero finite gradient; with ``--lineartime-mask-padding`` padding changes no logit."""
    model = randomised(build_speech(arch, "--lineartime-mask-padding").double(), std=0.3).eval()
    source, targets = spoken(2, LONGER).double(), tokens(2, 9)
    out = model(source[1:, :FRAMES], torch.tensor([FRAMES]), targets[1:])
    check_normalized_probabilities(model, out)
    alone = out[0]
    (alone * torch.randn_like(alone)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name
        assert torch.isfinite(parameter.grad).all(), name
    beside = logits(model, source, [LONGER, FRAMES], targets)[1:]
    assert_close("logits with padding", beside, alone)


@pytest.mark.parametrize("version", ["s2t_transformer", "convtransformer"])
def test_without_the_option_padding_leaks_as_in_the_stock_model(version: str) -> None:
    """The reason of the option: fairseq's convolutions mix the bias at padding into the last real frames."""
    source = spoken(2, LONGER)
    for options, leaks in (((), True), (("--lineartime-mask-padding",), False)):
        model = randomised(build_speech("s2t_flow", "--conv-version", version, *options)).eval()
        alone = model.encoder(source[1:, :FRAMES], torch.tensor([FRAMES]))["encoder_out"][0]
        beside = model.encoder(source, torch.tensor([LONGER, FRAMES]))["encoder_out"][0][: len(alone), 1:]
        assert (((alone - beside).norm() / alone.norm()).item() > 1e-3) == leaks


@pytest.mark.parametrize("arch", ["s2t_flowformer", "s2t_conformer_linear", "s2t_hybrid"])
@pytest.mark.parametrize("cross", ["softmax", "linear", "cosformer"])
def test_beam_search_scores_as_the_whole_pass(arch: str, cross: str) -> None:
    """The score of each hypothesis is that of one pass over its tokens."""
    model = randomised(build_speech(arch, "--lineartime-cross-attention", cross, "--lineartime-mask-padding"), 0.3)
    source, lengths = spoken(2, FRAMES), torch.tensor([FRAMES, 40])
    generator = SequenceGenerator([model.eval()], dictionary(), beam_size=3, max_len_b=8, normalize_scores=False)
    sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}
    for row, hypotheses in enumerate(generator.generate([model], sample)):
        best = hypotheses[0]
        targets = torch.cat([torch.tensor([2]), best["tokens"][:-1]])[None]
        alone = source[row : row + 1, : lengths[row]]
        out = model(alone, lengths[row : row + 1], targets)
        scores = model.get_normalized_probs(out, log_probs=True)[0].gather(1, best["tokens"][:, None])
        assert_close("score", best["score"], scores.sum(), 1e-4)


def test_the_ctc_loss_gets_its_logits() -> None:
    model = build_speech("s2t_flow", "--ctc-weight", "0.3", "--criterion", "label_smoothed_cross_entropy_with_ctc")
    out = model(spoken(2, FRAMES), torch.tensor([FRAMES, 40]), tokens(2, 9))
    log_probabilities, lengths = model.get_ctc_output(out, None)
    assert log_probabilities.shape[1:] == (2, len(dictionary())) and lengths.tolist() == [16, 10]


def test_a_stack_has_several_attentions() -> None:
    """``s2t_hybrid`` repeats a pattern on both sides, ``s2t_conformer_hybrid`` too."""
    for arch in ("s2t_hybrid", "s2t_conformer_hybrid"):
        model = build_speech(arch, "--lineartime-layers", "linear,softmax", short=False)
        attentions = [module.name for module in model.modules() if isinstance(module, InnerAttention)]
        assert attentions == ["linear", "softmax"] * 2


@pytest.mark.parametrize("size", ["", "_xs", "_s", "_sp", "_m", "_mp", "_l", "_lp"])
def test_named_sizes_are_those_of_the_stock_model(size: str) -> None:
    names = (f"s2t_transformer{size}", f"s2t_flowformer{size}")
    stock, ours = (vars(model_options(["data", "--task", "speech_to_text", "--arch", name])) for name in names)
    assert {name: ours[name] for name in stock} == {**stock, "arch": names[1]}


@pytest.mark.parametrize(
    ("arch", "arguments", "message"),
    [
        ("s2t_conformer_flow", ("--pos-enc-type", "rope"), ("--pos-enc-type", "rope", "abs")),
        ("s2t_conformer_flow", ("--attn-type", "espnet"), ("--attn-type", "ESPNETMultiHeadedAttention", "not given")),
        (
            "s2t_flow",
            ("--load-pretrained-encoder-from", "none.pt"),
            ("--load-pretrained-encoder-from", "none.pt", "exists"),
        ),
        ("s2t_flow", ("--cross-linear-phi", "relu"), ("--cross-linear-phi", "relu", "linear alone")),
    ],
)
def test_bad_options_are_refused(arch: str, arguments: tuple[str, ...], message: tuple[str, str, str]) -> None:
    with refused(*message):
        build_speech(arch, *arguments)


def test_a_pretrained_encoder_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("no checkpoint")
    with refused("--load-pretrained-encoder-from", "text.pt", "convert"):
        build_speech("s2t_flow", "--load-pretrained-encoder-from", str(tmp_path / "text.pt"))


def test_attention_transfer_logs_all_groups_of_layers() -> None:
    """The names of layers are others than in models of text."""
    attentions = converted_attentions(build_speech("s2t_conformer_hedgehog", "--encoder-layers", "8"))
    loss = AttentionLoss(torch.tensor(1.0), torch.tensor(1))
    logged = by_group(attentions, dict.fromkeys(attentions, loss))
    assert {name for name in logged if name.startswith("encoder") and name.endswith("_sum")} == {
        f"encoder_{i}-{i + 1}_sum" for i in (0, 2, 4, 6)
    }


def test_more_frames_than_there_are_positions_for() -> None:
    model = build_speech("s2t_cosformer").eval()
    with refused("the input", "97 tokens", "--max-source-positions"):
        model(spoken(1, 97), torch.tensor([97]), tokens(1, 3))
    model(spoken(1, 96), torch.tensor([96]), tokens(1, 3))


def test_a_recording_without_frames_is_refused() -> None:
    """Also beside others; attention to it would be NaN."""
    with refused("src_lengths", "0 frames", "at least 1"):
        build_speech("s2t_flow")(spoken(2, FRAMES), torch.tensor([FRAMES, 0]), tokens(2, 3))


def test_a_text_task_is_refused() -> None:
    """It does not say how many features a frame has."""
    given = model_options(["data", "--task", "translation", "--arch", "s2t_flow"])
    with refused("--task", "translation", "speech_to_text"):
        FairseqTask.build_model(SimpleNamespace(), given)
