"""``--lineartime-reset-at-eos``: documents in a row do not see each other, in every text model."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from fairseq import tasks
from fairseq.data import TokenBlockDataset
from fairseq.models import MODEL_REGISTRY
from torch import Tensor, nn

from common.ops.shared.segments import documents_by_eos
from fairseq_plugin.modules.carried_state import CarriedState
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.language_models import build_model, build_tiny
from tests.fairseq_plugin.helpers.masked_models import build_masked, build_random
from tests.fairseq_plugin.helpers.registry import CAUSAL, MASKED, SHORT

PAD, EOS = 1, 2
FLAG = "--lineartime-reset-at-eos"
POSITIONS = {
    "sinusoids": ("flowformer_lm",),
    "learned": ("linear_lm", "--decoder-learned-pos"),
    "scaled sinusoids": ("flash_lm",),
    "short convolution": ("linear_lm", "--linear-short-conv", "3"),
    "checkpoints": ("softmax_lm", "--checkpoint-activations"),
}
#: Ends of the sentences in a stream of tokens; the second is empty, the last is cut.
SENTENCES = ([5, 6, 7, EOS], [EOS], [8, 9, EOS], [10, 11, 12, 13, 14, EOS], [15, EOS])


def rows() -> Tensor:
    """Documents that start with eos, as a language model reads them, and one without; padding on both sides."""
    first = [7, 8, EOS, 9, 10, 11, 12, 13, EOS, EOS, 14, 15, 16, EOS, 17]
    second = [PAD, PAD, EOS, 20, 21, 22, EOS, 23, 24, 25, 26, 27, 28, 29, 30]
    third = [EOS, 33, 34, 35, 36, 37, 38, EOS, 39, 40, EOS, 41, PAD, PAD, PAD]
    return torch.tensor([first, second, third])


def each_alone(sequence: Tensor, ids: Tensor) -> list[tuple[int, Tensor]]:
    """The row and the columns of each document's tokens."""
    documents = []
    for row in range(len(sequence)):
        for number in ids[row].unique():
            columns = ((ids[row] == number) & sequence[row].ne(PAD)).nonzero().squeeze(1)
            if len(columns):
                documents.append((row, columns))
    return documents


def build(name: str, *flags: str) -> nn.Module:
    """A tiny model in evaluation mode whose attention clearly affects its outputs."""
    return build_tiny(name, {**SHORT, "chunk-size": "4"}, 16, *flags)


def check_documents(model: nn.Module) -> Tensor:
    """Assert that documents alone, single steps and parts equal whole rows; returns the outputs of whole rows."""
    sequence = rows()
    whole = model(sequence)[0]
    for row, columns in each_alone(sequence, documents_by_eos(sequence, EOS, True)):
        alone = model(sequence[row : row + 1, columns])[0][0]
        assert_close(f"document at {columns[0]} of row {row}", whole[row, columns], alone, 2e-5)
    return whole


@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_every_language_model(name):
    model, sequence = build(name, FLAG), rows()
    whole, real = check_documents(model), sequence.ne(PAD)
    for sizes in ([1] * 15, [4, 6, 5]):
        state, parts = {}, []
        for some in sequence.split(sizes, dim=1):
            parts.append(model.decoder.extend_features(some, state)[0])
        parts = model.decoder.output_layer(torch.cat(parts, dim=1))
        assert_close(f"parts of {sizes}", parts[real], whole[real], 2e-5)


@pytest.mark.parametrize("name", ["flowformer_lm", "flash_lm", "softmax_lm"])
@torch.no_grad()
def test_fairseqs_steps_and_its_reordering(name):
    """Decoding as in fairseq's generator: one more token per step, with reordered rows."""
    model, sequence = build(name, FLAG), rows()[[0, 2]]
    whole, state, order = model(sequence)[0], {}, torch.tensor([1, 0])
    for t in range(11):
        if t == 6:
            model.decoder.reorder_incremental_state_scripting(state, order)
            sequence, whole = sequence[order], whole[order]
        step = model(sequence[:, : t + 1], incremental_state=state)[0]
        assert_close(f"step {t}", step[:, -1], whole[:, t], 2e-5)


@pytest.mark.parametrize("name", ["linear_lm", "flash_lm", "gla_lm"])
def test_a_stream_ends_documents_too(name):
    """Blocks of a stream; some begin inside a document, others at its start."""
    model, sequence, outs, before = build(name, FLAG), rows(), [], None
    with torch.no_grad():
        for block in sequence.split(4, dim=1):
            carried = CarriedState(before)
            outs.append(model.decoder(block, incremental_state=carried)[0])
            before = carried.after
        real = sequence.ne(PAD)
        assert_close("logits", torch.cat(outs, dim=1)[real], model(sequence)[0][real])


@pytest.mark.parametrize("kind", POSITIONS)
def test_positions_begin_anew(kind):
    name, *flags = POSITIONS[kind]
    model = build(name, FLAG, *flags)
    whole = check_documents(model.train())
    whole.sum().backward()
    gradient = next(iter(model.parameters())).grad.clone()
    assert torch.isfinite(gradient).all() and gradient.any()


def test_another_document_gets_no_gradient():
    model, sequence = build("flowformer_lm", FLAG), rows()[:1]
    embedded = []
    model.decoder.embed_tokens.register_forward_hook(lambda module, args, out: embedded.append(out) or out)
    model(sequence)[0][0, 3:8].sum().backward(
        inputs=[*model.parameters(), *[x for x in embedded if x.retain_grad() is None]]
    )
    touched = embedded[0].grad[0].abs().sum(-1).nonzero().squeeze(1)
    assert touched.tolist() == [2, 3, 4, 5, 6, 7]


