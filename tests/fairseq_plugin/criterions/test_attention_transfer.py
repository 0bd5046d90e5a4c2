"""``--criterion attention_transfer``: its loss literally, what learns and what does not, and what is refused."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.logging import metrics
from fairseq.tasks.audio_pretraining import AudioPretrainingConfig, AudioPretrainingTask
from torch import Tensor, nn

from fairseq_plugin.criterions.attention_transfer import AttentionTransferCriterion
from fairseq_plugin.criterions.distillation import DistillationCriterion
from fairseq_plugin.distill.teacher import Teacher
from fairseq_plugin.modules.converted import converted_attentions
from fairseq_plugin.tasks.streaming_language_modeling import StreamingLanguageModelingTask
from tests.compare import assert_all_close, assert_close
from tests.fairseq_plugin.helpers.language_models import build_model
from tests.fairseq_plugin.helpers.text import PAD
from tests.fairseq_plugin.helpers.transfer import Pair, make_pair, make_sample, make_task, save_teacher

#: Kind of model, student, its options, and padding on the left and on the right.
CASES = {
    "language model": ("lm", "hedgehog_lm", {}, 2, 3),
    "stack of several": ("lm", "hybrid_lm", {"lineartime_layers": "hedgehog,softmax,t2r"}, 0, 4),
    "masked model": ("mlm", "hedgehog_mlm", {}, 2, 3),
    "encoder-decoder": ("translation", "hedgehog", {"lineartime_cross_attention": "t2r"}, 2, 0),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory) -> tuple[Pair, dict]:
    """A pair in float64, whose new parameters are not as they were at first, and a sample."""
    kind, arch, options, left, right = CASES[request.param]
    pair = make_pair(tmp_path_factory.mktemp("pair"), kind, arch, **options)
    torch.manual_seed(6)
    pair.student.double()
    for parameter in pair.student.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.5)
    return pair, make_sample(kind, batch=2, length=9, left=left, right=right)


@pytest.fixture(scope="module")
def hedgehog(tmp_path_factory) -> Pair:
    """A language model whose feature maps alone learn; what changes it takes a copy of the student."""
    return make_pair(tmp_path_factory.mktemp("hedgehog"), "lm", "hedgehog_lm")


def _features(inner: nn.Module, x: Tensor, side: str) -> Tensor:
    """Of one query or key (d,) of head ``h``: (f,), for each head."""
    if inner.name == "t2r":
        scale = 1 / math.sqrt(x.shape[1]) if side == "query" else 1.0
        return torch.stack(
            [torch.relu(inner.map_weight[h] @ (x[h] * scale) + inner.map_bias[h]) for h in range(len(x))]
        )
    weight, bias = getattr(inner, f"{side}_weight"), getattr(inner, f"{side}_bias")
    mapped = [weight[h] @ x[h] + bias[h] for h in range(len(x))]
    return torch.stack([torch.cat([torch.softmax(u, 0), torch.softmax(-u, 0)]) for u in mapped])


def _literal(student: nn.Module, teacher: nn.Module, inputs: Tensor, source: Tensor, real, causal: bool, loss: str):
    """The sum over the real queries of one attention; inputs (T, B, C), source (S, B, C), real = masks of both."""
    heads, total, count = student.num_heads, torch.zeros((), dtype=torch.float64), 0
    split = lambda project, x: project(x).unflatten(-1, (heads, -1))  # noqa: E731  (H, d)
    for b in range(inputs.shape[1]):
        keys = [j for j in range(len(source)) if real[1][b, j]]
        for i in range(len(inputs)):
            if not real[0][b, i]:
                continue
            seen = [j for j in keys if not causal or j <= i]
            q = split(student.q_proj, inputs[i, b])
            k = [split(student.k_proj, source[j, b]) for j in seen]
            v = [split(student.v_proj, source[j, b]) for j in seen]
            scores = torch.stack([(split(teacher.q_proj, inputs[i, b]) * x).sum(-1) for x in k])  # (S, H)
            softmax = torch.softmax(scores / math.sqrt(q.shape[-1]), 0)
            queries = _features(student.inner, q, "query")
            weights = torch.stack([(queries * _features(student.inner, x, "key")).sum(-1) for x in k])
            summed = weights.sum(0)
            weights = weights / (summed.clamp(min=1e-2) if student.inner.name == "t2r" else summed + 1e-6)
            for h in range(heads):
                if loss == "outputs":
                    difference = sum((weights[j, h] - softmax[j, h]) * v[j][h] for j in range(len(seen)))
                    total = total + 1000 * (difference**2).sum() / (heads * len(difference))
                else:
                    terms = (
                        softmax[j, h] * torch.log(softmax[j, h] / weights[j, h].clamp(min=1e-6))
                        for j in range(len(seen))
                    )
                    total = total + sum(terms) / heads
            count += 1
    return total, count


def _literal_loss(pair: Pair, sample: dict, loss: str) -> Tensor:
    """The mean over attentions and real queries, of the inputs that the teacher's own layers give."""
    teacher = Teacher(pair.path, pair.task, "").model_like(pair.student)
    inputs: dict[str, tuple] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda module, args, given, name=name: inputs.update({name: (given["query"], given["key"])}),
            with_kwargs=True,
        )
        for name, module in teacher.named_modules()
        if name.endswith("_attn")
    ]
    with torch.no_grad():
        teacher(**sample["net_input"])
    for hook in hooks:
        hook.remove()
    own = sample["net_input"].get("prev_output_tokens", sample["net_input"]["src_tokens"]).ne(PAD)
    long = sample["net_input"]["src_tokens"].ne(PAD)
    totals, queries = [], 0
    for name, attention in converted_attentions(pair.student).items():
        real = (long, long) if name.startswith("encoder") else (own, long if "encoder_attn" in name else own)
        causal = name.startswith("decoder") and "encoder_attn" not in name
        total, count = _literal(attention, teacher.get_submodule(name), *inputs[name], real, causal, loss)
        totals.append(total)
        queries += count
    return sum(totals) / queries


