"""Every criterion on worked examples: its formula, its gradients, what it logs, half precision, numbers in padding.

Those that learn from a teacher's attention are in test_attention_transfer.py; ``ctc_distillation`` is in
../commands/test_audio.py, and every criterion in two processes and with empty batches in ../test_two_processes.py.
"""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss
from fairseq.logging import metrics
from torch import Tensor, nn
from torch.distributions import Normal

from fairseq_plugin.criterions.action_mse import ActionMSECriterion
from fairseq_plugin.criterions.awac import AWACCriterion
from fairseq_plugin.criterions.distillation import DistillationCriterion
from fairseq_plugin.criterions.span_extraction import SpanExtractionCriterion
from fairseq_plugin.criterions.sparse_cross_entropy import SparseCrossEntropyCriterion
from fairseq_plugin.data.episodes import collate
from fairseq_plugin.distill.teacher import Teacher
from tests.compare import assert_all_close, assert_close
from tests.fairseq_plugin.helpers.episodes import ACTION, STATE, build_decision
from tests.fairseq_plugin.helpers.language_models import awake, build_model
from tests.fairseq_plugin.helpers.text import PAD
from tests.fairseq_plugin.helpers.transfer import make_pair, make_sample, make_task

SCALE, LONGEST, CONTEXT = 10.0, 6, 3
ENTROPY_WEIGHT, TEMPERATURE, WEIGHT, DISCOUNT, LAMBDA, MAX_WEIGHT = 0.3, 1.5, 0.3, 0.5, 2.0, 1.2


class Case(NamedTuple):
    """A criterion with a model in float64, two batches of unequal sizes with padding, and the formula."""

    criterion: Any
    model: nn.Module
    samples: list[dict[str, Any]]
    #: (model, sample) -> the sum of the loss in training, the sum that is logged and evaluated, and the sample size.
    literal: Callable[[nn.Module, dict[str, Any]], tuple[Tensor, Tensor, int]]
    #: What fairseq itself logs and returns in evaluation, where it has a criterion for that.
    host: Any = None
    #: Whether losses are logged in bits.
    bits: bool = False
    #: The name of the tensors of a batch that may hold anything in padding.
    free: tuple[str, ...] = ()


# ---- Actions


def windows(*returns_and_firsts: tuple[list[float], int], seed: int = 0) -> dict[str, Any]:
    """A batch of windows of an episode, each with its returns and its first step."""
    generator, made = torch.Generator().manual_seed(seed), []
    for returns, first in returns_and_firsts:
        steps = len(returns)
        states = torch.randn(steps, STATE, generator=generator, dtype=torch.float64)
        actions = torch.rand(steps, ACTION, generator=generator, dtype=torch.float64) * 2 - 1
        scaled = torch.tensor(returns, dtype=torch.float64)[:, None] / SCALE
        timesteps = torch.arange(first, first + steps)
        made.append({"returns": scaled, "states": states, "actions": actions, "timesteps": timesteps})
    net_input = collate(made)
    counts = {"nsentences": len(made), "ntokens": 3 * sum(len(x["timesteps"]) for x in made)}
    return {"net_input": net_input, "target": net_input["actions"], **counts}


#: Within an episode, at its end, and at the end of one that the clock ended; then a smaller batch.
EPISODES = [
    windows(([9.0, 7.0, 4.0], 0), ([5.0, 2.0], 2), ([8.0, 3.0], LONGEST - 2)),
    windows(([4.0], 1), ([6.0, 5.0, 1.0], 2), seed=1),
]


def _actions() -> Case:
    def literal(model: nn.Module, sample: dict[str, Any]) -> tuple[Tensor, Tensor, int]:
        actions, total, count = model(**sample["net_input"]), 0.0, 0
        for row, mask in enumerate(sample["net_input"]["padding_mask"]):
            for step in (~mask).nonzero()[:, 0]:
                total = total + sum((actions[row, step] - sample["target"][row, step]) ** 2)
                count += ACTION
        return total, total.detach(), count

    model = build_decision("linear_decision").double()
    return Case(ActionMSECriterion(make_task("lm")), model, EPISODES, literal, free=("states", "actions", "returns"))


