"""Every criterion on worked examples: its formula, its gradients, what it logs, half precision, numbers in padding.

``ctc_distillation`` is in ../commands/test_audio.py; every criterion in two processes, with empty batches, and options
that are refused are in ../tasks/test_every_task.py.
"""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss
from fairseq.logging import metrics
from fairseq.tasks.audio_pretraining import AudioPretrainingConfig, AudioPretrainingTask
from torch import Tensor, nn
from torch.distributions import Normal

from fairseq_plugin.criterions.action_mse import ActionMSECriterion
from fairseq_plugin.criterions.awac import AWACCriterion
from fairseq_plugin.criterions.distillation import DistillationCriterion
from fairseq_plugin.criterions.span_extraction import SpanExtractionCriterion
from fairseq_plugin.criterions.sparse_cross_entropy import SparseCrossEntropyCriterion
from fairseq_plugin.data.episodes import collate
from fairseq_plugin.distill.teacher import Teacher
from fairseq_plugin.modules.converted import converted_attentions
from tests.compare import assert_all_close, assert_close
from tests.fairseq_plugin.helpers.episodes import ACTION, STATE
from tests.fairseq_plugin.helpers.kinds import build, shown
from tests.fairseq_plugin.helpers.language_models import awake, build_model
from tests.fairseq_plugin.helpers.text import PAD
from tests.fairseq_plugin.helpers.transfer import Pair, make_pair, make_sample, make_task, save_teacher

pytestmark = pytest.mark.usefixtures("plain_pytorch")
SCALE, LONGEST, CONTEXT = 10.0, 6, 3
ENTROPY_WEIGHT, TEMPERATURE, WEIGHT, DISCOUNT, LAMBDA, MAX_WEIGHT = 0.3, 1.5, 0.3, 0.5, 2.0, 1.2
Sample = dict[str, Any]
#: (model, sample) -> the sum of the loss in training, the sum that is logged and evaluated, and the sample size.
Literal = Callable[[nn.Module, Sample], tuple[Tensor, Tensor, float]]


class Case(NamedTuple):
    """A criterion with a model in float64, two batches of unequal sizes with padding, and the formula."""

    criterion: Any
    model: nn.Module
    samples: list[Sample]
    literal: Literal
    #: What fairseq itself logs and returns in evaluation, where it has a criterion for that.
    host: Any = None
    #: Whether losses are logged in bits.
    bits: bool = False
    #: The names of the tensors of a batch that may hold anything in padding.
    free: tuple[str, ...] = ()


# ---- Actions


def windows(*returns_and_firsts: tuple[list[float], int], seed: int = 0) -> Sample:
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
    def literal(model: nn.Module, sample: Sample) -> tuple[Tensor, Tensor, int]:
        actions, total, count = model(**sample["net_input"]), 0.0, 0
        for row, mask in enumerate(sample["net_input"]["padding_mask"]):
            for step in (~mask).nonzero()[:, 0]:
                total = total + sum((actions[row, step] - sample["target"][row, step]) ** 2)
                count += ACTION
        return total, total.detach(), count

    model = shown("linear_decision")
    return Case(ActionMSECriterion(make_task("lm")), model, EPISODES, literal, free=("states", "actions", "returns"))


def _critics(context: int | None = CONTEXT) -> Case:
    """The task draws windows of ``CONTEXT`` steps, or whole episodes; the likeliest action stands for a random one."""
    settings = {"cfg": SimpleNamespace(return_scale=SCALE), "description": SimpleNamespace(longest=LONGEST)}
    criterion = AWACCriterion(SimpleNamespace(context=context, **settings), LAMBDA, DISCOUNT, MAX_WEIGHT)
    model = shown("awac_decision", "--decoder-layers", "1")
    model.sample = lambda states: model.policy(states)

    def literal(model: nn.Module, sample: Sample) -> tuple[Tensor, Tensor, int]:
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

    def span_scores(self, model: nn.Module, sample: Sample) -> Tensor:
        return model(sample["scores"])

    def answer_spans(self, scores: Tensor, sample: Sample) -> tuple[list[str], Tensor]:
        return sample["texts"], sample["best"]


