"""Encoder-decoders of every mechanism, with every attention of the decoder to the encoder."""

from argparse import Namespace

import pytest
import torch
from fairseq.data import data_utils
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.models.transformer import TransformerModel
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor, nn

from common.attention import ATTENTIONS, supporting
from fairseq_plugin import LinearTimeTransformer
from fairseq_plugin.models._encoder_decoder import SOURCE_ATTENTIONS
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.encoder_decoders import build_model
from tests.fairseq_plugin.helpers.language_models import flags_of
from tests.fairseq_plugin.helpers.text import PAD, dictionary, padded, tokens

MODELS = sorted(name for name, model in MODEL_REGISTRY.items() if issubclass(model, LinearTimeTransformer))
CROSS = ("softmax", *SOURCE_ATTENTIONS)
FLAG = "--lineartime-cross-attention"
#: Values of mechanisms' options with which toy sequences span several chunks, rows and windows.
SHORT = {"chunk_size": "4", "window": "5", "row_length": "4", "bias_dim": "4", "features": "8"}
#: Lengths of the sources and targets of a batch: distinct primes.
SOURCE, TARGET = 13, 11


def build(name: str, *arguments: str) -> nn.Module:
    """A small model of the mechanism called ``name``."""
    model = MODEL_REGISTRY[name]
    options = model.options_class.__dataclass_fields__
    short = {
        f"--{x.replace('_', '-')}": value for x in options for end, value in SHORT.items() if x.endswith(f"_{end}")
    }
    flags = [word for flag in flags_of(name) if flag in short for word in (flag, short[flag])]
    return build_model(name, *flags, *arguments)