def _critics(context: int | None = CONTEXT) -> Case:
    """The task draws windows of ``CONTEXT`` steps, or whole episodes; the likeliest action stands for a random one."""
    settings = {"cfg": SimpleNamespace(return_scale=SCALE), "description": SimpleNamespace(longest=LONGEST)}
    criterion = AWACCriterion(SimpleNamespace(context=context, **settings), LAMBDA, DISCOUNT, MAX_WEIGHT)
    model = build_decision("awac_decision", decoder_layers=1, decoder_embed_dim=8).double()
    model.sample = lambda states: model.policy(states)

    def literal(model: nn.Module, sample: dict[str, Any]) -> tuple[Tensor, Tensor, int]:
        net_input, losses = sample["net_input"], []
        for row, mask in enumerate(net_input["padding_mask"]):
            steps = int((~mask).sum())
            for i in range(steps):
                s, a = (net_input[name][row, i] for name in ("states", "actions"))
                ended = i == steps - 1 and (context is None or steps < context)
                if i == steps - 1 and (not ended or net_input["timesteps"][row, i] == LONGEST - 1):
                    continue  # no next state: a cut window, or the clock ended the episode
                reward = net_input["returns"][row, i, 0] - (0.0 if ended else net_input["returns"][row, i + 1, 0])
                target = SCALE * reward
                if not ended:
                    later = net_input["states"][row, i + 1]
                    slow = [float(critic(torch.cat([later, model.policy(later)]))) for critic in model.targets]
                    target = target + DISCOUNT * min(slow)
                q = [critic(torch.cat([s, a])).squeeze() for critic in model.critics]
                usual = [float(critic(torch.cat([s, model.policy(s)]))) for critic in model.critics]
                weight = min(MAX_WEIGHT, math.exp((float(min(q)) - min(usual)) / LAMBDA))
                likelihood = Normal(model.policy(s), model.log_std.clamp(-6.0, 0.0).exp()).log_prob(a).sum()
                losses.append(sum((one - target) ** 2 for one in q) - weight * likelihood)
        return sum(losses), sum(losses).detach(), len(losses)

    return Case(criterion, model, EPISODES, literal, free=("states", "actions", "returns"))


# ---- Spans


class Answers:
    """A task whose model gives scores, and whose answers are texts of the batch."""

    cfg = SimpleNamespace(_name="answers")

    def span_scores(self, model: nn.Module, sample: dict[str, Any]) -> Tensor:
        return model(sample["scores"])

    def answer_spans(self, scores: Tensor, sample: dict[str, Any]) -> tuple[list[str], Tensor]:
        return sample["texts"], sample["best"]