class Scaled(nn.Module):
    """Scores of start and end times two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 0.7], dtype=torch.float64))

    def forward(self, scores: Tensor) -> Tensor:
        return scores.to(self.scale.dtype) * self.scale


def questions(numbers: list[int], best: list[float], texts: list[str], tokens: int = 13) -> Sample:
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
    def literal(model: nn.Module, sample: Sample) -> tuple[Tensor, Tensor, int]:
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


def make_samples(kind: str, left: int = 0) -> list[Sample]:
    return [
        make_sample(kind, batch=2, length=9, left=left, right=4),
        make_sample(kind, batch=1, length=6, left=left, seed=1),
    ]


def _cross_entropy(model: nn.Module, sample: Sample) -> Tensor:
    logits = model(**sample["net_input"])[0]
    places = sample["target"].ne(PAD).nonzero().tolist()
    return -sum(logits[b, i].log_softmax(0)[sample["target"][b, i]] for b, i in places)


def _entropy(sentence_avg: bool) -> Case:
    """-Σ p log p of p = softmax(γ (r - mean) / std + β), over layers and heads (DAFT, equation 10)."""

    def literal(model: nn.Module, sample: Sample) -> tuple[Tensor, Tensor, int]:
        total, state = torch.zeros((), dtype=torch.float64), dict(model.named_parameters())
        for name in [name for name in state if name.endswith("inner.r")]:
            r, gamma, beta = (state[name[:-1] + part] for part in ("r", "gamma", "beta"))
            p = (gamma * (r - r.mean(1, keepdim=True)) / r.std(1, keepdim=True, unbiased=False) + beta).exp()
            p = p / p.sum(1, keepdim=True)
            total = total - (p * torch.log(p)).sum()
        size = len(sample["target"]) if sentence_avg else sample["ntokens"]
        loss = _cross_entropy(model, sample)
        return loss + size * ENTROPY_WEIGHT * total, loss.detach(), size

    task, samples = make_task("lm"), make_samples("lm")
    model = awake(build_model("daft_conv_lm", "--dropout", "0")).double()
    host = CrossEntropyCriterion(task, sentence_avg)
    return Case(SparseCrossEntropyCriterion(task, sentence_avg, ENTROPY_WEIGHT), model, samples, literal, host, True)


STUDENTS = {"lm": "hedgehog_lm", "mlm": "t2r_mlm", "translation": "hedgehog"}


def _distillation(kind: str, folder: Path, sentence_avg: bool = False) -> Case:
    """(1 - w) · cross-entropy + w · T² · KL of each real target; masked models have masked tokens alone."""
    options = {"lineartime_trained_parameters": "all", "dropout": 0.0, "attention_dropout": 0.0}
    if kind == "translation":  # fairseq's own attention would be in float32
        options["lineartime_cross_attention"] = "t2r"
    pair = make_pair(folder, kind, STUDENTS[kind], **options)
    teacher = Teacher(pair.path, pair.task, "").model_like(pair.student.double())

    def literal(model: nn.Module, sample: Sample) -> tuple[Tensor, Tensor, int]:
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
    return Case(criterion, pair.student, make_samples(kind), literal, host, True)


# ---- Attention transfer

#: Kind of model, student, its options, and what is compared.
TRANSFERS = {
    "language model": ("lm", "hedgehog_lm", {}, "outputs"),
    "stack of several": ("lm", "hybrid_lm", {"lineartime_layers": "hedgehog,softmax,t2r"}, "weights"),
    "masked model": ("mlm", "hedgehog_mlm", {}, "weights"),
    "encoder-decoder": ("translation", "hedgehog", {"lineartime_cross_attention": "t2r"}, "outputs"),
}


def features(inner: nn.Module, x: Tensor, side: str, head: int) -> Tensor:
    """Of queries or keys (T, d) of a head."""
    if inner.name == "t2r":
        scale = 1 / math.sqrt(x.shape[1]) if side == "query" else 1.0
        return torch.relu(x * scale @ inner.map_weight[head].T + inner.map_bias[head])
    mapped = x @ getattr(inner, f"{side}_weight")[head].T + getattr(inner, f"{side}_bias")[head]
    return torch.cat([mapped.softmax(-1), (-mapped).softmax(-1)], -1)


def imitated(student: nn.Module, teacher: nn.Module, x: Tensor, source: Tensor, real: Any, causal: bool, loss: str):
    """The sum over the real queries of one attention; x (T, B, C), source (S, B, C), real = masks of both."""
    total, inner = torch.zeros((), dtype=torch.float64), student.inner
    for b in range(x.shape[1]):
        seen = real[0][b, :, None] & real[1][b]
        seen = seen.tril() if causal else seen
        projected = student.q_proj(x[:, b]), student.k_proj(source[:, b]), student.v_proj(source[:, b])
        projected = [*projected, teacher.q_proj(x[:, b])]
        for head in range(student.num_heads):
            q, k, v, asked = (one.unflatten(-1, (student.num_heads, -1))[:, head] for one in projected)
            softmax = (asked @ k.T / math.sqrt(q.shape[-1])).masked_fill(~seen, -1e9).softmax(-1)
            weights = features(inner, q, "query", head) @ features(inner, k, "key", head).T * seen
            summed = weights.sum(-1, keepdim=True)
            weights = weights / (summed.clamp(min=1e-2) if inner.name == "t2r" else summed + 1e-6)
            if loss == "outputs":
                difference = ((weights - softmax) @ v)[real[0][b]]
                total = total + 1000 * difference.square().sum() / (student.num_heads * v.shape[-1])
            else:
                p, q = softmax[seen], weights[seen].clamp(min=1e-6)
                total = total + (p * (p / q).log()).sum() / student.num_heads
    return total, int(real[0].sum())


def _transfer(folder: Path, kind: str, arch: str, options: dict[str, str], loss: str) -> Case:
    """The mean over attentions and real queries, of the inputs that the teacher's own layers give."""
    pair = make_pair(folder, kind, arch, **options)
    pair.student.double()
    torch.manual_seed(6)
    for parameter in pair.student.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.5)
    teacher, inputs = Teacher(pair.path, pair.task, "").model_like(pair.student), {}
    for name, module in teacher.named_modules():
        if name.endswith("_attn"):
            module.register_forward_pre_hook(
                lambda _, args, given, name=name: inputs.update({name: (given["query"], given["key"])}),
                with_kwargs=True,
            )

    def literal(model: nn.Module, sample: Sample) -> tuple[Tensor, Tensor, float]:
        with torch.no_grad():
            teacher(**sample["net_input"])
        own = sample["net_input"].get("prev_output_tokens", sample["net_input"]["src_tokens"]).ne(PAD)
        long, found = sample["net_input"]["src_tokens"].ne(PAD), []
        for name, attention in converted_attentions(model).items():
            real = (long, long) if name.startswith("encoder") else (own, long if "encoder_attn" in name else own)
            causal = name.startswith("decoder") and "encoder_attn" not in name
            found.append(imitated(attention, teacher.get_submodule(name), *inputs[name], real, causal, loss))
        total, queries = (sum(x) / len(found) for x in zip(*found))
        return total, total.detach(), queries

    samples = make_samples(kind, left=0 if kind == "translation" or "hybrid" in arch else 2)
    return Case(pair.transfer(loss), pair.student, samples, literal)


