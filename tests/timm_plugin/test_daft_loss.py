"""The regulariser of DAFT-conv (Eq. 10) in timm's own training tasks."""

import subprocess
import sys
from pathlib import Path

import pytest
import timm
import timm.task
import torch
from timm.optim import create_optimizer_v2
from timm.task import (
    ClassificationTask,
    FeatureDistillationTask,
    LogitDistillationTask,
    MultiLabelClassificationTask,
    TrainingTask,
)
from torch import Tensor, nn

from tests.compare import assert_close
from timm_plugin import add_auxiliary_losses

from .models import build, draw_filters, images
from .test_daft import filters_by_hand

ROOT = Path(__file__).resolve().parents[2]
LABELS = torch.tensor([3, 5])
WEIGHT = 0.001


def entropy_by_hand(model: nn.Module) -> Tensor:
    """Σ over layers and heads of -Σ p log p, p the softmax of the filter."""
    total = torch.zeros(())
    for block in model.blocks:
        for filter_ in filters_by_hand(block.attn.attention):
            p = torch.exp(filter_.flatten()) / torch.exp(filter_).sum()
            total = total - (p * p.log()).sum()
    return total


def _model(**args) -> nn.Module:
    return build("daft_conv", num_classes=10, **{**dict(entropy_weight=WEIGHT), **args}).train()