class Scaled(nn.Module):
    """Scores of start and end times two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 0.7], dtype=torch.float64))

    def forward(self, scores: Tensor) -> Tensor:
        return scores.to(self.scale.dtype) * self.scale


def questions(numbers: list[int], best: list[float], texts: list[str], tokens: int = 13) -> dict[str, Any]:
    """A batch of windows: no gold span in the first, one in the second, several in others."""
    rows = len(numbers)
    scores = torch.randn(rows, tokens, 2, generator=torch.Generator().manual_seed(tokens), dtype=torch.float64) * 2
    document, starts, ends = (torch.zeros(rows, tokens, dtype=torch.bool) for _ in range(3))
    for row in range(rows):
        document[row, 4 : 7 + row] = True
        gold = [0] if row == 0 else list(range(4, 4 + min(row, 3)))
        starts[row, gold] = ends[row, [place + bool(row) for place in gold]] = True
    gold_texts = {0: ["ada frost"], 1: ["oslo"], 2: ["seven"]}
    marks = {"document": document, "starts": starts, "ends": ends, "question": torch.tensor(numbers)}
    answers = {"best": torch.tensor(best), "texts": texts, "gold": [gold_texts[number] for number in numbers]}
    return {"net_input": {}, "scores": scores, **marks, **answers, "nsentences": rows, "ntokens": rows * tokens}


def _spans() -> Case:
    def literal(model: nn.Module, sample: dict[str, Any]) -> tuple[Tensor, Tensor, int]:
        scores, total = model(sample["scores"]), 0.0
        for row in range(len(scores)):
            places = [0, *sample["document"][row].nonzero()[:, 0].tolist()]
            for side, gold in ((0, sample["starts"]), (1, sample["ends"])):
                weights = {place: torch.exp(scores[row, place, side]) for place in places}
                total = (
                    total - torch.log(sum(w for p, w in weights.items() if gold[row, p]) / sum(weights.values())) / 2
                )
        return total, total.detach(), len(scores)

    samples = [
        questions([0, 1, 2], [3.0, -1.0, 0.5], ["Frost", "Rome", "seven"]),
        questions([0, 1, 1, 2], [2.0, -4.0, -0.5, -1.0], ["Ada Frost", "Oslo", "in Oslo", "six"], tokens=17),
    ]
    return Case(SpanExtractionCriterion(Answers()), Scaled(), samples, literal, bits=True, free=("scores",))


# ---- Cross-entropy with another term


def _cross_entropy(model: nn.Module, sample: dict[str, Any]) -> Tensor:
    logits = model(**sample["net_input"])[0]
    places = sample["target"].ne(PAD).nonzero().tolist()
    return -sum(logits[b, i].log_softmax(0)[sample["target"][b, i]] for b, i in places)


def _entropy(sentence_avg: bool) -> Case:
    """-Σ p log p of p = softmax(γ (r - mean) / std + β), over layers and heads (DAFT, equation 10)."""

    def literal(model: nn.Module, sample: dict[str, Any]) -> tuple[Tensor, Tensor, int]:
        total, state = torch.zeros((), dtype=torch.float64), dict(model.named_parameters())
        for name in [name for name in state if name.endswith("inner.r")]:
            r, gamma, beta = (state[name[:-1] + part] for part in ("r", "gamma", "beta"))
            p = (gamma * (r - r.mean(1, keepdim=True)) / r.std(1, keepdim=True, unbiased=False) + beta).exp()
            p = p / p.sum(1, keepdim=True)
            total = total - (p * torch.log(p)).sum()
        size = len(sample["target"]) if sentence_avg else sample["ntokens"]
        loss = _cross_entropy(model, sample)
        return loss + size * ENTROPY_WEIGHT * total, loss.detach(), size

    task, samples = (
        make_task("lm"),
        [make_sample("lm", batch=2, length=9, right=4), make_sample("lm", batch=1, length=6)],
    )
    model = awake(build_model("daft_conv_lm", "--dropout", "0")).double()
    host = CrossEntropyCriterion(task, sentence_avg)
    return Case(SparseCrossEntropyCriterion(task, sentence_avg, ENTROPY_WEIGHT), model, samples, literal, host, True)


STUDENTS = {"lm": "hedgehog_lm", "mlm": "t2r_mlm", "translation": "hedgehog"}


def _distillation(kind: str, folder: Path, sentence_avg: bool = False) -> Case:
    """(1 - w) · cross-entropy + w · T² · KL of each real target; masked models have masked tokens alone."""
    options = {"lineartime_trained_parameters": "all", "dropout": 0.0, "attention_dropout": 0.0}
    pair = make_pair(folder, kind, STUDENTS[kind], **options)
    teacher = Teacher(pair.path, pair.task, "").model_like(pair.student.double())

    def literal(model: nn.Module, sample: dict[str, Any]) -> tuple[Tensor, Tensor, int]:
        ours, theirs = (one(**sample["net_input"])[0] for one in (model, teacher))
        divergence, places = 0.0, sample["target"].ne(PAD).nonzero().tolist()
        for b, i in places:
            p, q = ((x[b, i] / TEMPERATURE).softmax(0) for x in (theirs.detach(), ours))
            divergence = divergence + (p * (p / q).log()).sum()
        loss = _cross_entropy(model, sample)
        size = len(sample["target"]) if sentence_avg else len(places)
        return (1 - WEIGHT) * loss + WEIGHT * TEMPERATURE**2 * divergence, loss.detach(), size

    criterion = DistillationCriterion(pair.task, pair.path, TEMPERATURE, WEIGHT, sentence_avg, "pytorch_ddp")
    own = MaskedLmLoss(MaskedLmConfig(), pair.task)
    host = own if kind == "mlm" else CrossEntropyCriterion(pair.task, sentence_avg)
    samples = [make_sample(kind, batch=2, length=9, right=4), make_sample(kind, batch=1, length=6, seed=1)]
    return Case(criterion, pair.student, samples, literal, host, True)


BUILD: dict[str, Callable[[Path], Case]] = {
    "action_mse": lambda _: _actions(),
    "awac": lambda _: _critics(),
    "awac, whole episodes": lambda _: _critics(None),
    "span_extraction": lambda _: _spans(),
    "sparse_cross_entropy": lambda _: _entropy(False),
    "sparse_cross_entropy --sentence-avg": lambda _: _entropy(True),
    **{f"distillation of {kind}": lambda folder, kind=kind: _distillation(kind, folder) for kind in STUDENTS},
    "distillation --sentence-avg": lambda folder: _distillation("lm", folder, True),
}


#: Those whose batches hold numbers in padding; tokens there are the symbol for padding.
FREE = ("action_mse", "awac", "awac, whole episodes", "span_extraction")


@pytest.fixture(scope="module", params=BUILD)
def case(request, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return BUILD[request.param](tmp_path_factory.mktemp("criterion"))


def _mode(case: Case, training: bool) -> Case:
    case.model.train(training), case.criterion.train(training)
    return case


def test_loss_gradients_and_size_are_those_of_the_formula(case: Case) -> None:
    """With padding; the parts that ``reduce=False`` gives add up to the loss."""
    learned = {name: x for name, x in _mode(case, True).model.named_parameters() if x.requires_grad}
    for sample in case.samples:
        loss, size, log = case.criterion(case.model, sample)
        expected, logged, count = case.literal(case.model, sample)
        assert size == count == log["sample_size"]
        assert_close("loss", loss, expected)
        assert_close("logged", log["loss"], logged)
        options = {"allow_unused": True, "materialize_grads": True}
        both = (torch.autograd.grad(x / size, learned.values(), **options) for x in (loss, expected))
        assert_all_close(learned, *both, tolerance=1e-5)
        parts, _, _ = case.criterion(case.model, sample, reduce=False)
        assert parts.numel() > 1
        assert_close("sum of parts", parts.sum().detach(), loss.detach())


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_what_is_printed_is_a_mean_over_all_batches(case: Case, training: bool) -> None:
    """Of unequal sizes. Evaluation has no term of a teacher or a regulariser, and is fairseq's where it has one."""
    _mode(case, training)
    logs, sums = [], torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for sample in case.samples:
            loss, size, log = case.criterion(case.model, sample)
            _, logged, _ = case.literal(case.model, sample)
            assert training or loss.item() == pytest.approx(logged.item())
            logs.append(log)
            sums += torch.tensor([logged, size, sample["ntokens"]])
            if case.host is not None:
                theirs, host_size, host_log = case.host(case.model, sample)
                assert size == host_size and theirs.item() == pytest.approx(logged.item())
                assert log.keys() >= host_log.keys()
                assert all(float(log[name]) == pytest.approx(float(x)) for name, x in host_log.items())
    with metrics.aggregate(new_root=True) as printed:
        case.criterion.reduce_metrics(logs)
    values = printed.get_smoothed_values()
    name = "nll_loss" if "nll_loss" in values else "loss"
    mean = float(sums[0] / sums[2 if name == "nll_loss" else 1]) / (math.log(2) if case.bits else 1.0)
    assert values[name] == pytest.approx(mean, abs=2e-3)
    assert not any(name.startswith("_") for name in values)


