"""Models for transformers compute what the same models of fairseq compute, whole, in parts and from a folder.

tests/common/huggingface has what transformers does with them: generation, caches, training, libraries.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.huggingface import LineartimeCache
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.huggingface_models import (
    cache_of,
    classifiers,
    encoder_decoder,
    language_models,
    masked,
)
from tests.fairseq_plugin.helpers.one_line import refused_in_one_line
from tests.fairseq_plugin.helpers.text import PAD, tokens

SHARED = ("--share-decoder-input-output-embed",)
#: Language models, by the name of a test: every part of a layer, and every kind of state, at least once.
CAUSAL = {
    "flow": ("flowformer_lm",),
    "flow-post-norm": (
        *("flowformer_lm", "--lineartime-post-norm", "--decoder-learned-pos", "--share-decoder-input-output-embed"),
        *("--layernorm-embedding", "--activation-fn", "gelu_accurate"),
    ),
    "flow-documents": ("flowformer_lm", "--lineartime-reset-at-eos"),
    "linear-gates": ("linear_lm", "--linear-forget", "head", "--linear-short-conv", "4"),
    "projections": ("linear_lm", "--decoder-input-dim", "24", "--decoder-output-dim", "24", *SHARED),
    "output-projection": ("flowformer_lm", "--decoder-output-dim", "24"),
    "gated-delta": ("gated_delta_lm", "--gated-delta-short-conv", "4", "--no-scale-embedding"),
    "softmax": ("softmax_lm", "--no-token-positional-embeddings"),
    "favor": ("favor_lm", "--favor-redraw", "5"),
    "rfa-gate": ("rfa_gate_lm",),
    "cosformer": ("cosformer_lm",),
    "retention": ("retention_lm",),
    "daft-conv": ("daft_conv_lm",),
    "daft-full": ("daft_full_lm",),
    "hybrid": ("hybrid_lm", "--lineartime-layers", "flow,softmax"),
    "flash": ("flash_lm", "--share-decoder-input-output-embed"),
    "flash-gates": ("flash_lm", "--flash-forget", "channel", "--decoder-learned-pos"),
    "flash-quad": ("flash_quad_lm", "--flash-norm", "scalenorm"),
    "transformer-pp": ("transformer_pp_lm", "--flash-attention-gate", "--flash-norm", "scalenorm"),
}
MASKED = {
    "masked": ("flowformer_mlm", "--encoder-learned-pos"),
    "masked-post-norm": (
        *("softmax_mlm", "--lineartime-post-norm", "--lineartime-norm-eps", "1e-3", "--untie-weights-roberta"),
    ),
    "masked-bigbird": ("bigbird_mlm",),
    "masked-documents": ("flowformer_mlm", "--lineartime-reset-at-eos"),
    "masked-flash": ("flash_mlm",),
    "masked-flash-first": ("flash_mlm", "--flash-first-softmax", "--flash-first-to-all"),
    "masked-combiner": ("combiner_mlm",),
}
ARENA = ("--pooling", "mean", "--classifier-style", "arena", "--encoder-attention-dim", "16")
CLASSIFIERS = {
    "classifier-first": ("flowformer_classifier",),
    "classifier-mean": ("linear_classifier", *ARENA),
    "classifier-flash": ("flash_classifier", "--classifier-dim", "12"),
}
CROSS = "--lineartime-cross-attention"
ENCODER_DECODERS = {
    "pairs": ("flowformer",),
    "pairs-flow-source": ("flowformer", CROSS, "flow_source", "--share-all-embeddings"),
    "pairs-cosformer": ("cosformer", CROSS, "cosformer", "--decoder-normalize-before"),
    "pairs-linear": ("linear", CROSS, "linear", "--encoder-normalize-before"),
    "pairs-longformer": ("longformer",),
}
KINDS: dict[Callable[..., tuple[nn.Module, Any]], dict[str, tuple[str, ...]]] = {
    language_models: CAUSAL,
    masked: MASKED,
    classifiers: CLASSIFIERS,
    encoder_decoder: ENCODER_DECODERS,
}
pytestmark = pytest.mark.usefixtures("plain_pytorch")
TARGET = torch.cat([torch.full((3, 1), 2), tokens(3, 9, seed=1)], dim=1)


def both(name: str) -> tuple[nn.Module, Any]:
    """fairseq's model and that of transformers."""
    make, rows = next((make, rows) for make, rows in KINDS.items() if name in rows)
    return make(*rows[name])


def sequences() -> tuple[Tensor, Tensor]:
    """Tokens of three rows with padding on either side and eos in the middle, and transformers' mask."""
    sequence = tokens(3, 21)
    sequence[:, 9] = 2
    sequence[0, :4] = sequence[1, 15:] = PAD
    return sequence, sequence.ne(PAD).long()


def real(x: Tensor, mask: Tensor) -> Tensor:
    """The real tokens (R, V) of x (B, n, V); all of what has no tokens."""
    return x[mask.bool()] if x.dim() == 3 and x.shape[1] == mask.shape[1] else x


def expected(name: str, host: nn.Module) -> Tensor:
    """fairseq's outputs for ``sequences``."""
    sequence, mask = sequences()
    if name in ENCODER_DECODERS:
        return host(sequence, None, TARGET)[0]
    head = {"classification_head_name": "sentence_classification_head"} if name in CLASSIFIERS else {}
    return real(host(sequence, **head)[0], mask)


