"""Attention transfer as one of timm's training tasks: a built model's softmax attention teaches another attention.

Legend: B batch, C image channels, H x W the size of an image, L layers whose attention learns.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from timm.task import TrainingTask
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..layers.attention import SelfAttention
from ..layers_by_path import AttentionLike
from ..replace import put_modules, replace_attention
from .imitation import AttentionImitation


class AttentionTransferTask(TrainingTask):
    """Stage 1 of making a trained model linear: each new attention learns to imitate the softmax attention it replaces.

    Each new attention gets the input that it has in ``teacher``, with softmax attention in all layers below, and learns
    to return the same output (``AttentionImitation``). The loss is the mean over these layers. Layers that
    ``attention`` does not replace, or replaces by "softmax", are the teacher's.

    ``teacher`` does not change, and the student shares its weights: memory is one model, the new parameters, and one
    layer's attention. Gradients are computed layer by layer during the forward pass, and ``loss.backward()`` passes
    them on, so accumulation and DistributedDataParallel work as usual. For mixed precision use bfloat16: scaling the
    loss afterwards does not save small gradients of float16. Everything is in evaluation mode, whatever ``train`` is
    given: no dropout, no stochastic depth.

    ``get_eval_model()`` is the student, for validation and for checkpoints, which contain only the student;
    ``converted()`` returns a student with its own weights. ``get_trainable_module()`` has the parameters that learn,
    for an optimiser. Move ``teacher`` to its device first.

    Args:
        teacher: a built model with its weights.
        attention, max_tokens, grid_size, options: as in ``replace_attention``, where ``attention`` is called ``name``.
        loss: "outputs" or "weights", as in ``AttentionImitation``.
        learn_projections: also train these layers' projections to queries, keys and values, which start as the
            teacher's; a mechanism without parameters of its own needs it.
        device, dtype, verbose: as in timm's tasks.

    Raises:
        ValueError: as ``replace_attention`` and ``AttentionImitation``; a teacher whose attention is not softmax; only
            softmax attention; a mechanism without parameters of its own, or whose projections are new,
            without ``learn_projections``.
    """

    def __init__(
        self,
        teacher: nn.Module,
        attention: AttentionLike | Mapping[str, AttentionLike],
        loss: str = "outputs",
        learn_projections: bool = False,
        max_tokens: int | None = None,
        grid_size: tuple[int, int] | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        verbose: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(device=device, dtype=dtype, verbose=verbose)
        if not isinstance(teacher, nn.Module):
            raise ValueError(f"teacher is {teacher!r}; allowed: a built model, such as timm.create_model gives")
        shared = _shared(teacher)
        student = copy.deepcopy(teacher, dict(shared))
        before = dict(student.named_modules())
        replace_attention(student, attention, max_tokens=max_tokens, grid_size=grid_size, **options)
        layers = {
            path: module
            for path, module in student.named_modules()
            if isinstance(module, SelfAttention) and before.get(path) is not module and module.mechanism != "softmax"
        }
        _check_teacher(layers, before, attention)
        model = copy.deepcopy(teacher, dict(shared))
        replace_attention(model, dict.fromkeys(layers, "softmax"))
        for tensor in shared.values():
            tensor.requires_grad_(False)
        for layer in layers.values():
            _let_learn(layer, learn_projections)
        imitations = {path: AttentionImitation(model.get_submodule(path), x, loss) for path, x in layers.items()}
        put_modules(model, {model.get_submodule(path): imitation for path, imitation in imitations.items()})
        self._requires_grad = {name: parameter.requires_grad for name, parameter in teacher.named_parameters()}
        self._teachers_names = frozenset(teacher.state_dict())
        self.eval_model = student
        self.trainable_module: nn.Module = _LayersInPlace(model, imitations.values())
        self.layer_names = tuple(layers)
        self.train(False)

    def train(self, mode: bool = True) -> "AttentionTransferTask":
        """Evaluation mode, for any ``mode``."""
        return super().train(False)

    def forward(self, input: Tensor, target: Tensor | None = None) -> dict[str, Tensor]:
        """input (B, C, H, W) -> ``loss``; ``output``, the teacher's; ``layer_losses`` (L,), of ``layer_names``.

        ``target``, the labels, is ignored.
        """
        loss, layer_losses, output = self.trainable_module(input)
        return {"loss": loss, "output": output, "layer_losses": layer_losses}

    def setup_ema(self, decay: float = 0.9999, **options: Any) -> ModelEmaV3:
        """Keep an average of the student's weights in a ``ModelEmaV3``; ``get_eval_model(ema=True)`` returns it."""
        self.trainable_module_ema = ModelEmaV3(self.eval_model, decay, **options)
        return self.trainable_module_ema

    def update_ema(self, step: int | None = None) -> None:
        """Update that average, if there is one, after an update."""
        if self.has_ema():
            self.trainable_module_ema.update(self.eval_model, step=step)

    def prepare_distributed(self, device_ids: list | None = None, **ddp_kwargs: Any) -> "AttentionTransferTask":
        """Let DistributedDataParallel average gradients over processes, as in timm's tasks."""
        self.trainable_module = DistributedDataParallel(self.trainable_module, device_ids=device_ids, **ddp_kwargs)
        return self

    def own_state(self) -> dict[str, Tensor]:
        """The entries of the student's state dict that are not the teacher's: new tensors, and those that learn."""
        learning = {name for name, parameter in self.eval_model.named_parameters() if parameter.requires_grad}
        state = self.eval_model.state_dict()
        return {name: x for name, x in state.items() if name in learning or name not in self._teachers_names}

    def teacher_state(self) -> dict[str, Tensor]:
        """The other entries of the student's state dict, which are the teacher's."""
        own = self.own_state()
        return {name: x for name, x in self.eval_model.state_dict().items() if name not in own}

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Load an ``own_state()`` of this task; torch's RuntimeError if it is of another task."""
        self.eval_model.load_state_dict({**self.teacher_state(), **state}, strict=True)

    def converted(self) -> nn.Module:
        """A copy of the student, in evaluation mode, with its own weights, trainable as in the teacher."""
        model = copy.deepcopy(self.eval_model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self._requires_grad.get(name, True))
        return model