def test_half_precision(case: Case) -> None:
    """The loss of a model in float16 is float32, and that of float64 but for rounding."""
    _mode(case, True)
    model, sample = copy.deepcopy(case.model).half(), case.samples[0]
    half = {name: x.half() if x.is_floating_point() else x for name, x in sample["net_input"].items()}
    if hasattr(model, "sample"):
        model.sample = lambda states: model.policy(states)
    loss, size, log = case.criterion(model, {**sample, "net_input": half})
    expected, _, _ = case.literal(case.model, sample)
    assert loss.dtype == log["loss"].dtype == torch.float32
    assert_close("loss", (loss / size).detach().double(), (expected / size).detach(), tolerance=0.03)


@pytest.mark.parametrize("case", FREE, indirect=True)
def test_padding_may_hold_anything(case: Case) -> None:
    """Any numbers at steps of padding change no loss and no gradient, bit by bit."""
    _mode(case, True)
    for sample in case.samples:
        changed, mask = {**sample, "net_input": dict(sample["net_input"])}, sample["net_input"].get("padding_mask")
        for name in case.free:
            place = changed["net_input"] if name in changed["net_input"] else changed
            unseen = ~sample["document"] if mask is None else mask
            unseen = unseen & (torch.arange(unseen.shape[1]) > 0)
            place[name] = place[name].masked_fill(unseen[..., None], 7.0)
        results = []
        for one in (sample, changed):
            loss, *_ = case.criterion(case.model, one)
            learned = [x for x in case.model.parameters() if x.requires_grad]
            results.append([loss, *torch.autograd.grad(loss, learned, allow_unused=True, materialize_grads=True)])
        assert all(map(torch.equal, *results))