def forward(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    """Logits of the next tokens; source (B, S), target (B, T) -> (B, T, symbols)."""
    return model(source, source.ne(PAD).sum(1), target)[0]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return build(request.param)


@pytest.fixture(params=CROSS)
def crossing(request: pytest.FixtureRequest) -> nn.Module:
    """A model with Flow-Attention inside, for every attention of the decoder to the encoder."""
    return build("flowformer", FLAG, request.param)


def test_every_bidirectional_mechanism_has_one_in_every_size():
    named = set(supporting("bidirectional"))
    assert named | {"flowformer", "hybrid"} == set(MODELS)
    assert all(ARCH_MODEL_REGISTRY[f"{x}_iwslt_de_en"] is MODEL_REGISTRY[x] for x in MODELS)


def test_a_mechanism(model):
    """Targets are causal, source padding changes nothing, and decoding equals the full forward."""
    _check(model)


def test_a_cross_attention(crossing):
    _check(crossing)


def test_self_attention_to_source_and_target(arguments=("--cross-self-attention", "--no-cross-attention")):
    """--cross-self-attention: softmax equals fairseq's model, and every causal mechanism meets its contract."""
    for name in MODELS:
        attention = ATTENTIONS.get(MODEL_REGISTRY[name].attention_name)
        if attention is None or "causal" in attention.supports:  # None: several mechanisms
            _check(build(name, *arguments))
    model, stock = build("softmax", *arguments), build_model("transformer", *arguments)
    source, target = padded(tokens(2, SOURCE), 3, 0), tokens(2, TARGET, seed=1)
    with torch.no_grad():
        assert_close("out", forward(model, source, target), forward(stock, source, target))


@torch.no_grad()
def _check(model: nn.Module) -> None:
    source, target = tokens(3, SOURCE), tokens(3, TARGET, seed=1)
    expected = forward(model, source, target)
    assert not torch.allclose(expected, forward(model, tokens(3, SOURCE, seed=2), target), atol=1e-3)
    for left, right in ((4, 0), (0, 5), (2, 3)):
        assert_close(f"padded {left}, {right}", forward(model, padded(source, left, right), target), expected)
    later = torch.cat([target[:, :6], tokens(3, TARGET - 6, seed=3)], dim=1)
    assert_close("prefix", forward(model, source, later)[:, :6], expected[:, :6])
    assert_close("right-padded target", forward(model, source, padded(target, 0, 4))[:, :TARGET], expected)
    assert_close("left-padded target", forward(model, source, padded(target, 4, 0))[:, 4:], expected)
    assert_close("decoded", _decode(model, padded(source, 3, 0), target), expected)


def _decode(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    """Logits (B, T, symbols), decoded one target token at a time."""
    encoded, state = model.encoder(source, source.ne(PAD).sum(1)), {}
    steps = [model.decoder(target[:, : i + 1], encoded, state)[0] for i in range(target.shape[1])]
    return torch.cat(steps, dim=1)


def test_batch_neighbours_change_nothing(crossing):
    """Neither the other rows of a batch nor their order changes an output."""
    lines = [tokens(1, length, seed=length)[0] for length in (3, SOURCE, 8)]
    target = tokens(3, TARGET, seed=1)
    with torch.no_grad():
        for left in (True, False):
            batch = data_utils.collate_tokens(lines, PAD, left_pad=left)
            together = forward(crossing, batch, target)
            for i, line in enumerate(lines):
                assert_close(f"row {i}", together[i], forward(crossing, line[None], target[i : i + 1])[0])


@pytest.mark.parametrize("beam", [1, 3])
def test_beam_search_gives_what_scores_of_whole_targets_say(crossing, beam):
    """The scores of each hypothesis equal those of a forward pass; sentences end at different steps."""
    source = data_utils.collate_tokens([tokens(1, n, seed=n)[0] for n in range(4, SOURCE)], PAD, left_pad=True)
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(PAD).sum(1)}}
    symbols = dictionary()
    generator = SequenceGenerator([crossing], symbols, beam_size=beam, max_len_b=12, normalize_scores=False)
    for seed in range(1, 9):  # until sentences end at different steps
        ending = torch.randn(16, generator=torch.Generator().manual_seed(seed))
        crossing.decoder.output_projection.weight.data[symbols.eos()] = ending
        generated = generator.generate([crossing], sample)
        if beam == 1 or len({len(hypothesis["tokens"]) for hypotheses in generated for hypothesis in hypotheses}) > 1:
            break
    ends = set()
    for row, hypotheses in enumerate(generated):
        assert len(hypotheses) == beam
        for hypothesis in hypotheses:
            out = hypothesis["tokens"]
            ends.add(len(out))
            previous = torch.cat([out[-1:], out[:-1]])[None]  # fairseq's targets begin with eos
            with torch.no_grad():
                scores = crossing.get_normalized_probs(
                    (forward(crossing, source[row : row + 1], previous), None), log_probs=True
                )
            expected_scores = scores[0].gather(1, out[:, None])[:, 0]
            assert_close("scores", hypothesis["positional_scores"], expected_scores, tolerance=1e-4)
    assert beam == 1 or len(ends) > 1


@pytest.mark.parametrize("name", SOURCE_ATTENTIONS)
def test_the_state_of_a_source_is_shared_by_its_beams_and_has_one_size(name):
    model, sizes = build("flowformer", FLAG, name), []
    for length in (5, 40):
        source = tokens(2, length)
        encoded = model.encoder(source, source.ne(PAD).sum(1))
        rows = torch.arange(2).repeat_interleave(4)
        encoded, state = model.encoder.reorder_encoder_out(encoded, rows), {}
        with torch.no_grad():
            model.decoder(tokens(8, 1), encoded, state)
        reordered = model.encoder.reorder_encoder_out(encoded, torch.tensor([3, 0, 0, 1, 4, 5, 7, 7]))
        assert reordered is encoded  # each row keeps its source
        cross = model.decoder.layers[0].encoder_attn._get_input_buffer(state)
        assert all(len(x) == 2 for x in cross.values())
        sizes.append({key: x.shape for key, x in cross.items()})
    assert sizes[0] == sizes[1]