@pytest.mark.parametrize("loss", ["outputs", "weights"])
def test_loss_and_gradients_are_the_literal_ones(case, loss: str) -> None:
    """Of the new parameters of every attention, with padding on either side and an odd length; and what is printed."""
    pair, sample = case
    learned = {name: x for name, x in pair.student.named_parameters() if x.requires_grad}
    assert learned and all(".inner." in name for name in learned)
    criterion = pair.transfer(loss)
    total, sample_size, logged = criterion(pair.student, sample)
    expected = _literal_loss(pair, sample, loss)
    assert_close("loss", total / sample_size, expected)
    actual = torch.autograd.grad(total / sample_size, learned.values())
    assert_all_close(learned, actual, torch.autograd.grad(expected, learned.values()), tolerance=1e-7)
    parts, _, _ = criterion(pair.student, sample, reduce=False)
    assert len(parts) == len(converted_attentions(pair.student))
    assert_close("sum of all attentions", parts.sum().detach(), total.detach())
    sums = [x for name, x in logged.items() if name.endswith("_sum")]
    assert_close("sum of groups of layers", sum(sums) / len(parts), total.detach())
    shorter = {name: x[1:, :] for name, x in sample["net_input"].items() if name != "src_lengths"}
    shorter["src_lengths"] = sample["net_input"]["src_lengths"][1:]
    logs = [logged, criterion(pair.student, {**sample, "net_input": shorter})[2]]
    with metrics.aggregate(new_root=True) as printed:
        criterion.reduce_metrics(logs)
    values = printed.get_smoothed_values()
    shown = {"loss": ("loss", "sample_size")}
    groups = [name.removesuffix("_sum") for name in logged if name.endswith("_sum")]
    for name, parts in (shown | {group: (f"{group}_sum", f"{group}_queries") for group in groups}).items():
        total, count = (sum(float(x[part]) for x in logs) for part in parts)
        assert values[name] == pytest.approx(total / count, rel=1e-3), name


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


def test_half_precision(hedgehog: Pair) -> None:
    """As ``--fp16`` casts the student, which the teacher follows."""
    pair, sample = hedgehog._replace(student=copy.deepcopy(hedgehog.student)), make_sample("lm", right=3)
    exact, size, _ = pair.transfer()(pair.student, sample)
    pair.student.half()
    rough, _, _ = pair.transfer()(pair.student, sample)
    assert rough.dtype == torch.float32
    assert_close("loss", (rough / size).detach(), (exact / size).detach(), tolerance=0.02)


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
    model = build_model("hedgehog_lm", "--criterion", "attention_transfer", "--teacher", "x.pt")
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


def _criterion(**change) -> AttentionTransferCriterion:
    given = {"task": make_task("lm"), "teacher": __file__, "transfer_loss": "outputs", "transfer_window_dropout": 0.0}
    return AttentionTransferCriterion(**{**given, "ddp_backend": "pytorch_ddp", "distributed_world_size": 1, **change})