@torch.no_grad()
def test_without_the_option_documents_see_each_other():
    sequence = rows()[:1]
    changed = sequence.clone()
    changed[0, 3] = 50
    plain, packed = build("linear_lm"), build("linear_lm", FLAG)
    for model, sees in ((plain, True), (packed, False)):
        later = [model(x)[0][0, 9:] for x in (sequence, changed)]
        assert torch.equal(*later) != sees


@pytest.mark.parametrize("name", MASKED)
@torch.no_grad()
def test_every_masked_model(name):
    model = build_random(name, FLAG)
    first = [0, 7, 8, EOS, 9, 10, 11, 12, 13, EOS, EOS, 14, 15, 16, EOS]
    second = [0, 20, 21, 22, EOS, 23, 24, 25, 26, 27, 28, 29, EOS, PAD, PAD]
    sequence = torch.tensor([first, second])
    ids = documents_by_eos(sequence, EOS, False)
    whole = model(sequence, features_only=True)[0]
    documents = each_alone(sequence, ids)
    assert [int(sequence[row, columns[-1]]) for row, columns in documents] == [EOS] * 6, "each ends with its eos"
    for row, columns in documents:
        alone = model(sequence[row : row + 1, columns], features_only=True)[0][0]
        assert_close(f"document at {columns[0]} of row {row}", whole[row, columns], alone)


@pytest.mark.parametrize("mode", ["none", "complete", "complete_doc", "eos"])
@torch.no_grad()
def test_blocks_of_fairseq(mode):
    """A token is predicted from the part of its own sentence in its block, for every type of block."""
    sizes = [len(x) for x in SENTENCES]
    stream = [torch.tensor(x) for x in SENTENCES]
    blocks = TokenBlockDataset(stream, sizes, 7, PAD, EOS, mode, include_targets=True, document_sep_len=1)
    sentences = [[int(x) for x in sentence] for sentence in SENTENCES]
    model, predicted_tokens = build("linear_lm", FLAG), []
    for i in range(len(blocks)):
        source, target, _ = blocks[i]
        if not len(target):
            continue
        ids = documents_by_eos(source[None], EOS, True)[0]
        for document in ids.unique():
            prefix, predicted = source[ids == document].tolist(), target[ids == document].tolist()
            # A document in a block is an eos and a sentence without its last token, or the remainder of a cut sentence;
            # it predicts the next tokens of that sentence only.
            begun = prefix[0] == EOS
            whole = predicted if begun else [*prefix[:1], *predicted]
            assert any(
                whole == sentence[: len(whole)]
                if begun
                else whole == sentence[-len(whole) :] or _is_inside(whole, sentence)
                for sentence in sentences
            ), (prefix, predicted)
            assert EOS not in predicted[:-1]
            out = model(source[None])[0][0][ids == document]
            assert_close("alone", out, model(torch.tensor([prefix]))[0][0], 2e-5)
            predicted_tokens += predicted
    if mode in ("none", "eos"):
        assert sorted(predicted_tokens) == sorted(x for sentence in sentences for x in sentence)


def _is_inside(part: list[int], sentence: list[int]) -> bool:
    return any(sentence[i : i + len(part)] == part for i in range(len(sentence)))


def test_one_that_begins_before_is_the_first():
    assert documents_by_eos(torch.tensor([[7, EOS, 8, EOS]]), EOS, True).tolist() == [[0, 1, 1, 2]]
    assert documents_by_eos(torch.tensor([[7, EOS, 8, EOS]]), EOS, False).tolist() == [[0, 0, 1, 1]]


def test_weights_remember_it():
    packed, plain = build("linear_lm", FLAG), build("linear_lm")
    assert not any("documents" in name for name in plain.state_dict())
    with pytest.warns(UserWarning, match="reset_at_eos=True.*reset_at_eos=False"):
        plain.load_state_dict(packed.state_dict())
    with pytest.warns(UserWarning, match="do not say.*reset_at_eos=True"):
        packed.load_state_dict(plain.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packed.load_state_dict(packed.state_dict())
        plain.load_state_dict(plain.state_dict())


def test_a_document_longer_than_there_are_positions_is_refused_and_a_row_is_not():
    model = build("linear_lm", FLAG, "--decoder-learned-pos")
    longer = torch.full((1, 20), 7)
    with pytest.raises(ValueError, match="the input has 20 tokens; allowed: 16"):
        model(longer)
    longer[0, 10] = EOS
    assert torch.isfinite(model(longer)[0]).all()


def test_tasks_whose_sequences_belong_together_are_refused():
    task = object.__new__(tasks.sentence_prediction.SentencePredictionTask)
    arguments = SimpleNamespace(lineartime_reset_at_eos=True, arch="linear_mlm")
    with pytest.raises(ValueError, match="^--lineartime-reset-at-eos is given; allowed: for --task masked_lm"):
        MODEL_REGISTRY["linear_mlm"].build_model(arguments, task)
    with pytest.raises(ValueError, match="^--lineartime-reset-at-eos is given; allowed"):
        MODEL_REGISTRY["linear_classifier"].build_model(arguments, task)
    assert build_masked("linear_mlm", FLAG, sizes=False) and build_model("flowformer_lm", FLAG)
