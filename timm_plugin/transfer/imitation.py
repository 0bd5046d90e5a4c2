"""Attention transfer in one layer: the output of softmax attention, and a student's distance from it.

Legend: B batch, N tokens, C channels, H heads, d channels of a head.
"""

import torch
from torch import Tensor, nn

from common.imitation import IMITATION_LOSSES, check_imitates
from common.ops.shared.checks import check_choice

from ..layers.attention import SelfAttention, key_padding

#: Names of the losses.
LOSSES = tuple(IMITATION_LOSSES)


class AttentionImitation(nn.Module):
    """Softmax attention at its place in a model, with a student that learns to return the same output.

    The output is the teacher's, so the layers above get their usual input. Each call computes the student's loss and
    immediately its gradients for the student's trainable parameters. ``collect`` returns both; nothing else of the
    student's pass is kept. The cost is the teacher's attention, and the student's forward and backward pass.

    Args:
        teacher: the layer with softmax attention.
        student: a layer with another attention, with the same heads and channels of a value.
        loss: "outputs", 1000 times the mean squared error of the heads' outputs for real tokens, before the output
            projection; or "weights", the KL divergence of the student's weights from the teacher's, the mean over
            queries and heads, which costs N / d passes of the student and O(N²) memory, so it is for short inputs. Both
            are in ``common.imitation``.

    Raises:
        ValueError: another ``loss``; a teacher whose attention is not softmax; heads that do not fit; "weights" for a
            mechanism without weights like those of softmax, at least 0 and with the sum 1.
    """

    def __init__(self, teacher: SelfAttention, student: SelfAttention, loss: str = "outputs") -> None:
        super().__init__()
        check_choice("loss", loss, LOSSES)
        if teacher.mechanism != "softmax":
            raise ValueError(f"the teacher's attention is {teacher.mechanism!r}; allowed: 'softmax'")
        heads = [(layer.num_heads, layer.widths[2] // layer.num_heads) for layer in (teacher, student)]
        if heads[0] != heads[1]:
            raise ValueError(
                f"attention {student.mechanism!r} has {heads[1][0]} heads of {heads[1][1]} channels; "
                f"allowed: {heads[0][0]} of {heads[0][1]}, as the teacher has"
            )
        check_imitates("loss", loss, student.attention, "the student")
        self.teacher = teacher
        self.student = student
        self.loss = loss
        self.learns = True
        self._losses: list[Tensor] = []
        self._gradients: list[tuple[Tensor, ...]] = []

    def learning(self) -> list[nn.Parameter]:
        """The student's parameters that learn."""
        return [parameter for parameter in self.student.parameters() if parameter.requires_grad]

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """x, tokens (B, N, C) or a map of them -> the teacher's output; arguments as in ``SelfAttention``."""
        with torch.no_grad():
            target = self.teacher.heads(x, attn_mask, is_causal)
            out = self.teacher.project(x, target)
        with torch.set_grad_enabled(self.learns):
            loss = self._loss(x.detach(), attn_mask, target)
        learning = self.learning() if loss.requires_grad else []
        if learning:
            self._gradients.append(torch.autograd.grad(loss, learning, materialize_grads=True))
        self._losses.append(loss.detach())
        return out

    def collect(self) -> tuple[Tensor, list[Tensor]]:
        """The mean loss of the calls since the last ``collect``, and its gradients for ``learning()``, 0 without any.

        Raises:
            ValueError: there was no call.
        """
        losses, gradients = self._losses, self._gradients
        self._losses, self._gradients = [], []
        if not losses:
            raise ValueError(
                "the model did not call an attention that is to be imitated; allowed: a model whose forward pass calls "
                "all of them"
            )
        summed = [sum(parts) / len(losses) for parts in zip(*gradients)]
        return torch.stack(losses).mean(), summed or [torch.zeros_like(x) for x in self.learning()]

    def _loss(self, x: Tensor, attn_mask: Tensor | None, target: Tensor) -> Tensor:
        padding = key_padding(x, attn_mask, False)
        if self.loss == "outputs":
            result, wanted = self.student.heads(x, attn_mask), target
        else:
            wanted = self._softmax_weights(x, padding)
            inputs = self.student.attention.inputs(x=x.flatten(1, -2))
            result = self.student.attention.attention_matrix(
                *self.student.query_key_value(x), padding, padding, **inputs
            )
        return _mean_of_real(IMITATION_LOSSES[self.loss].of(result, wanted), padding)

    @torch.no_grad()
    def _softmax_weights(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """The teacher's weights (B, H, N, N)."""
        return self.teacher.attention.attention_matrix(*self.teacher.query_key_value(x), padding, padding)


def _mean_of_real(losses: Tensor, padding: Tensor | None) -> Tensor:
    """The mean of losses (B, N) over the tokens that are not ``padding`` (B, N)."""
    return losses.mean() if padding is None else losses[~padding].mean()
