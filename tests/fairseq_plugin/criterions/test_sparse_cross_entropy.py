"""The entropy regulariser adds its own gradient to that of cross-entropy, in training alone, and nothing to the log."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.attention import position_entropy
from fairseq_plugin.criterions.sparse_cross_entropy import SparseCrossEntropyCriterion
from tests.compare import assert_close, weights
from tests.fairseq_plugin.helpers.commands import run_in_turn, training_command
from tests.fairseq_plugin.helpers.language_models import awake, build_model
from tests.fairseq_plugin.helpers.logs import entries
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
    assert_close("loss", loss.double(), plain.double() + (56 * WEIGHT * entropy if training else 0.0), tolerance=1e-5)


def test_loss_of_every_token() -> None:
    """With ``reduce`` False the sum over tokens is what it is otherwise."""
    model = awake(build_model("daft_conv_lm", "--dropout", "0")).train()
    whole, _, _ = _criterion()(model, _sample(3, 20))
    parts, _, _ = _criterion()(model, _sample(3, 20), reduce=False)
    assert parts.shape == (60,)
    assert_close("sum", parts.sum().detach(), whole.detach())


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


# ---- By fairseq's trainer

#: Lines by themselves, so that batches differ in their tokens; a plain step of gradient descent of size 1.
STEP = (
    "--sample-break-mode eos --optimizer sgd --momentum 0 --lr 1 --clip-norm 0 --max-update 1 --dropout 0 "
    "--max-tokens 96 --required-batch-size-multiple 1 --no-epoch-checkpoints --num-workers 0"
).split()
SPARSE = ["--criterion", "sparse_cross_entropy", "--entropy-weight", str(WEIGHT)]
UPDATES: dict[str, list[str]] = {
    "plain": [],
    "accumulated": ["--update-freq", "3"],
    "by sentence": ["--sentence-avg"],
    "half precision": ["--fp16", "--fp16-no-flatten-grads"],
}


def _numbers(output: str) -> list[dict[str, float]]:
    return entries(output, "train_inner")


@pytest.fixture(scope="module")
def updates(data_bin: str, tmp_path_factory: pytest.TempPathFactory):
    """One update by each of UPDATES with cross-entropy and with ours, from the same awake weights."""
    root = tmp_path_factory.mktemp("updates")
    awake_checkpoint = root / "awake.pt"
    still = training_command(data_bin, str(root / "still"), "daft_conv_lm", *STEP, "--lr", "0")
    run_in_turn(("fairseq_cli.train", still, ""))
    stored = torch.load(root / "still" / "checkpoint_last.pt")
    model = awake(build_model("daft_conv_lm"))
    filters = {name: parameter.detach() for name, parameter in model.named_parameters() if "inner" in name}
    stored["model"] = {**stored["model"], **filters}
    torch.save(stored, awake_checkpoint)
    commands = {}
    for name, arguments in UPDATES.items():
        for kind, criterion in (("cross-entropy", []), ("sparse", SPARSE)):
            folder = str(root / f"{name} {kind}")
            command = training_command(data_bin, folder, "daft_conv_lm", *STEP, *arguments, *criterion)
            commands[name, kind] = ("fairseq_cli.train", [*command, "--finetune-from-model", str(awake_checkpoint)], "")
    logs = dict(zip(commands, run_in_turn(*commands.values())))
    return SimpleNamespace(root=root, logs=logs, before=stored["model"])


def _after(updates, name: str, kind: str) -> dict[str, Tensor]:
    return weights(torch.load(updates.root / f"{name} {kind}" / "checkpoint_last.pt")["model"])


@pytest.mark.parametrize("name", UPDATES)
def test_update_is_of_both_gradients(updates, name: str) -> None:
    """What ours subtracts beyond cross-entropy's own step is the weighted gradient of the entropy, however batched."""
    before = {key: value.double().requires_grad_() for key, value in weights(updates.before).items() if "inner" in key}
    gradients = torch.autograd.grad(_literal_entropy(before), list(before.values()), allow_unused=True)
    plain, sparse = (_after(updates, name, kind) for kind in ("cross-entropy", "sparse"))
    seen = 0.0
    for key, gradient in zip(before, gradients):
        added = plain[key].double() - sparse[key].double()
        tolerance = 4e-3 if name == "half precision" else 2e-6
        assert (added - WEIGHT * gradient).abs().max() <= tolerance, key
        seen = max(seen, added.abs().max().item())
        if key.endswith("inner.r"):
            assert not torch.equal(plain[key].float(), updates.before[key].float()), "cross-entropy moves it too"
    assert seen > 0.03
    others = [key for key in plain if "inner" not in key and plain[key].is_floating_point()]
    assert others and all(torch.equal(plain[key], sparse[key]) for key in others)


@pytest.mark.parametrize("name", UPDATES)
def test_logged_numbers_are_of_cross_entropy(updates, name: str) -> None:
    """Loss, perplexity and sizes as without the regulariser, and the entropy beside them, of validation too."""
    (plain,), (sparse,) = (_numbers(updates.logs[name, kind]) for kind in ("cross-entropy", "sparse"))
    for key in {"loss", "nll_loss", "ppl", "bsz", "num_updates"} & set(plain):
        assert sparse[key] == plain[key], key
    expected = _literal_entropy(updates.before).item()
    tolerance = 1e-2 if name == "half precision" else 2e-3
    assert sparse["position_entropy"] == pytest.approx(expected, abs=tolerance)
    assert "position_entropy" not in plain
    (valid,) = entries(updates.logs[name, "sparse"], "valid")
    after = _literal_entropy(_after(updates, name, "sparse")).item()
    assert valid["valid_position_entropy"] == pytest.approx(after, abs=tolerance)
    loss = valid["valid_nll_loss" if name == "by sentence" else "valid_loss"]
    assert valid["valid_ppl"] == pytest.approx(2.0**loss, rel=0.01)


def test_batches_differ_in_size(updates) -> None:
    """What the tests above need: an accumulated update averages batches of unequal numbers of tokens."""
    assert len({_numbers(updates.logs[name, "sparse"])[0]["wpb"] for name in UPDATES}) > 1


def test_training_makes_filters_sparse(data_bin: str, tmp_path: Path) -> None:
    """With a large weight the entropy falls from update to update; without it stays about that of uniform filters."""
    options = ["--lr", "0.02", "--max-update", "40", "--criterion", "sparse_cross_entropy", "--num-workers", "0"]
    outputs = run_in_turn(
        *(
            (
                "fairseq_cli.train",
                training_command(
                    data_bin, str(tmp_path / weight), "daft_conv_lm", *options, "--entropy-weight", weight
                ),
                "",
            )
            for weight in ("0", "1")
        )
    )
    without, by_weight = ([entry["position_entropy"] for entry in _numbers(output)] for output in outputs)
    uniform = 2 * 4 * math.log(9)
    assert without[0] == by_weight[0] == pytest.approx(uniform, abs=1e-3)
    assert by_weight[-1] < 0.85 * uniform and without[-1] > 0.97 * uniform
    assert all(later < earlier for earlier, later in zip(by_weight[5:], by_weight[6:]))