class _LayersInPlace(nn.Module):
    """The teacher with an ``AttentionImitation`` for each attention that learns, as one module for an optimiser."""

    def __init__(self, model: nn.Module, imitations: Iterable[AttentionImitation]) -> None:
        super().__init__()
        self.model = model
        self.imitations = nn.ModuleList(imitations)

    def train(self, mode: bool = True) -> "_LayersInPlace":
        return super().train(False)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """input (B, C, H, W) -> the loss, the losses of the layers (L,), and the teacher's output."""
        learns = torch.is_grad_enabled()
        for imitation in self.imitations:
            imitation.learns = learns
        with torch.no_grad():
            output = self.model(input)
        losses, parameters, gradients = [], [], []
        for imitation in self.imitations:
            loss, layer_gradients = imitation.collect()
            losses.append(loss)
            parameters += imitation.learning()
            gradients += [gradient / len(self.imitations) for gradient in layer_gradients]
        layer_losses = torch.stack(losses)
        loss = layer_losses.mean()
        return (_WithGradients.apply(loss, *parameters, *gradients) if learns else loss), layer_losses, output


class _WithGradients(torch.autograd.Function):
    """A loss with known gradients for parameters: ``apply(loss, *parameters, *gradients)`` returns the loss."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters_and_gradients: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters_and_gradients[len(parameters_and_gradients) // 2 :])
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        return None, *(gradient * grad_output.to(gradient) for gradient in gradients), *(None for _ in gradients)


def _shared(model: nn.Module) -> dict[int, Tensor]:
    """A memo for ``copy.deepcopy``: new parameters that share memory with those of ``model``, and its buffers."""
    parameters = {id(x): nn.Parameter(x.detach(), requires_grad=x.requires_grad) for x in model.parameters()}
    return parameters | {id(buffer): buffer.detach() for buffer in model.buffers()}


def _check_teacher(layers: dict[str, SelfAttention], before: dict[str, nn.Module], attention: Any) -> None:
    """Raise ValueError unless there are ``layers``, and all of them replace softmax attention."""
    if not layers:
        raise ValueError(f"attention is {attention!r}, which the teacher has; allowed: at least one other than softmax")
    for path in layers:
        mechanism = getattr(before[path], "mechanism", "softmax")
        if mechanism != "softmax":
            raise ValueError(f"the teacher's {path} has attention {mechanism!r}; allowed: softmax attention")


def _let_learn(layer: SelfAttention, learn_projections: bool) -> None:
    """Unfreeze the new parameters of ``layer`` and, if asked, its own copy of the teacher's projections."""
    parameters = list(layer.attention.parameters())
    if not learn_projections:
        cause = "no parameters of its own" if not parameters else "projections of other widths, which are new"
        if not parameters or len(set(layer.widths)) > 1:
            raise ValueError(
                f"attention {layer.mechanism!r} has {cause}; allowed: learn_projections=True (--learn-projections), so "
                "that its projections to queries, keys and values learn, or a mechanism with maps to learn, such as "
                "'hedgehog'"
            )
    for parameter in parameters:
        parameter.requires_grad_(True)
    if learn_projections:
        layer.qkv = copy.deepcopy(layer.qkv).requires_grad_(True)
