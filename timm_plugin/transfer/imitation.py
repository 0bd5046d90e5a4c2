"""One layer's attention transfer: what softmax attention gives for its input, and how far a student is from that.

Legend: B batch, N tokens, C channels, H heads, d channels of a head.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.ops.shared.checks import check_choice

from ..layers.attention import SelfAttention, key_padding

#: What a student can be compared in.
LOSSES = ("outputs", "weights")
#: Mechanisms whose weights of the tokens are positive and, for each query, sum to 1, as those of softmax do. In others
#: some tokens have no weight, or the sums differ from query to query, and a cross-entropy says nothing.
WITH_WEIGHTS = frozenset({"cosformer", "favor", "hedgehog", "linear", "lolcats", "softmax", "t2r"})
#: Added to a student's weights before their logarithm: relu features may give a weight of 0.
_LEAST_WEIGHT = 1e-6


class AttentionImitation(nn.Module):
    """Softmax attention in its place in a model, beside which a student learns to give the same for the same input.

    Its output is the teacher's, so that the layers above see what they always saw. In each call the student's loss is
    computed, and at once its gradients for the student's parameters that require some; both wait for ``collect``, and
    nothing else of the student's pass is kept. A layer costs the teacher's attention and the student's, there and back.

    Args:
        teacher: the layer with softmax attention.
        student: one with another attention, of the same heads and channels of a value.
        loss: "outputs", the mean squared error of what the heads give real tokens, before the output projection
            (LoLCATs, Zhang et al., 2025, section 3.2); or "weights", the cross-entropy -Σ_j P_ij log Â_ij of the
            teacher's softmax weights P and the student's Â, the mean over queries and heads (Hedgehog, Zhang et al.,
            2024, Eq. 4), which costs the student N / d passes and both O(N²) memory: for short inputs.

    Raises:
        ValueError: another ``loss``; a teacher whose attention is not softmax; heads that do not fit; "weights" for a
            mechanism whose weights are not such as softmax has.
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
        if loss == "weights" and student.mechanism not in WITH_WEIGHTS:
            raise ValueError(
                f"loss is 'weights', and attention {student.mechanism!r} does not weigh tokens as softmax does, with "
                f"positive weights that sum to 1; allowed with it: 'outputs'. With 'weights': "
                f"{', '.join(sorted(WITH_WEIGHTS))}"
            )
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
        """x, tokens (B, N, C) or a map of them -> what the teacher gives for it; arguments as of ``SelfAttention``."""
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
            ValueError: it was not called.
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
            errors = F.mse_loss(self.student.heads(x, attn_mask).float(), target.float(), reduction="none")
            return _mean_of_real(errors.mean(-1), padding)
        with torch.no_grad():
            query, key, _ = self.teacher.query_key_value(x)
            scores = query.float() @ key.float().transpose(-2, -1) * query.shape[-1] ** -0.5
            if padding is not None:
                scores = scores.masked_fill(padding[:, None, None], float("-inf"))
            weights = scores.softmax(-1)  # (B, H, N, N)
        of_student = self.student.attention.recorded_map(*self.student.query_key_value(x), padding, padding)
        entropy = -(weights * (of_student.float() + _LEAST_WEIGHT).log()).sum(-1)  # (B, H, N)
        return _mean_of_real(entropy, padding)


def _mean_of_real(losses: Tensor, padding: Tensor | None) -> Tensor:
    """The mean of losses (B, H, N) over heads and the tokens that are no ``padding`` (B, N)."""
    if padding is None:
        return losses.mean()
    return losses[~padding[:, None].expand_as(losses)].mean()