# ---- What is special


def test_a_question_is_answered_by_the_best_of_its_windows() -> None:
    """Windows in several batches and of several workers; in training there is the loss alone."""
    case = _mode(_spans(), False)
    logs = [case.criterion(case.model, sample)[2] for sample in case.samples]
    with metrics.aggregate(new_root=True) as printed:
        case.criterion.reduce_metrics(logs)
    values = printed.get_smoothed_values()
    assert values["em"] == pytest.approx(100 * 1 / 3, abs=0.01)  # seven
    assert values["f1"] == pytest.approx(100 * (2 / 3 + 2 / 3 + 1) / 3, abs=0.01)  # Frost, in Oslo, seven
    _mode(case, True)
    assert case.criterion.logging_outputs_can_be_summed()
    log = case.criterion(case.model, case.samples[0])[2]
    assert set(log) == {"loss", "sample_size", "nsentences", "ntokens"}


def test_large_scores_are_finite() -> None:
    """At which exp overflows in float32."""
    case = _mode(_spans(), True)
    sample = {**case.samples[0], "scores": case.samples[0]["scores"] * 500}
    loss, *_ = case.criterion(case.model.float(), sample)
    assert torch.isfinite(loss) and all(torch.isfinite(x).all() for x in torch.autograd.grad(loss, [case.model.scale]))