def _streams() -> StreamingLanguageModelingTask:
    """The task as far as it goes without data."""
    task = object.__new__(StreamingLanguageModelingTask)
    task.output_dictionary, task.cfg = make_task("lm").dictionary, SimpleNamespace(_name="streaming_language_modeling")
    return task


def _audio() -> AudioPretrainingTask:
    return AudioPretrainingTask(AudioPretrainingConfig())


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: _criterion(teacher=None), "--teacher is not given; allowed"),
        (lambda: _criterion(teacher="nowhere.pt"), "--teacher is 'nowhere.pt', which is no file; allowed"),
        (lambda: _criterion(transfer_window_dropout=1.5), "--transfer-window-dropout is 1.5; allowed: 0 to 1"),
        (lambda: _criterion(ddp_backend="fully_sharded"), "--ddp-backend is fully_sharded; allowed .*: legacy_ddp"),
        (lambda: _criterion(distributed_world_size=2), "--ddp-backend is pytorch_ddp; allowed .*: legacy_ddp"),
        (lambda: _criterion(task=_streams()), "--task is streaming_language_modeling; allowed .*: language_modeling"),
        (
            lambda: DistillationCriterion(_audio(), "x.pt", 1.5, 0.3, False, ""),
            "--criterion is distillation; allowed for models of audio: attention_transfer",
        ),
        (
            lambda: build_model("softmax_lm", "--lineartime-trained-parameters", "attention"),
            "softmax attention alone; allowed .*attention_transfer",
        ),
        (
            lambda: build_model("flowformer_lm", "--lineartime-trained-parameters", "new"),
            "flow attention has no parameters of its own; allowed .*-parameters attention",
        ),
        (
            lambda: build_model(
                "hedgehog_lm", *"--lineartime-trained-parameters all --criterion attention_transfer".split()
            ),
            "is all; allowed with --criterion attention_tr",
        ),
    ],
)
def test_options_that_are_refused(build, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build()


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda path: path.write_text("hello"), "cannot be read"),
        (lambda path: save_teacher(path, "mlm"), "holds 'roberta'; allowed with --task .*: 'transformer_lm'"),
        (lambda path: save_teacher(path, "lm", words=50), "a dictionary of 54 symbols, and the data has 64"),
    ],
)
def test_teachers_that_are_no_teachers(write, said: str, tmp_path: Path) -> None:
    """fairseq calls ``train()`` before the first update: they are refused there."""
    write(tmp_path / "teacher.pt")
    with pytest.raises(ValueError, match=said):
        _criterion(teacher=str(tmp_path / "teacher.pt")).train()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--decoder-layers", "4"], "in one of the two alone .decoder.layers.3"),
        (["--decoder-ffn-embed-dim", "24"], "of other shapes .decoder.layers.0.fc1"),
        (["--decoder-attention-heads", "4"], "decoder.layers.0.self_attn.num_heads is 4, and 2 in the student"),
        (["--activation-fn", "gelu"], "decoder.layers.0.activation_fn is gelu, and relu in the student"),
    ],
)
def test_teachers_of_other_sizes(arguments: list[str], said: str, hedgehog: Pair, tmp_path: Path) -> None:
    """No file is left; fairseq's trainer writes crash.pt for faults in the middle of a training, and this is none."""
    save_teacher(tmp_path / "other.pt", "lm", *arguments)
    pair = hedgehog._replace(path=str(tmp_path / "other.pt"))
    said = f"--teacher .* is not the model that the student begins with: .*{said}.*; allowed: "
    with pytest.raises(ValueError, match=said):
        pair.trainer(pair.transfer(), tmp_path / "checkpoints").train_step([make_sample("lm")])
    assert not list((tmp_path / "checkpoints").iterdir())


def _of_other_weights(pair: Pair) -> Pair:
    with torch.no_grad():
        pair.student.decoder.layers[1].fc2.bias[3] += 1
    return pair


#: Pairs that do not fit, made of a copy of ``hedgehog`` or in a new folder, and options of the criterion.
_MADE = {
    "1 parameters are of other values .decoder.layers.1.fc2.bias": (lambda pair, _: _of_other_weights(pair), {}),
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


@pytest.mark.parametrize("said", _MADE)
def test_pairs_that_do_not_fit(said: str, hedgehog: Pair, tmp_path: Path) -> None:
    make, options = _MADE[said]
    pair = make(hedgehog._replace(student=copy.deepcopy(hedgehog.student)), tmp_path)
    with pytest.raises(ValueError, match=said):
        pair.transfer(**options)(pair.student, make_sample("lm"))