BUILD: dict[str, Callable[[Path], Case]] = {
    "action_mse": lambda _: _actions(),
    "awac": lambda _: _critics(),
    "awac, whole episodes": lambda _: _critics(None),
    "span_extraction": lambda _: _spans(),
    "sparse_cross_entropy": lambda _: _entropy(False),
    "sparse_cross_entropy --sentence-avg": lambda _: _entropy(True),
    **{f"distillation of {kind}": lambda folder, kind=kind: _distillation(kind, folder) for kind in STUDENTS},
    "distillation --sentence-avg": lambda folder: _distillation("lm", folder, True),
    **{f"transfer of a {name}": lambda folder, case=case: _transfer(folder, *case) for name, case in TRANSFERS.items()},
}


@pytest.fixture(scope="module", params=BUILD)
def case(request, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return BUILD[request.param](tmp_path_factory.mktemp("criterion"))


def _mode(case: Case, training: bool) -> Case:
    case.model.train(training), case.criterion.train(training)
    return case


def refilled(case: Case, sample: Sample) -> Sample:
    """``sample`` with other numbers in padding; tokens there are the symbol for padding."""
    changed, mask = {**sample, "net_input": dict(sample["net_input"])}, sample["net_input"].get("padding_mask")
    for name in case.free:
        place = changed["net_input"] if name in changed["net_input"] else changed
        unseen = (~sample["document"] if mask is None else mask)[..., None]
        place[name] = torch.cat([place[name][:, :1], place[name].masked_fill(unseen, 7.0)[:, 1:]], 1)
    return changed


def test_loss_gradients_and_size_are_those_of_the_formula(case: Case) -> None:
    """With padding, which may hold anything; the parts that ``reduce=False`` gives add up to the loss."""
    learned = {name: x for name, x in _mode(case, True).model.named_parameters() if x.requires_grad}
    options = {"allow_unused": True, "materialize_grads": True}
    for sample in case.samples:
        loss, size, log = case.criterion(case.model, sample)
        expected, logged, count = case.literal(case.model, sample)
        assert size == count == log["sample_size"]
        assert_close("loss", loss, expected)
        assert_close("logged", log["loss"], logged)
        both = [torch.autograd.grad(x / size, learned.values(), **options) for x in (loss, expected)]
        assert_all_close(learned, *both, tolerance=1e-5)
        again, _, _ = case.criterion(case.model, refilled(case, sample))
        assert torch.equal(again, loss), "numbers in padding"
        assert all(map(torch.equal, torch.autograd.grad(again / size, learned.values(), **options), both[0]))
        parts, _, _ = case.criterion(case.model, sample, reduce=False)
        assert parts.numel() > 1
        assert_close("sum of parts", parts.sum().detach(), loss.detach())
        if of_layers := [x for name, x in log.items() if name.endswith("_sum") and "teacher" not in name]:
            assert_close("sum of groups of layers", sum(of_layers) / parts.numel(), loss.detach())


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
    for group in (name.removesuffix("_sum") for name in logs[0] if name.endswith("_sum") and "teacher" not in name):
        total, count = (sum(float(log[f"{group}_{part}"]) for log in logs) for part in ("sum", "queries"))
        assert values[group] == pytest.approx(total / count, rel=1e-3)


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


# ---- What is special to attention transfer


@pytest.fixture(scope="module")
def hedgehog(tmp_path_factory) -> Pair:
    """A language model whose feature maps alone learn; what changes it takes a copy of the student."""
    return make_pair(tmp_path_factory.mktemp("hedgehog"), "lm", "hedgehog_lm")


def test_queries_of_targets_alone_count(tmp_path: Path) -> None:
    """With ``--cross-self-attention``, where self-attention reads the source in front of the target."""
    pair = make_pair(tmp_path, "translation", "hedgehog", ("--cross-self-attention", "--no-cross-attention"))
    criterion, sample, sums = pair.transfer(), make_sample("translation"), []
    for word in (5, 6):
        sample["net_input"]["prev_output_tokens"][:, -1] = word
        logged = criterion(pair.student, sample)[2]
        sums.append(float(logged["decoder_0_sum"]))
        assert logged["decoder_0_queries"] == sample["net_input"]["prev_output_tokens"].numel()
    assert sums[0] != sums[1]


def test_the_target_stays_the_teachers_and_all_else_as_it_was(tmp_path: Path) -> None:
    """Where projections learn as well, they are the student's alone; an update changes nothing that was not chosen."""
    pair = make_pair(tmp_path, "lm", "lolcats_lm", lolcats_window=32, lineartime_trained_parameters="attention")
    criterion, sample = pair.transfer(), make_sample("lm")
    for name in ("q_proj", "k_proj", "v_proj"):
        student = copy.deepcopy(pair.student)
        with torch.no_grad():
            getattr(student.decoder.layers[1].self_attn, name).weight.mul_(1.5)
        _, _, logged = criterion(student, sample)
        assert logged["decoder_1_sum"] / logged["decoder_1_queries"] > 1.0
        assert logged["decoder_0_sum"] < 1e-3
    criterion = pair.transfer(window_dropout=1.0)
    before = {name: x.clone() for name, x in pair.student.state_dict().items()}
    learned = {name for name, x in pair.student.named_parameters() if x.requires_grad}
    projections = [f"{x}_proj.{y}" for x in "qkv" for y in ("weight", "bias")]
    assert learned >= {f"decoder.layers.{i}.self_attn.{part}" for i in range(3) for part in projections}
    optimizer = torch.optim.Adam([x for x in pair.student.parameters() if x.requires_grad], 2e-2)
    total, size, _ = criterion(pair.student, sample)
    (total / size).backward()
    optimizer.step()
    changed = {name for name, x in pair.student.state_dict().items() if not torch.equal(before[name], x)}
    assert changed and changed <= learned
    own = criterion.teacher.read().decoder.layers[0].self_attn.q_proj.weight
    assert torch.equal(own, before["decoder.layers.0.self_attn.q_proj.weight"])


def test_reading_the_teacher_draws_nothing_and_takes_no_memory(hedgehog: Pair) -> None:
    """What is random in a training does not depend on when the teacher is read; it shares what does not learn."""
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    criterion = hedgehog.transfer().train()
    assert torch.equal(torch.rand(3), expected)
    criterion(hedgehog.student, make_sample("lm"))
    ours, theirs = (x.decoder.layers[0].fc1.weight for x in (hedgehog.student, criterion.teacher.read()))
    assert ours.data_ptr() == theirs.data_ptr()


def test_the_linear_part_may_be_alone(tmp_path: Path) -> None:
    """With a window of everything the whole has nothing to learn, its linear part has; evaluation is of the whole."""
    pair = make_pair(tmp_path, "lm", "lolcats_lm", lolcats_window=32)
    sample, criterion = make_sample("lm"), pair.transfer(window_dropout=1.0)
    total, size, _ = criterion(pair.student, sample)
    total.backward()
    inner = pair.student.decoder.layers[0].self_attn.inner
    assert total / size > 1.0 and inner.key_weight.grad.abs().sum() > 0 and inner.window_gate.grad.abs().sum() == 0
    drawn, half = set(), pair.transfer(window_dropout=0.5)
    for seed in range(8):
        torch.manual_seed(seed)
        drawn.add(bool(half(pair.student, sample)[0] / size > 1.0))
    assert drawn == {False, True}
    pair.student.eval()
    for loss in ("outputs", "weights"):
        assert pair.transfer(loss, window_dropout=1.0)(pair.student, make_sample("lm", right=3))[0] / size < 1e-5


def test_new_parameters_alone_learn_unless_asked_for() -> None:
    model = build("hedgehog_lm", "--criterion", "attention_transfer", "--teacher", "x.pt")
    places = [f"decoder.layers.{i}.self_attn.inner" for i in range(2)]
    wanted = {f"{x}.{side}_{part}" for x in places for side in ("query", "key") for part in ("weight", "bias")}
    assert {name for name, x in model.named_parameters() if x.requires_grad} == wanted


def test_each_document_of_a_row_is_by_itself(tmp_path: Path) -> None:
    """Of a teacher that separates them: the loss of a row is the sum over its documents, each alone."""
    path, task = tmp_path / "teacher.pt", make_task("lm")
    save_teacher(path, "lm", "--arch", "softmax_lm", "--lineartime-reset-at-eos")
    overrides = {"model": {"_name": "linear_lm", "lineartime_trained_parameters": "attention"}}
    (student,), *_ = load_model_ensemble_and_task([str(path)], overrides, task)
    pair = Pair("lm", task, str(path), student.train())
    eos, criterion = task.dictionary.eos(), pair.transfer()
    documents = [[eos, 7, 8, 9], [eos, 10, 11, 12, 13, 14]]
    together, *alone = (
        criterion(pair.student, {**make_sample("lm"), "net_input": {"src_tokens": torch.tensor([row])}})[0].detach()
        for row in (sum(documents, []), *documents)
    )
    assert_close("loss", together, sum(alone))


# ---- What is refused


def test_models_and_tasks_of_other_criteria_are_refused() -> None:
    with pytest.raises(ValueError, match="model is a .* without DAFT-conv.*allowed"):
        SparseCrossEntropyCriterion(make_task("lm"), False, 1.0)(build("daft_full_lm"), make_sample("lm"))
    task = AudioPretrainingTask(AudioPretrainingConfig())
    with pytest.raises(ValueError, match="--criterion is distillation; allowed for models of audio: attention_tran"):
        DistillationCriterion(task, "x.pt", 1.5, 0.3, False, "")


def _changed(pair: Pair, _: Path) -> Pair:
    with torch.no_grad():
        pair.student.decoder.layers[1].fc2.bias[3] += 1
    return pair


def _taught(write: Callable[[Path], Any]) -> Callable[[Pair, Path], Pair]:
    """The pair with another teacher."""

    def make(pair: Pair, folder: Path) -> Pair:
        write(folder / "other.pt")
        return pair._replace(path=str(folder / "other.pt"))

    return make


OF_TASK, OTHER = "allowed with --task .*: 'transformer_lm'", "is not the model that the student begins with: .*"
#: What the error says of pairs that do not fit, how they are made of ``hedgehog`` and a folder, and further options.
PAIRS: dict[str, tuple[Callable[[Pair, Path], Pair], dict[str, Any]]] = {
    "cannot be read": (_taught(lambda path: path.write_text("hello")), {}),
    f"holds 'roberta'; {OF_TASK}": (_taught(lambda path: save_teacher(path, "mlm")), {}),
    "a dictionary of 54 symbols, and the data has 64": (_taught(lambda path: save_teacher(path, "lm", words=50)), {}),
    **{
        OTHER + said: (_taught(lambda path, words=words: save_teacher(path, "lm", *words.split())), {})
        for words, said in {
            "--decoder-layers 4": "in one of the two alone .decoder.layers.3",
            "--decoder-ffn-embed-dim 24": "of other shapes .decoder.layers.0.fc1",
            "--decoder-attention-heads 4": "decoder.layers.0.self_attn.num_heads is 4, and 2 in the student",
            "--activation-fn gelu": "decoder.layers.0.activation_fn is gelu, and relu in the student",
        }.items()
    },
    "1 parameters are of other values .decoder.layers.1.fc2.bias": (_changed, {}),
    "3 attentions are no softmax attention there .decoder.layers.0.self_attn": (
        lambda pair, _: pair._replace(path=str(Path(pair.path).with_name("start.pt"))),
        {},
    ),
    "--lineartime-trained-parameters is all; allowed with --criterion attention_transfer": (
        lambda pair, _: pair._replace(student=pair.student.requires_grad_(True)),
        {},
    ),
    "--transfer-loss is weights and decoder.layers.0.self_attn is flow attention": (
        lambda _, folder: make_pair(folder, "lm", "flowformer_lm", lineartime_trained_parameters="attention"),
        {"loss": "weights"},
    ),
    "--transfer-window-dropout is 0.5; allowed .*without lolcats attention: 0": (
        lambda pair, _: pair,
        {"window_dropout": 0.5},
    ),
    "--lineartime-reset-at-eos is given; allowed with --teacher .*: as the teacher has it": (
        lambda _, folder: make_pair(folder, "lm", "hedgehog_lm", lineartime_reset_at_eos=True),
        {},
    ),
}


@pytest.mark.parametrize("said", PAIRS)
def test_pairs_that_do_not_fit(said: str, hedgehog: Pair, tmp_path: Path) -> None:
    """No file is left; fairseq's trainer writes crash.pt for faults in the middle of a training, and this is none."""
    make, options = PAIRS[said]
    pair = make(hedgehog._replace(student=copy.deepcopy(hedgehog.student)), tmp_path)
    with pytest.raises(ValueError, match=said):
        pair.trainer(pair.transfer(**options), tmp_path / "checkpoints").train_step([make_sample("lm")])
    assert not list((tmp_path / "checkpoints").iterdir())


def test_adaptive_softmax_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    adaptive = ("--criterion", "adaptive_loss", "--adaptive-softmax-cutoff", "20,40")
    pair = make_pair(tmp_path, "lm", "hedgehog_lm", adaptive, lineartime_trained_parameters="all")
    with pytest.raises(ValueError, match="--adaptive-softmax-cutoff is given, .*; allowed with --criterion dist"):
        pair.trainer(pair.distillation(), tmp_path / "checkpoints").train_step([make_sample("lm")])
    assert not list((tmp_path / "checkpoints").iterdir())