@pytest.mark.parametrize("gpus", [True, False])
def test_several_workers_validate_spans_on_gpus_alone(gpus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """fairseq gathers what cannot be summed in a buffer on a GPU."""
    criterion = SpanExtractionCriterion(Answers()).eval()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    if gpus:
        assert not criterion.logging_outputs_can_be_summed()
        return
    with pytest.raises(ValueError, match="several workers without a GPU; allowed.*--disable-validation"):
        criterion.logging_outputs_can_be_summed()


def test_awac_prefers_the_action_that_paid_off() -> None:
    """One step, two actions in one state, of which one has a reward: the policy goes to it, a clone to their mean."""
    torch.manual_seed(1)
    model = build_decision("awac_decision", decoder_layers=1, decoder_embed_dim=16).train()
    optimizer = torch.optim.Adam([x for x in model.parameters() if x.requires_grad], lr=0.01)
    good = torch.arange(32) % 2 == 0
    actions = torch.where(good, 0.8, -0.8)[:, None, None].expand(32, 1, ACTION)
    returns = torch.where(good, 3.0, 0.0)[:, None, None] / SCALE
    batch = {"returns": returns, "states": torch.zeros(32, 1, STATE), "actions": actions}
    batch |= {"timesteps": torch.zeros(32, 1, dtype=torch.long), "padding_mask": torch.zeros(32, 1, dtype=torch.bool)}
    settings = {"cfg": SimpleNamespace(return_scale=SCALE), "description": SimpleNamespace(longest=LONGEST)}
    criterion = AWACCriterion(SimpleNamespace(context=None, **settings), 0.5, 0.5, 100.0)
    for update in range(150):
        model.set_num_updates(update)
        loss, size, _ = criterion(model, {"net_input": batch, "target": actions, "nsentences": 32, "ntokens": 96})
        optimizer.zero_grad()
        (loss / size).backward()
        optimizer.step()
    assert model(**batch).min() > 0.5


# ---- What is refused

_DISTILLED = (TEMPERATURE, WEIGHT, False, "pytorch_ddp")


def _awac(*options: float, context: int | None = CONTEXT) -> AWACCriterion:
    return AWACCriterion(SimpleNamespace(context=context), *options)


REFUSED = {
    "--awac-lambda is 0.0": lambda: _awac(0.0, 0.5, 1.0),
    "--awac-max-weight is inf": lambda: _awac(1.0, 0.5, math.inf),
    "--awac-discount is 1.5": lambda: _awac(1.0, 1.5, 1.0),
    "--context is 1": lambda: _awac(1.0, 0.5, 1.0, context=1),
    "--task is masked_lm; allowed with --criterion span_extraction": lambda: SpanExtractionCriterion(
        SimpleNamespace(cfg=SimpleNamespace(_name="masked_lm"))
    ),
    **{
        f"--entropy-weight is {weight}": lambda weight=weight: SparseCrossEntropyCriterion(
            make_task("lm"), False, weight
        )
        for weight in (-1.0, math.nan, math.inf)
    },
    "model is a .* without DAFT-conv": lambda: SparseCrossEntropyCriterion(make_task("lm"), False, 1.0)(
        build_model("daft_full_lm"), make_sample("lm")
    ),
    "--teacher is not given": lambda: DistillationCriterion(make_task("lm"), None, *_DISTILLED),
    "--teacher is 'gone.pt', which is no file": lambda: DistillationCriterion(
        make_task("lm"), "gone.pt", *_DISTILLED
    ).train(),
    "--distillation-temperature is 0.0": lambda: DistillationCriterion(make_task("lm"), "x", 0.0, 0.5, False, ""),
    "--distillation-weight is 1.1": lambda: DistillationCriterion(make_task("lm"), "x", 1.0, 1.1, False, ""),
    "--ddp-backend is fully_sharded": lambda: DistillationCriterion(
        make_task("lm"), "x", 1.0, 0.5, False, "fully_sharded"
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        REFUSED[said]()
    assert "allowed" in str(caught.value)


def test_adaptive_softmax_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    adaptive = ("--criterion", "adaptive_loss", "--adaptive-softmax-cutoff", "20,40")
    pair = make_pair(tmp_path, "lm", "hedgehog_lm", adaptive, lineartime_trained_parameters="all")
    with pytest.raises(ValueError, match="--adaptive-softmax-cutoff is given, .*; allowed with --criterion dist"):
        pair.trainer(pair.distillation(), tmp_path / "checkpoints").train_step([make_sample("lm")])
    assert not list((tmp_path / "checkpoints").iterdir())
