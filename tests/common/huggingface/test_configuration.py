"""Fields with which no model works are refused when a configuration is made, in one line."""

from typing import Any

import pytest

from common.huggingface import LineartimeConfig, LineartimeForCausalLM

SIDE = {"attention": [{"kind": "flow"}], "vocab_size": 100, "hidden_size": 16, "num_attention_heads": 2}
SIDES = {
    **SIDE,
    **{f"encoder_{name}": value for name, value in SIDE.items()},
    **{"encoder_intermediate_size": 16, "encoder_positions": "none", "encoder_max_position_embeddings": 16},
    **{"cross_attention": [{"kind": "softmax"}], "is_encoder_decoder": True},
}
NAN, HUGE = float("nan"), 2**40
WRONG: list[tuple[str, Any, dict[str, Any]]] = [
    *(("pad_token_id", value, SIDE) for value in (None, -1, 100, True, 1.0, [1], "1")),
    ("pad_token_id", 60, {**SIDES, "encoder_vocab_size": 50}),
    *(("eos_token_id", value, {**SIDE, "reset_at_eos": True}) for value in ([2, 3], None, -1, 100)),
    *(("decoder_start_token_id", value, SIDES) for value in (-1, 100, [2])),
    *(("layer_norm_eps", value, SIDE) for value in (NAN, float("inf"), -1e-5, "small", None)),
    *(("hidden_dropout", value, SIDE) for value in (NAN, 1.5, -0.1, None)),
    *((name, NAN, SIDE) for name in ("attention_dropout", "activation_dropout", "classifier_dropout")),
    *((name, HUGE, SIDE) for name in ("vocab_size", "hidden_size", "intermediate_size", "num_labels")),
    *((f"encoder_{name}", HUGE, SIDES) for name in ("vocab_size", "hidden_size", "intermediate_size")),
    *((name, HUGE, SIDE) for name in ("attention_dim", "classifier_dim", "embedding_dim", "output_dim")),
    ("max_position_embeddings", HUGE, {**SIDE, "positions": "learned"}),
    *((name, value, SIDE) for name in ("vocab_size", "hidden_size", "num_labels") for value in (0, -1, 1.5, NAN, "9")),
    ("attention", [{"kind": "flow", "options": 3}], SIDE),
    *(("attention", [entry], SIDE) for entry in (3, {}, {"kind": "flwo"}, {"kind": "flow", "wrong": {}})),
    ("attention", [{"kind": "mine"}], {**SIDE, "own_modules": {"mine": "my_file"}}),
    ("attention", [{"kind": "flow"}, {"kind": "gated_attention_unit"}], SIDE),
    ("attention", SIDE["attention"], {**SIDE, "family": "gau"}),
    ("num_attention_heads", 3, SIDE),
    ("lineartime_version", "99.0", SIDE),
]


def test_a_field_that_cannot_work_is_refused() -> None:
    for name, value, fields in WRONG:
        with pytest.raises(ValueError, match=f"{name}.*allowed") as caught:
            LineartimeConfig(**{**fields, name: value})
        assert "\n" not in str(caught.value), name


def test_fields_of_stock_models_that_can_work_are_kept() -> None:
    """Several ends of a text, none at all, and no beginning."""
    for fields in ({"eos_token_id": [2, 3]}, {"eos_token_id": None}, {"bos_token_id": None}, {"layer_norm_eps": 0}):
        config = LineartimeConfig(**SIDE, **fields)
        assert all(getattr(config, name) == value for name, value in fields.items())
        LineartimeForCausalLM(config)
    assert LineartimeConfig(**SIDES).decoder_start_token_id == 2