def test_rows_may_be_reordered_in_any_way(crossing):
    """Also across groups of equal sources, which beam search never does."""
    source, order = tokens(4, SOURCE), torch.tensor([2, 2, 0, 3])
    target = tokens(4, 6, seed=1)
    with torch.no_grad():
        encoded, state = crossing.encoder(source, source.ne(PAD).sum(1)), {}
        for i in range(3):
            crossing.decoder(target[:, : i + 1], encoded, state)
        encoded = crossing.encoder.reorder_encoder_out(encoded, order)
        crossing.decoder.reorder_incremental_state_scripting(state, order)
        if crossing.decoder.layers[0].encoder_attn.__class__.__module__.startswith("fairseq."):
            return  # fairseq's own keeps its cache if the number of rows is unchanged
        moved = torch.cat([target[order, :3], target[:, 3:]], dim=1)
        for i in range(3, 6):
            out = crossing.decoder(moved[:, : i + 1], encoded, state)[0]
        assert_close("after a reorder", out[:, 0], forward(crossing, source[order], moved)[:, -1])


def test_half_precision(crossing):
    source, target = padded(tokens(2, SOURCE), 2, 0), tokens(2, TARGET, seed=1)
    with torch.no_grad():
        expected = forward(crossing, source, target)
        for dtype in (torch.bfloat16, torch.float16):
            out = forward(crossing.to(dtype), source, target).float()
            assert_close(str(dtype), out, expected, tolerance=0.15)


def test_weights_of_the_stock_transformer_fit():
    """Only an attention's own parameters are new; with softmax attention, outputs are equal too."""
    stock, source, target = build_model("transformer"), padded(tokens(2, SOURCE), 0, 3), tokens(2, TARGET, seed=1)
    for name in MODELS:
        kind = MODEL_REGISTRY[name]
        if kind.stock_model is TransformerModel:
            model = build(name, FLAG, "linear")
            inner_weights = {name: x for name, x in model.state_dict().items() if ".self_attn.inner." in name}
            model.load_state_dict({**inner_weights, **stock.state_dict()})
    softmax_model = build("softmax")
    softmax_model.load_state_dict(stock.state_dict())
    with torch.no_grad():
        assert_close("out", forward(softmax_model, source, target), forward(stock, source, target))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--no-cross-attention", FLAG, "linear"], "--no-cross-attention is given"),
        (["--cross-favor-features", "9", FLAG, "linear"], "--cross-favor-features is 9"),
        (["--decoder-attention-heads", "3"], "--decoder-attention-heads is 3"),
        (["--encoder-embed-dim", "32", FLAG, "flow_source"], "--encoder-embed-dim is 32"),
        (["--encoder-xformers-att-config", "{'name': 'linformer'}"], "--encoder-xformers-att-config"),
    ],
)
def test_options_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        build("flowformer", *arguments)


def test_a_source_that_is_too_long_for_cosformer():
    model = build("flowformer", FLAG, "cosformer")
    with pytest.raises(ValueError, match="--max-source-positions"):
        forward(model, tokens(1, 49), tokens(1, 3))


def test_alignment_needs_weights():
    """``--print-alignment`` works with softmax; mechanisms that form no weights refuse it."""
    build("flowformer").make_generation_fast_(need_attn=True)
    with pytest.raises(ValueError, match="--print-alignment is given"):
        build("flowformer", FLAG, "linear").make_generation_fast_(need_attn=True)


def test_encoder_and_decoder_may_differ_in_width():
    """Allowed for every attention to the encoder except flow_source."""
    wide = ["--encoder-embed-dim", "24", "--encoder-attention-heads", "3"]
    for name in CROSS:
        if name != "flow_source":
            _check(build("flowformer", *wide, FLAG, name))


@pytest.mark.parametrize("given", ["nope", "quadratic", None])
def test_a_cross_attention_that_is_none(given, capsys):
    """From Python, the error lists the choices; the command line uses the error of fairseq's parser."""
    args = Namespace(arch="flow", lineartime_cross_attention=given)
    with pytest.raises(ValueError, match=rf"{FLAG} is {given!r}; allowed: softmax, .*flow_source"):
        MODEL_REGISTRY["flow"].build_model(args, None)
    with pytest.raises(SystemExit):
        build("flow", FLAG, str(given))
    assert FLAG in capsys.readouterr().err