@torch.no_grad()
@pytest.mark.parametrize("name", [name for rows in KINDS.values() for name in rows])
def test_it_computes_what_fairseq_computes_also_from_a_folder(name: str, tmp_path: Path) -> None:
    """With a mask and, as in fairseq, without, and in parts; every tensor of a folder comes back, bit by bit."""
    (host, model), (sequence, mask) = both(name), sequences()
    given = (TARGET,) if name in ENCODER_DECODERS else ()
    wanted, logits = expected(name, host), model(sequence, mask, *given).logits
    assert_close("logits", real(logits, mask), wanted, 2e-6)
    if name not in ENCODER_DECODERS:
        assert_close("without a mask", real(model(sequence).logits, mask), wanted, 2e-6)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    tensors = [{**x.state_dict(), **dict(x.named_buffers())} for x in (model, loaded)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(x, tensors[1][key]) for key, x in tensors[0].items())
    assert torch.equal(loaded(sequence, mask, *given).logits, logits) and not loaded.training
    if name in ENCODER_DECODERS:
        first = model(sequence, mask, TARGET[:, :4], use_cache=True)
        second = model(sequence, mask, TARGET[:, 4:], cache=cache_of(first))
        assert_close("in parts", torch.cat([first.logits, second.logits], dim=1), wanted)
    if name in CAUSAL:
        check_cache(model, sequence, mask, logits, tmp_path / "cache.safetensors")


def check_cache(model: nn.Module, sequence: Tensor, mask: Tensor, whole: Tensor, path: Path) -> None:
    """Tokens in several calls, one by one or many at once, from memory or from a file, give the logits of one call."""
    first = model(sequence[:, :12], mask[:, :12], use_cache=True)
    cache_of(first).save(path)
    step = model(sequence[:, 12:13], mask[:, :13], cache=cache_of(first))
    rest = model(sequence[:, 13:], mask, cache=cache_of(step))
    assert cache_of(rest).get_seq_length() == 21
    parts = torch.cat([first.logits, step.logits, rest.logits], dim=1)
    assert_close("in parts", real(parts, mask), real(whole, mask))
    loaded, chosen = LineartimeCache.load(path), torch.tensor([2, 0, 0])
    loaded.reorder_cache(chosen)
    rest = model(sequence[chosen, 12:], mask[chosen, 12:], cache=loaded)
    assert_close("after loading", *(real(x, mask[chosen, 12:]) for x in (rest.logits, whole[chosen, 12:])))


@torch.no_grad()
@pytest.mark.parametrize("name", ["flow-post-norm", "gated-delta", "flash"])
def test_in_half_precision_too(name: str) -> None:
    host, model = (copy.deepcopy(x).bfloat16() for x in both(name))
    sequence, mask = sequences()
    assert_close("logits", real(model(sequence, mask).logits, mask), expected(name, host))


@pytest.mark.parametrize("name", ["flash", "masked", "classifier-first", "pairs"])
def test_the_loss_and_gradients_are_those_of_fairseq(name: str) -> None:
    (host, model), sequence = both(name), tokens(3, 12)
    labels = torch.tensor([0, 2, 1]) if name in CLASSIFIERS else sequence
    loss = model(sequence, labels=labels).loss
    if name in ENCODER_DECODERS:
        scores = host(sequence, None, torch.cat([TARGET[:, :1], sequence[:, :-1]], dim=1))[0]
    elif name in CLASSIFIERS:
        scores = host(sequence, classification_head_name="sentence_classification_head")[0]
    else:
        scores = host(sequence)[0]
    if name in CAUSAL:
        scores, labels = scores[:, :-1], labels[:, 1:]
    wanted = nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels.flatten())
    assert_close("loss", loss, wanted, 2e-6)
    parameter = next(key for key, x in model.named_parameters() if x.dim() == 2 and "layers.0" in key)
    weights = (dict(x.named_parameters())[parameter] for x in (model, host))
    assert_close("gradient", *(torch.autograd.grad(*x)[0] for x in zip((loss, wanted), weights)))


@pytest.mark.parametrize("name", ["pairs", "pairs-flow-source", "pairs-cosformer"])
def test_a_padded_source_is_decoded_as_alone(name: str) -> None:
    """By three beams; ../../common/huggingface/test_generation.py has language models."""
    model, options = both(name)[1], {"max_new_tokens": 7, "min_new_tokens": 7, "num_beams": 3, "do_sample": False}
    rows = [tokens(1, length, seed=length)[0] for length in (3, 8, 5)]
    together = torch.stack([nn.functional.pad(row, (8 - len(row), 0), value=PAD) for row in rows])
    alone = torch.cat([model.generate(row[None], **options) for row in rows])
    for mask in ({"attention_mask": together.ne(PAD).long()}, {}):  # padding is seen in the tokens
        assert torch.equal(model.generate(together, **mask, **options), alone)


def test_bad_input_is_refused(tmp_path: Path) -> None:
    model, sequence = both("flow")[1], tokens(2, 4)
    cache, other = (cache_of(both(name)[1](sequence, use_cache=True)) for name in ("flow", "flash"))
    for arguments, words in (
        ({"input_ids": None}, ("input_ids is None",)),
        ({"input_ids": sequence, "attention_mask": torch.ones(2, 3)}, ("attention_mask", "(2, 3)")),
        ({"input_ids": sequence, "output_attentions": True}, ("output_attentions",)),
        ({"input_ids": sequence[:1], "cache": cache}, ("2 rows", "1 rows")),
        ({"input_ids": sequence, "cache": {}}, ("cache is a dict",)),
        ({"input_ids": sequence, "cache": cache, "use_cache": False}, ("use_cache is False",)),
        ({"input_ids": sequence, "cache": other}, ("initial_state",)),
    ):
        with refused_in_one_line(tmp_path, *words):
            model(**arguments)
    with refused_in_one_line(tmp_path, "41 tokens", "40"):
        both("flow-post-norm")[1](tokens(1, 41))
