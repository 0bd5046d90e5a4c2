"""Tensors that transformers creates anew have the values that the constructors give, in every class and attention."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.attention import ATTENTIONS
from common.huggingface import (
    AUTO_CLASSES,
    GATED_ATTENTION_UNIT,
    LineartimeConfig,
    LineartimeForCausalLM,
    LineartimeForSeq2SeqLM,
    LineartimeForSequenceClassification,
    LineartimeModel,
)
from tests.compare import assert_drawn_alike, on_cpu

from .tiny_models import fields_of, small

#: A layer of each attention, some with options that add parameters, and of gated attention units.
LAYERS = [
    *({"kind": name, "max_tokens": 64} for name, kind in ATTENTIONS.items() if "spatial_shape" not in kind.needs),
    {"kind": "linear", "options": {"forget": "channel", "short_conv": 3}},
    {"kind": "linear", "rotary": True},
    {"kind": "favor", "options": {"redraw": 3}},
    {"kind": "daft_full", "max_tokens": 64, "options": {"bias_dim": 8}},
    {"kind": "gla", "options": {"short_conv": 3}},
]
UNITS = [
    {"query_dim": 16, "chunk_size": 8, "bias": "toeplitz", "max_positions": 64},
    {"query_dim": 16, "chunk_size": 8, "bias": "rotary", "gate": False, "separate_ffn": True, "norm": "scalenorm"},
    {"query_dim": 16, "chunk_size": None, "max_positions": 64},
]
OTHER_FIELDS = [
    {"positions": "learned", "layernorm_embedding": True, "gated_ffn": True, "attention_gate": True},
    {"positions": "scaled_sinusoidal", "norm": "scalenorm", "tie_word_embeddings": True},
]


def all_fields() -> list[Any]:
    """Every class, with every attention and with every kind of other part."""
    cases = []
    for kind in AUTO_CLASSES.values():
        cases.append(pytest.param(kind, fields_of(kind, LAYERS), id=f"{kind.__name__}-attentions"))
        if kind is not LineartimeForSeq2SeqLM:
            causal = [{"forget": "channel"}] if kind is LineartimeForCausalLM else [{}]
            units = [{**unit, **more} for unit in UNITS for more in causal if unit["chunk_size"] or not more]
            layers = [{"kind": GATED_ATTENTION_UNIT, "options": unit} for unit in units]
            cases.append(pytest.param(kind, fields_of(kind, layers, family="gau"), id=f"{kind.__name__}-units"))
        decodes = kind in (LineartimeForCausalLM, LineartimeForSeq2SeqLM)
        projected = [{"positions": "none", "embedding_dim": 48, "output_dim": 32}] if decodes else []
        for fields in (*OTHER_FIELDS, *projected):
            layers = [{"kind": "flow"}, {"kind": "linear"}]
            cases.append(
                pytest.param(kind, fields_of(kind, layers, **fields), id=f"{kind.__name__}-{fields['positions']}")
            )
    for kind in (LineartimeModel, LineartimeForSequenceClassification):  # of a language model
        fields = fields_of(kind, LAYERS, is_decoder=True, embedding_dim=48)
        cases.append(pytest.param(kind, fields, id=f"{kind.__name__}-decoder"))
    return cases


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize(("kind", "fields"), all_fields())
def test_init_weights_gives_what_the_constructor_gives(kind: type[nn.Module], fields: dict[str, Any]) -> None:
    """After ``to_empty``, whose memory holds anything."""
    torch.manual_seed(0)
    model = on_cpu(lambda: kind(LineartimeConfig(**fields)))
    model.init_weights()
    assert_drawn_alike(model, kind(LineartimeConfig(**fields)))
    assert not bool(model.get_input_embeddings().weight[1].any())  # of padding
    found = tensors(model)
    before = {name: x.clone() for name, x in found.items()}
    model.init_weights()  # as in stock models, once
    assert all(torch.equal(x, before[name]) for name, x in tensors(model).items())


@pytest.mark.parametrize("kind", AUTO_CLASSES.values())
@pytest.mark.parametrize("change", [{"vocab_size": 500, "encoder_vocab_size": 500}, {"num_labels": 5}], ids=str)
def test_parts_of_another_size_are_new_and_all_others_are_loaded(
    kind: type[nn.Module], change: dict[str, int], tmp_path: Path
) -> None:
    """``ignore_mismatched_sizes=True``."""
    if "num_labels" in change and kind is not LineartimeForSequenceClassification:
        return
    torch.manual_seed(0)
    model = small(kind)
    model.save_pretrained(tmp_path)
    change = {name: value for name, value in change.items() if hasattr(model.config, name)}
    loaded = kind.from_pretrained(tmp_path, ignore_mismatched_sizes=True, **change)
    assert_drawn_alike(loaded, kind(loaded.config))
    stored = tensors(model)
    assert all(torch.equal(x, stored[name]) for name, x in tensors(loaded).items() if x.shape == stored[name].shape)
    assert not bool(loaded.get_input_embeddings().weight[1].any())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mean_resizing", [True, False])
@pytest.mark.parametrize("kind", AUTO_CLASSES.values())
def test_resized_tables_go_on(kind: type[nn.Module], mean_resizing: bool, tied: bool) -> None:
    """Rows of before are kept, new ones are finite and of the spread of a constructor, and the model computes."""
    torch.manual_seed(0)
    model = small(kind, tie_word_embeddings=tied)
    if not model.has_one_table():
        with pytest.raises(ValueError, match="new_num_tokens is 400; allowed"):
            model.resize_token_embeddings(400)
        return
    before = {name: x.detach().clone() for name, x in tensors(model).items()}
    model.resize_token_embeddings(400, mean_resizing=mean_resizing)
    found = tensors(model)
    changed = {name for name, x in found.items() if x.shape != before[name].shape}
    assert changed
    assert all(torch.equal(x[: len(before[name])], before[name]) for name, x in found.items())
    if not mean_resizing:
        assert_drawn_alike(model, type(model)(model.config))
    ids = torch.full((2, 5), 399)
    inputs = {"decoder_input_ids": ids} if kind is LineartimeForSeq2SeqLM else {}
    assert bool(model(input_ids=ids, **inputs)[0].isfinite().all())
