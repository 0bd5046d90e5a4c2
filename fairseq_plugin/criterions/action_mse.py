"""``--criterion action_mse``: the loss of Decision Transformers."""

from typing import Any

from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.logging import metrics
from torch import Tensor, nn


@register_criterion("action_mse")
class ActionMSECriterion(FairseqCriterion):
    """Mean squared error between predicted actions and the data's actions, over real steps only.

    The logged loss is the mean over all components of all actions, which are scaled to -1 to 1.
    """

    def forward(self, model: nn.Module, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict]:
        """The sum of squared errors over ``sample``, their number, and the logging output.

        With ``reduce`` False, the first is the errors of each real step, (steps, A).
        """
        net_input, target = sample["net_input"], sample["target"]
        real = ~net_input["padding_mask"]  # (B, K)
        errors = (model(**net_input).float()[real] - target.float()[real]).square()  # (steps, A)
        loss, sample_size = errors.sum() if reduce else errors, errors.numel()
        logging_output = {
            "loss": errors.sum().detach(),
            "sample_size": sample_size,
            "nsentences": sample["nsentences"],
            "ntokens": sample["ntokens"],
        }
        return loss, sample_size, logging_output

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the mean over all workers."""
        loss = sum(log.get("loss", 0) for log in logging_outputs)
        sample_size = sum(log.get("sample_size", 0) for log in logging_outputs)
        metrics.log_scalar("loss", loss / sample_size, sample_size, round=6)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """fairseq's hook: True."""
        return True
