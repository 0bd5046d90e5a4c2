"""Fields with which no model works are refused, and tensors that transformers creates anew are the constructor's.

In every class and attention.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common.attention import ATTENTIONS
from common.huggingface import (
    AUTO_CLASSES,
    GATED_ATTENTION_UNIT,
    LineartimeConfig,
    LineartimeForCausalLM,
    LineartimeForMaskedLM,
    LineartimeForSeq2SeqLM,
    LineartimeForSequenceClassification,
    LineartimeModel,
)
from tests.compare import assert_drawn_alike, on_cpu

from .models import fields_of, small, tensors

#: A layer of each attention, some with options that add parameters, and of gated attention units.
LAYERS = [
    *({"kind": name, "max_tokens": 64} for name, kind in ATTENTIONS.items() if "spatial_shape" not in kind.needs),
    {"kind": "linear", "options": {"forget": "channel", "short_conv": 3}},
    {"kind": "linear", "rotary": True},
    {"kind": "favor", "options": {"redraw": 3}},
    {"kind": "daft_full", "max_tokens": 64, "options": {"bias_dim": 8}},
]
UNITS = [
    {"query_dim": 16, "chunk_size": 8, "bias": "toeplitz", "max_positions": 64},
    {"query_dim": 16, "chunk_size": 8, "bias": "rotary", "gate": False, "separate_ffn": True, "norm": "scalenorm"},
    {"query_dim": 16, "chunk_size": None, "max_positions": 64},
]
PLAIN = [{"kind": "flow"}, {"kind": "linear"}]
EVERY = (LineartimeForCausalLM, LineartimeForMaskedLM, LineartimeForSeq2SeqLM)
#: Classes with layers and fields: every attention in a decoder, an encoder and both, and every other part in one class.
CASES = {
    **{kind.__name__: (kind, LAYERS if kind in EVERY else PLAIN, {}) for kind in AUTO_CLASSES.values()},
    "features of a language model": (LineartimeModel, PLAIN, {"is_decoder": True, "embedding_dim": 48}),
    "classes of a language model": (LineartimeForSequenceClassification, PLAIN, {"is_decoder": True}),
    "units": (LineartimeForMaskedLM, [{"kind": GATED_ATTENTION_UNIT, "options": x} for x in UNITS], {"family": "gau"}),
    "units that forget": (
        LineartimeForCausalLM,
        [{"kind": GATED_ATTENTION_UNIT, "options": {"query_dim": 16, "chunk_size": 8, "forget": "channel"}}],
        {"family": "gau"},
    ),
    "learned positions": (
        LineartimeForSeq2SeqLM,
        PLAIN,
        {"positions": "learned", "layernorm_embedding": True, "gated_ffn": True, "attention_gate": True},
    ),
    "tied": (
        LineartimeForMaskedLM,
        PLAIN,
        {"positions": "scaled_sinusoidal", "norm": "scalenorm", "tie_word_embeddings": True},
    ),
    "projected": (LineartimeForCausalLM, PLAIN, {"positions": "none", "embedding_dim": 48, "output_dim": 32}),
}


@pytest.mark.parametrize("name", CASES)
def test_init_weights_gives_what_the_constructor_gives(name: str) -> None:
    """After ``to_empty``, whose memory holds anything."""
    kind, layers, fields = CASES[name]
    fields = fields_of(kind, layers, **fields)
    torch.manual_seed(0)
    model = on_cpu(lambda: kind(LineartimeConfig(**fields)))
    for part in model.modules():  # a model that was used before
        if getattr(part, "counts", ()):
            part.restore_counts(dict.fromkeys(part.counts, 5))
    model.init_weights()
    expected = kind(LineartimeConfig(**fields))
    assert_drawn_alike(model, expected)
    for part, other in zip(model.modules(), expected.modules(), strict=True):
        assert "passes" not in getattr(part, "counts", ()) or part.passes == other.passes == 0
    assert not bool(model.get_input_embeddings().weight[1].any()), "padding"
    before = {name: x.clone() for name, x in tensors(model).items()}
    model.init_weights()  # as in stock models, once
    assert all(torch.equal(x, before[name]) for name, x in tensors(model).items())


@pytest.mark.parametrize("kind", AUTO_CLASSES.values())
def test_parts_of_another_size_are_new_and_all_others_are_loaded(kind: type[nn.Module], tmp_path: Path) -> None:
    """``ignore_mismatched_sizes=True``."""
    model = small(kind)
    model.save_pretrained(tmp_path)
    change: dict[str, Any] = {"vocab_size": 500, "encoder_vocab_size": 500, "num_labels": 5}
    change = {name: value for name, value in change.items() if hasattr(model.config, name)}
    loaded = kind.from_pretrained(tmp_path, ignore_mismatched_sizes=True, **change)
    assert_drawn_alike(loaded, kind(loaded.config))
    stored, found = tensors(model), tensors(loaded)
    same = {name for name, x in found.items() if x.shape == stored[name].shape}
    assert same < found.keys() and all(torch.equal(found[name], stored[name]) for name in same)
    assert not bool(loaded.get_input_embeddings().weight[1].any())


@pytest.mark.parametrize("mean_resizing, tied", [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", AUTO_CLASSES.values())
def test_resized_tables_go_on(kind: type[nn.Module], mean_resizing: bool, tied: bool) -> None:
    """Rows of before are kept, new ones are of the spread of a constructor; one table of several is not resized."""
    model = small(kind, tie_word_embeddings=tied)
    if not model.has_one_table():
        with pytest.raises(ValueError, match="new_num_tokens is 400; allowed"):
            model.resize_token_embeddings(400)
        return
    before = {name: x.detach().clone() for name, x in tensors(model).items()}
    model.resize_token_embeddings(400, mean_resizing=mean_resizing)
    found = tensors(model)
    assert {name for name, x in found.items() if x.shape != before[name].shape}
    assert all(torch.equal(x[: len(before[name])], before[name]) for name, x in found.items())
    if not mean_resizing:
        assert_drawn_alike(model, type(model)(model.config))
    ids = torch.full((2, 5), 399)
    inputs = {"decoder_input_ids": ids} if kind is LineartimeForSeq2SeqLM else {}
    assert bool(model(input_ids=ids, **inputs)[0].isfinite().all())


# Fields of a configuration

FIELDS = {"attention": [{"kind": "flow"}], "vocab_size": 100, "hidden_size": 16, "num_attention_heads": 2}
SIDES = {
    **FIELDS,
    **{f"encoder_{name}": value for name, value in FIELDS.items()},
    **{"encoder_intermediate_size": 16, "encoder_positions": "none", "encoder_max_position_embeddings": 16},
    **{"cross_attention": [{"kind": "softmax"}], "is_encoder_decoder": True},
}
NAN, HUGE = float("nan"), 2**40
WRONG: list[tuple[str, Any, dict[str, Any]]] = [
    *(("pad_token_id", value, FIELDS) for value in (None, -1, 100, True, 1.0, [1], "1")),
    ("pad_token_id", 60, {**SIDES, "encoder_vocab_size": 50}),
    *(("eos_token_id", value, {**FIELDS, "reset_at_eos": True}) for value in ([2, 3], None, -1, 100)),
    *(("decoder_start_token_id", value, SIDES) for value in (-1, 100, [2])),
    *(("layer_norm_eps", value, FIELDS) for value in (NAN, float("inf"), -1e-5, "small", None)),
    *(("hidden_dropout", value, FIELDS) for value in (NAN, 1.5, -0.1, None)),
    *((name, NAN, FIELDS) for name in ("attention_dropout", "activation_dropout", "classifier_dropout")),
    *((name, HUGE, FIELDS) for name in ("vocab_size", "hidden_size", "intermediate_size", "num_labels")),
    *((f"encoder_{name}", HUGE, SIDES) for name in ("vocab_size", "hidden_size", "intermediate_size")),
    *((name, HUGE, FIELDS) for name in ("attention_dim", "classifier_dim", "embedding_dim", "output_dim")),
    ("max_position_embeddings", HUGE, {**FIELDS, "positions": "learned"}),
    *((name, x, FIELDS) for name in ("vocab_size", "hidden_size", "num_labels") for x in (0, -1, 1.5, NAN, "9")),
    ("attention", [{"kind": "flow", "options": 3}], FIELDS),
    *(("attention", [entry], FIELDS) for entry in (3, {}, {"kind": "flwo"}, {"kind": "flow", "wrong": {}})),
    ("attention", [{"kind": "mine"}], {**FIELDS, "own_modules": {"mine": "my_file"}}),
    ("attention", [{"kind": "flow"}, {"kind": "gated_attention_unit"}], FIELDS),
    ("attention", FIELDS["attention"], {**FIELDS, "family": "gau"}),
    ("num_attention_heads", 3, FIELDS),
    ("lineartime_version", "99.0", FIELDS),
]


def test_a_field_that_cannot_work_is_refused() -> None:
    for name, value, fields in WRONG:
        with pytest.raises(ValueError, match=f"{name}.*allowed") as caught:
            LineartimeConfig(**{**fields, name: value})
        assert "\n" not in str(caught.value), name


def test_fields_of_stock_models_that_can_work_are_kept() -> None:
    """Several ends of a text, none at all, and no beginning."""
    for fields in ({"eos_token_id": [2, 3]}, {"eos_token_id": None}, {"bos_token_id": None}, {"layer_norm_eps": 0}):
        config = LineartimeConfig(**FIELDS, **fields)
        assert all(getattr(config, name) == value for name, value in fields.items())
        LineartimeForCausalLM(config)
    assert LineartimeConfig(**SIDES).decoder_start_token_id == 2