def _criterion(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def test_loss_of_the_classification_task():
    model = _model()
    x = images(model)
    result = ClassificationTask(model, _criterion)(x, LABELS)
    entropy = WEIGHT * entropy_by_hand(model)
    assert entropy > 1e-3
    assert_close("auxiliary loss", result["auxiliary_loss"], entropy)
    assert_close("loss", result["loss"], _criterion(model(x), LABELS) + entropy, 1e-6)
    assert_close("what was added", result["loss"] - _criterion(result["output"], LABELS), entropy, 1e-3)
    assert not result["auxiliary_loss"].requires_grad


def test_gradient_of_the_regulariser():
    """It reaches γ and r; β, added to every entry, changes no softmax."""
    model = _model(entropy_weight=0.5)
    ClassificationTask(model, lambda output, target: 0.0 * output.sum())(images(model), LABELS)["loss"].backward()
    filters = {name: p for name, p in model.named_parameters() if ".attn.attention." in name}
    expected = torch.autograd.grad(0.5 * entropy_by_hand(model), filters.values())
    for (name, parameter), wanted in zip(filters.items(), expected):
        if name.endswith("beta"):
            assert parameter.grad.abs().max() < 1e-5
        else:
            assert parameter.grad.abs().min() > 0.0
            assert_close(f"gradient of {name}", parameter.grad, wanted, 1e-4)
    others = [p.grad for name, p in model.named_parameters() if name not in filters]
    assert all(grad is None or not grad.any() for grad in others)


def test_filters_of_zero():
    """A model as it is built: the largest entropy there is."""
    model = timm.create_model("daft_conv_test", entropy_weight=WEIGHT, num_classes=10)
    result = ClassificationTask(model, _criterion)(images(model), LABELS)
    wanted = WEIGHT * 3 * 4 * torch.log(torch.tensor(25.0))
    assert_close("auxiliary loss", result["auxiliary_loss"], wanted)


def test_selecting_models_and_plain_filters():
    for args in (dict(gumbel_temperature=0.5), dict(reparameterize=False), dict(local_only=True)):
        model = _model(**args)
        result = ClassificationTask(model, _criterion)(images(model), LABELS)
        assert_close(f"auxiliary loss with {args}", result["auxiliary_loss"], WEIGHT * entropy_by_hand(model))


@pytest.mark.parametrize("case", ["daft_conv", "daft_full", "hier", "daft_conv_vit"])
def test_models_without_it_are_unchanged(case):
    model = build(case, num_classes=10).train()
    x = images(model)
    result = ClassificationTask(model, _criterion)(x, LABELS)
    assert set(result) == {"loss", "output"}
    assert torch.equal(result["loss"], _criterion(result["output"], LABELS))


def test_not_in_evaluation():
    model = _model().eval()
    task = ClassificationTask(model, _criterion)
    result = task(images(model), LABELS)
    assert set(result) == {"loss", "output"}
    assert torch.equal(result["loss"], _criterion(model(images(model)), LABELS))
    evaluator = task.create_evaluator()
    evaluator.update(result["output"], LABELS)
    assert evaluator.summary()["loss"] == pytest.approx(result["loss"].item(), rel=1e-6)


def test_added_once_by_a_task_that_is_built_on_another():
    model = _model()
    target = torch.eye(10)[LABELS]
    result = MultiLabelClassificationTask(model, nn.BCEWithLogitsLoss())(images(model), target)
    classification = nn.functional.binary_cross_entropy_with_logits(result["output"], target)
    assert_close("loss", result["loss"], classification + WEIGHT * entropy_by_hand(model), 1e-6)


@pytest.mark.parametrize("kind", [LogitDistillationTask, FeatureDistillationTask])
def test_distillation_adds_the_students(kind):
    student, teacher = _model(entropy_weight=1.0), _model(entropy_weight=100.0)
    draw_filters(teacher)
    task = kind(student, teacher, nn.CrossEntropyLoss(), task_loss_weight=0.5).train()
    result = task(images(student), LABELS)
    entropy = entropy_by_hand(student)
    assert_close("auxiliary loss", result["auxiliary_loss"], entropy)
    parts = 0.5 * result["task_loss"] + 0.5 * result["kd_loss"]
    assert_close("loss", result["loss"], parts + entropy)


def test_averaged_weights_change_nothing():
    model = _model()
    task = ClassificationTask(model, _criterion)
    expected = task(images(model), LABELS)["loss"]
    task.setup_ema(decay=0.5)
    assert torch.equal(task(images(model), LABELS)["loss"], expected)
    task.update_ema(1)
    task.train()  # the averaged model is now in training mode too, but it is not what is trained
    assert torch.equal(task(images(model), LABELS)["loss"], expected)


@pytest.mark.parametrize("whole", [False, True])
def test_compiled(whole):
    model = _model()
    task = ClassificationTask(model, _criterion)
    expected = task(images(model), LABELS)["loss"]
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    torch._dynamo.reset()
    compiled = task
    if whole:
        compiled = torch.compile(task, backend="aot_eager")
    else:
        task.compile(backend="aot_eager")
    loss = compiled(images(model), LABELS)["loss"]
    loss.backward()
    assert_close("loss", loss, expected)
    for (name, parameter), wanted in zip(model.named_parameters(), gradients):
        assert_close(f"gradient of {name}", parameter.grad, wanted, 1e-4)
    torch._dynamo.reset()


def test_under_autocast():
    model = _model(entropy_weight=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        result = ClassificationTask(model, _criterion)(images(model), LABELS)
    assert result["auxiliary_loss"].dtype == torch.float32
    assert_close("auxiliary loss", result["auxiliary_loss"], entropy_by_hand(model))


def test_done_again_adds_nothing_more():
    forwards = {task: task.forward for task in vars(timm.task).values() if isinstance(task, type)
                and issubclass(task, TrainingTask)}  # fmt: skip
    try:
        add_auxiliary_losses()
        add_auxiliary_losses()
        assert ClassificationTask.forward.__wrapped__ is forwards[ClassificationTask].__wrapped__  # timm's own
        model = _model()
        result = ClassificationTask(model, _criterion)(images(model), LABELS)
        assert_close("loss", result["loss"], _criterion(model(images(model)), LABELS) + WEIGHT * entropy_by_hand(model))
    finally:
        for task, forward in forwards.items():
            task.forward = forward


RELOADED = """
import sys, timm, torch, timm_plugin
for name in [name for name in sys.modules if name.startswith("timm_plugin")]:
    del sys.modules[name]
import timm_plugin
from timm.task import ClassificationTask
model = timm.create_model("daft_conv_test", entropy_weight=1.0, num_classes=10)
result = ClassificationTask(model, torch.nn.CrossEntropyLoss())(torch.randn(2, 3, 64, 64), torch.tensor([0, 1]))
alone = torch.nn.functional.cross_entropy(result["output"], torch.tensor([0, 1]))
print(round(((result["loss"] - alone) / (12 * torch.log(torch.tensor(25.0)))).item(), 4))
"""


def test_models_of_a_reloaded_plugin():
    result = subprocess.run([sys.executable, "-c", RELOADED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout == "1.0\n", result.stderr


PROCESSES = """
import sys, torch, timm
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask
torch.distributed.init_process_group("gloo")
rank, device = torch.distributed.get_rank(), torch.device("cpu")
images, labels, weights = torch.load(sys.argv[1], weights_only=True)
model = timm.create_model("daft_conv_test", num_classes=10, entropy_weight=0.5, dtype=torch.float64)
model.load_state_dict(weights)
task = ClassificationTask(model, torch.nn.CrossEntropyLoss(), device=device)
task.prepare_distributed(device_ids=[device])  # as train.py calls it
optimizer = create_optimizer_v2(model, "sgd", lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    task(images[rank::2], labels[rank::2])["loss"].backward()
    optimizer.step()
gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
torch.save(gradients, sys.argv[2] + str(rank))
torch.distributed.destroy_process_group()
"""


def test_two_processes_have_the_gradients_of_one_with_both_batches(tmp_path):
    model = _model(entropy_weight=0.5, dtype=torch.float64)  # β's gradients nearly cancel
    x, labels = torch.randn(8, 3, 64, 64, dtype=torch.float64), torch.arange(8)
    torch.save((x, labels, model.state_dict()), tmp_path / "batch.pt")
    (tmp_path / "script.py").write_text(PROCESSES)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    arguments = [str(tmp_path / name) for name in ("script.py", "batch.pt", "gradients")]
    subprocess.run([*launcher, "-m", "timm_plugin", *arguments], cwd=ROOT, check=True)

    optimizer = create_optimizer_v2(model, "sgd", lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (_criterion(model(x), labels) + 0.5 * entropy_by_hand(model)).backward()
        optimizer.step()
    for rank in "01":
        gradients = torch.load(tmp_path / f"gradients{rank}", weights_only=True)
        for name, parameter in model.named_parameters():
            assert_close(f"gradient of {name} in process {rank}", gradients[name], parameter.grad, 1e-8)
