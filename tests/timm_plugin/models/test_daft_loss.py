"""The regulariser of DAFT-conv (Eq. 10) applies in any training loop."""

import pytest
import timm
import torch
from timm.task import (
    ClassificationTask,
    FeatureDistillationTask,
    LogitDistillationTask,
    MultiLabelClassificationTask,
)
from torch import Tensor, nn

from tests.compare import assert_close
from tests.timm_plugin.helpers.models import build, draw_filters, filters_by_hand, images

LABELS = torch.tensor([3, 5])
WEIGHT = 0.001


def entropy_by_hand(model: nn.Module) -> Tensor:
    """Σ over layers and heads of -Σ p log p, where p is the softmax of the filter."""
    total = torch.zeros(())
    for block in model.blocks:
        for filter_ in filters_by_hand(block.attn.attention):
            p = torch.exp(filter_.flatten()) / torch.exp(filter_).sum()
            total = total - (p * p.log()).sum()
    return total


def _model(**args) -> nn.Module:
    """A model in float64, because β's gradients nearly cancel."""
    return build("daft_conv", num_classes=10, **{**dict(entropy_weight=WEIGHT, dtype=torch.float64), **args}).train()


def _images(model: nn.Module) -> Tensor:
    return images(model).double()


def _criterion(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Gradients of ``loss`` by the parameter names of ``model``; 0 if there is none."""
    computed = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return dict(zip([name for name, _ in model.named_parameters()], computed))


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-8) -> None:
    for name, tensor in expected.items():
        # β, added to every entry of a filter, does not change the softmax: its gradients may be only rounding errors.
        assert_close(f"gradient of {name}", actual[name] + 1e-3, tensor + 1e-3, tolerance)


def assert_same_gradients(model: nn.Module, loss: Tensor, expected: Tensor, tolerance: float = 1e-8) -> None:
    """Check that ``loss``, computed by a trainer, has the gradients of ``expected``."""
    assert_equal(gradients(model, loss), gradients(model, expected), tolerance)


@pytest.mark.parametrize(
    "args", [{}, dict(gumbel_temperature=0.5), dict(reparameterize=False), dict(local_only=True, query=False)]
)
def test_any_loss_of_the_output_has_the_gradients_of_the_regularised_loss(args):
    model, plain = _model(entropy_weight=0.5, **args), _model(entropy_weight=0.0, **args)
    plain.load_state_dict(model.state_dict())
    x, outputs = _images(model), []
    for each in (model, plain):
        torch.manual_seed(3)  # for the draws of a selection
        outputs.append(each(x))
    assert torch.equal(*outputs)  # the value of the loss is the classification loss
    expected = gradients(plain, _criterion(outputs[1], LABELS) + 0.5 * entropy_by_hand(plain))
    assert_equal(gradients(model, _criterion(outputs[0], LABELS)), expected)


def test_the_regulariser_alone():
    """If the loss is constant, only the filters get a gradient."""
    model = _model(entropy_weight=0.5)
    alone = gradients(model, 0.0 * model(_images(model)).sum())
    expected = gradients(model, 0.5 * entropy_by_hand(model))
    assert_equal(alone, expected, 1e-4)
    assert {name for name, tensor in alone.items() if tensor.abs().max() > 1e-9} <= {
        name for name in alone if ".attention." in name
    }
    assert all(y.abs().min() > 0.0 for name, y in expected.items() if name.endswith(("attention.r", "gamma")))


def test_the_value_for_logging():
    model = timm.create_model("daft_conv_test", entropy_weight=WEIGHT, num_classes=10)
    assert_close("auxiliary loss", model.auxiliary_loss(), WEIGHT * 3 * 4 * torch.log(torch.tensor(25.0)))
    assert timm.create_model("daft_conv_test").auxiliary_loss() is None


def test_tasks_of_timm():
    """Classification, multi-label classification, and distillation, which only counts the student's."""
    model, teacher = _model(entropy_weight=1.0), _model(entropy_weight=100.0)
    draw_filters(teacher)
    x, distillation = _images(model), [nn.CrossEntropyLoss()]
    tasks = [
        (ClassificationTask(model, _criterion), LABELS),
        (MultiLabelClassificationTask(model, nn.BCEWithLogitsLoss()), torch.eye(10)[LABELS]),
        (LogitDistillationTask(model, teacher, *distillation, task_loss_weight=0.5), LABELS),
        (FeatureDistillationTask(model, teacher, *distillation, task_loss_weight=0.5), LABELS),
    ]
    for task, target in tasks:
        task.train()
        loss = task(x, target)["loss"]
        model.entropy_weight = 0.0
        plain = task(x, target)["loss"]
        model.entropy_weight = 1.0
        assert torch.equal(loss, plain)
        assert_same_gradients(model, loss, plain + entropy_by_hand(model))


def test_features_between_the_blocks():
    """A loss on feature maps, as in a detector, is regularised as well."""
    model, losses = _model(), []
    for model.entropy_weight in (0.5, 0.0):
        losses.append(model.forward_intermediates(_images(model), intermediates_only=True)[-1].square().sum())
    assert_same_gradients(model, losses[0], losses[1] + 0.5 * entropy_by_hand(model))


@pytest.mark.parametrize("case", ["daft_conv", "daft_full", "hier", "daft_conv_vit"])
def test_models_without_it_and_models_in_evaluation_are_unchanged(case):
    args = dict(entropy_weight=WEIGHT) if case == "daft_conv" else {}
    model = build(case, num_classes=10, **args)
    output = model(images(model))
    filters = [p for name, p in model.named_parameters() if ".attention." in name]
    if filters:
        assert not any(grad.any() for grad in torch.autograd.grad(0.0 * output.sum(), filters))


def test_checkpointing_and_averaged_weights():
    model = _model(entropy_weight=0.5)
    x = _images(model)
    loss = _criterion(model(x), LABELS)
    model.set_grad_checkpointing()
    task = ClassificationTask(model, _criterion)
    task.setup_ema(decay=0.5)
    task.update_ema(1)
    again = task.train()(x, LABELS)["loss"]  # the averaged model is in training mode too, but is not being trained
    assert_same_gradients(model, again, loss)


@pytest.mark.parametrize("whole", [False, True])
def test_compiled(whole):
    model = _model(entropy_weight=0.5, depth=1)
    task = ClassificationTask(model, _criterion)
    x = _images(model)
    expected = task(x, LABELS)["loss"]
    torch._dynamo.reset()
    compiled = torch.compile(task if whole else model, backend="aot_eager", fullgraph=not whole)
    loss = compiled(x, LABELS)["loss"] if whole else _criterion(compiled(x), LABELS)
    assert_close("loss", loss, expected)
    assert_same_gradients(model, loss, expected)
    torch._dynamo.reset()


def test_scripted():
    """TorchScript cannot train with it, and evaluates without it."""
    model = build("daft_conv", entropy_weight=WEIGHT, scriptable=True)
    scripted = torch.jit.script(model)
    assert_close("logits", scripted(images(model)), model(images(model)))


def test_bfloat16_is_exact_and_float16_is_refused():
    model = _model(entropy_weight=1.0, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = 0.0 * model(images(model)).float().sum()
    assert_same_gradients(model, loss, entropy_by_hand(model), 1e-3)
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="float16"):
        model(images(model))
    with torch.autocast("cpu", torch.float16):
        assert torch.isfinite(model.eval()(images(model))).all()
