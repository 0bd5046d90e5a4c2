"""``--lineartime-reset-at-eos``: documents in a row do not see each other, in every text model."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.models import MODEL_REGISTRY
from fairseq.tasks.sentence_prediction import SentencePredictionTask

from common.ops.shared.segments import documents_by_eos
from fairseq_plugin.modules.carried_state import CarriedState
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.kinds import build, ending_of, models, shown
from tests.fairseq_plugin.helpers.text import PAD, tokens

EOS, RESET = 2, "--lineartime-reset-at-eos"
#: Documents that start with eos, as a language model reads them, and one without; padding on both sides.
FIRST = [7, 8, EOS, 9, 10, 11, 12, 13, EOS, EOS, 14, 15, 16, EOS, 17]
SECOND = [PAD, PAD, EOS, 20, 21, 22, EOS, 23, 24, 25, 26, 27, 28, 29, 30]
THIRD = [EOS, 33, 34, 35, 36, 37, 38, EOS, 39, 40, EOS, 41, PAD, PAD, PAD]
DOCUMENTS = torch.tensor([FIRST, SECOND, THIRD])
NAMES = [*models("_lm", "_mlm"), "linear_lm --decoder-learned-pos", "linear_lm --linear-short-conv 3"]
NAMES += ["softmax_lm --checkpoint-activations"]


def columns_of(causal: bool) -> list[tuple[int, list[int]]]:
    """The row and the columns of each document; eos begins one, or ends one in a masked model."""
    documents = []
    for row, line in enumerate(DOCUMENTS.tolist()):
        begun: list[list[int]] = [[]]
        for column, token in enumerate(line):
            if causal and token == EOS:
                begun.append([])
            if token != PAD:
                begun[-1].append(column)
            if not causal and token == EOS:
                begun.append([])
        documents += [(row, columns) for columns in begun if columns]
    return documents


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_documents_do_not_see_each_other(name: str) -> None:
    """Each is what it is alone; read in parts, as a stream or in reordered single steps, it stays that."""
    causal, model = ending_of(name.split()[0]) == "_lm", shown(*name.split(), RESET)
    whole, real = model(DOCUMENTS)[0], DOCUMENTS.ne(PAD)
    for row, columns in columns_of(causal):
        alone = model(DOCUMENTS[row : row + 1, columns])[0][0]
        assert_close(f"document at {columns[0]} of row {row}", whole[row, columns], alone, 1e-5)
    if not causal:
        return
    state: dict[str, Any] = {}
    parts, streamed, before = [], [], None
    for some in DOCUMENTS.split([4, 6, 5], dim=1):
        parts.append(model.decoder.output_layer(model.decoder.extend_features(some, state)[0]))
        carried = CarriedState(before)
        streamed.append(model.decoder(some, incremental_state=carried)[0])
        before = carried.after
    for found in (parts, streamed):
        assert_close("in parts", torch.cat(found, dim=1)[real], whole[real], 1e-5)
    rows, order, state = DOCUMENTS[[0, 2]], torch.tensor([1, 0]), {}
    for end in range(1, 12):
        if end == 7:
            model.decoder.reorder_incremental_state_scripting(state, order)
            rows = rows[order]
        expected = whole[[2, 0] if end > 6 else [0, 2], end - 1]
        assert_close(f"step {end}", model(rows[:, :end], incremental_state=state)[0][:, -1], expected, 1e-5)


def test_no_gradient_reaches_another_document_or_block() -> None:
    """Without the option it does; a carried state passes none to an earlier block of a stream."""
    for flags, reached in (((RESET,), [2, 3, 4, 5, 6, 7]), ((), list(range(8)))):
        model, embedded = shown("flowformer_lm", *flags), []
        model.decoder.embed_tokens.register_forward_hook(lambda module, args, out, kept=embedded: kept.append(out))
        out = model(DOCUMENTS[:1])[0][0, 3:8].sum()
        (gradient,) = torch.autograd.grad(out, embedded)
        assert gradient[0].abs().sum(-1).nonzero().squeeze(1).tolist() == reached
    embedded.clear()
    carried = CarriedState(None)
    model.decoder(DOCUMENTS[:1, :5], incremental_state=carried)
    out = model.decoder(DOCUMENTS[:1, 5:], incremental_state=CarriedState(carried.after))[0].sum()
    gradients = torch.autograd.grad(out, embedded, allow_unused=True)
    assert gradients[0] is None and gradients[1].any()


@pytest.mark.parametrize("causal", [True, False])
def test_a_document_that_begins_before_the_row_is_the_first(causal: bool) -> None:
    expected = [[0, 1, 1, 2]] if causal else [[0, 0, 1, 1]]
    assert documents_by_eos(torch.tensor([[7, EOS, 8, EOS]]), EOS, causal).tolist() == expected


def test_a_document_longer_than_there_are_positions_is_refused_and_a_row_is_not() -> None:
    model = build("linear_lm", RESET, "--decoder-learned-pos", "--tokens-per-sample", "16")
    longer = torch.full((1, 20), 7)
    with pytest.raises(ValueError, match="the input has 20 tokens; allowed: 16"):
        model(longer)
    longer[0, 10] = EOS
    assert torch.isfinite(model(longer)[0]).all()
    task, given = object.__new__(SentencePredictionTask), SimpleNamespace(lineartime_reset_at_eos=True, arch="mlm")
    with pytest.raises(ValueError, match="^--lineartime-reset-at-eos is given; allowed: for --task masked_lm"):
        MODEL_REGISTRY["linear_mlm"].build_model(given, task)


@torch.no_grad()
def test_layers_that_are_dropped_are_those_of_the_forward_pass() -> None:
    """--decoder-layerdrop draws once per pass, also for parts; the layers that run receive their states."""
    model, sequence, outputs = shown("flowformer_lm", "--decoder-layerdrop", "0.5").train(), tokens(2, 9), set()
    for seed in range(6):
        torch.manual_seed(seed)
        whole, state = model(sequence)[0], {}
        torch.manual_seed(seed)
        first = model.decoder.extend_features(sequence[:, :5], state)[0]
        torch.manual_seed(seed)
        second = model.decoder.extend_features(sequence[:, 5:], state)[0]
        assert_close("parts", model.decoder.output_layer(torch.cat([first, second], dim=1)), whole, 1e-5)
        outputs.add(float(whole.sum()))
    assert len(outputs) > 1


def test_states_that_cannot_go_on_are_refused() -> None:
    model, state = build("linear_lm").eval(), {}
    model.decoder(tokens(1, 3), incremental_state=state)
    with pytest.raises(ValueError, match="incremental_state is of single steps.*allowed: an empty one"):
        model.decoder.extend_features(tokens(1, 3), state)
    with pytest.raises(ValueError, match="attention to an encoder; allowed: language models"):
        build("linear").decoder.extend_features(tokens(1, 3), {})
    with pytest.raises(ValueError, match="full_context_alignment"):
        model(tokens(1, 4), full_context_alignment=True)
