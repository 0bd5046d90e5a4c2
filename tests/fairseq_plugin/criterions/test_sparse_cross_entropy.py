"""The entropy regulariser adds its own gradient to that of cross-entropy, in training alone, and nothing to the log."""

import math
from types import SimpleNamespace

import pytest
import torch
from fairseq.logging import metrics
from torch import Tensor, nn
from torch.nn import functional as F

from common.attention import position_entropy
from fairseq_plugin.criterions.sparse_cross_entropy import SparseCrossEntropyCriterion
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.language_models import awake, build_model
from tests.fairseq_plugin.helpers.text import dictionary, tokens

PAD = 1
WEIGHT = 0.3


def _criterion(weight: float = WEIGHT, sentence_avg: bool = False) -> SparseCrossEntropyCriterion:
    return SparseCrossEntropyCriterion(SimpleNamespace(target_dictionary=dictionary()), sentence_avg, weight)


def _sample(batch: int, length: int, padding: int = 0, seed: int = 0) -> dict[str, object]:
    """A batch as ``language_modeling`` makes it, the last row ending in ``padding``."""
    sequence = tokens(batch, length + 1, seed)
    source, target = sequence[:, :-1].clone(), sequence[:, 1:].clone()
    if padding:
        source[-1, -padding:] = target[-1, -padding:] = PAD
    real = int(target.ne(PAD).sum())
    return {"net_input": {"src_tokens": source, "src_lengths": None}, "target": target, "ntokens": real}


def _literal_entropy(state: dict[str, Tensor]) -> Tensor:
    """Σ over layers and heads of -Σ p log p, p = softmax(γ (r - mean) / std + β), from a model's parameters."""
    total = torch.zeros(())
    for name in [name for name in state if name.endswith("inner.r")]:
        r, gamma, beta = (state[name[:-1] + part].double() for part in ("r", "gamma", "beta"))
        r = gamma * (r - r.mean(1, keepdim=True)) / r.std(1, keepdim=True, unbiased=False) + beta
        p = torch.exp(r) / torch.exp(r).sum(1, keepdim=True)
        total = total - (p * torch.log(p)).sum()
    return total


def _cross_entropy(model: nn.Module, sample) -> Tensor:
    logits = model(**sample["net_input"])[0]
    return F.cross_entropy(logits.flatten(0, 1), sample["target"].flatten(), ignore_index=PAD, reduction="sum")


@pytest.mark.parametrize("sentence_avg", [False, True])
@pytest.mark.parametrize(("batch", "length", "padding"), [(2, 30, 0), (5, 17, 6)])
def test_gradient_is_of_both_terms(batch: int, length: int, padding: int, sentence_avg: bool) -> None:
    """After the trainer's division, that of cross-entropy / sample size and of the weighted entropy, at any size."""
    model = awake(build_model("daft_conv_lm", "--dropout", "0")).train()
    sample = _sample(batch, length, padding)
    size = batch if sentence_avg else batch * length - padding
    parameters = dict(model.named_parameters())
    loss, sample_size, _ = _criterion(sentence_avg=sentence_avg)(model, sample)
    assert sample_size == size
    actual = torch.autograd.grad(loss / sample_size, list(parameters.values()))
    expected = torch.autograd.grad(
        _cross_entropy(model, sample) / size + WEIGHT * _literal_entropy(parameters).float(),
        list(parameters.values()),
    )
    for name, one, other in zip(parameters, actual, expected):
        assert (one - other).norm() <= 1e-4 * other.norm() + 1e-7, name
    # The second term is there to be seen.
    alone = torch.autograd.grad(_literal_entropy(parameters), parameters["decoder.layers.0.self_attn.inner.gamma"])[0]
    assert alone.abs().max() > 1e-2


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_log_is_of_cross_entropy(training: bool) -> None:
    """The logged loss is that of cross-entropy alone; so is the returned one outside of training."""
    model = awake(build_model("daft_conv_lm", "--dropout", "0")).train(training)
    sample = _sample(3, 20, padding=4)
    loss, sample_size, logged = _criterion()(model, sample)
    plain, entropy = _cross_entropy(model, sample), _literal_entropy(dict(model.named_parameters()))
    assert_close("logged", logged["loss"], plain.detach())
    assert_close("entropy", (logged["position_entropy"] / 56).double(), entropy.detach(), tolerance=1e-5)
    assert not logged["position_entropy"].requires_grad
    parts, _, _ = _criterion()(model, sample, reduce=False)
    assert parts.shape == (60,)
    assert_close("sum", parts.sum().detach(), loss.detach())
    assert_close("loss", loss.double(), plain.double() + (56 * WEIGHT * entropy if training else 0.0), tolerance=1e-5)


def test_uniform_filters_have_the_largest_entropy() -> None:
    """As initialised: the logarithm of the window, per head and layer."""
    assert position_entropy(build_model("daft_conv_lm")).item() == pytest.approx(2 * 4 * math.log(9), rel=1e-5)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_that_are_none(weight: float) -> None:
    """Named, with what was given."""
    with pytest.raises(ValueError, match=f"--entropy-weight is {weight}; allowed"):
        _criterion(weight)


@pytest.mark.parametrize("arch", ["flowformer_lm", "daft_full_lm"])
def test_models_without_filters_are_refused(arch: str) -> None:
    """There is no entropy to keep small."""
    with pytest.raises(ValueError, match="model is a .*LanguageModel without DAFT-conv"):
        _criterion()(build_model(arch), _sample(2, 8))


def test_half_precision() -> None:
    """The loss and the logged entropy of a model in float16 are those of float32 but for rounding."""
    model, sample = awake(build_model("daft_conv_lm", "--dropout", "0")).train(), _sample(3, 20)
    exact, size, logged = _criterion()(model, sample)
    rough, _, halved = _criterion()(model.half(), sample)
    assert_close("loss", (rough / size).detach().float(), (exact / size).detach(), tolerance=2e-2)
    assert float(halved["position_entropy"]) == pytest.approx(float(logged["position_entropy"]), rel=1e-3)


def test_what_is_printed_is_a_mean_over_tokens() -> None:
    """Of batches of unequal sizes, as of accumulated updates; ../test_two_processes.py compares whole trainings."""
    model = awake(build_model("daft_conv_lm", "--dropout", "0")).train()
    samples = [_sample(3, 20, padding=4), _sample(2, 9)]
    with metrics.aggregate(new_root=True) as printed:
        SparseCrossEntropyCriterion.reduce_metrics([_criterion()(model, sample)[2] for sample in samples])
    values = printed.get_smoothed_values()
    bits = sum(_cross_entropy(model, sample) for sample in samples).item() / (56 + 18) / math.log(2)
    assert values["loss"] == pytest.approx(bits, abs=2e-3) and values["ppl"] == pytest.approx(2.0**bits, rel=1e-2)
    assert values["position_entropy"] == pytest.approx(
        _literal_entropy(dict(model.named_parameters())).item(), abs=2e-3
    )
