"""``--criterion attention_transfer``: converted attentions learn to reproduce a teacher's softmax attentions."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from fairseq.criterions import register_criterion
from fairseq.dataclass import ChoiceEnum
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask
from omegaconf import II
from torch import Tensor, nn

from common.attention import LolcatsAttention
from common.imitation import IMITATION_LOSSES, check_imitates

from ..distill.attention_transfer import AttentionLoss, check_pair, share_memory, transfer
from ..distill.teacher import TeacherConfig, TeacherCriterion, bare, check_of_pair
from ..loading.known_options import option_field
from ..modules.converted import converted_attentions
from ..modules.cross_attention import InnerCrossAttention

#: The most groups of layers that are logged for each of encoder, decoder and cross-attention.
_GROUPS = 4
#: Suffixes of entries of a logging output: the sum of losses over a group's queries, and their number.
_SUM, _QUERIES = "_sum", "_queries"


@dataclass
class AttentionTransferConfig(TeacherConfig):
    """Options of ``attention_transfer``."""

    transfer_loss: ChoiceEnum(tuple(IMITATION_LOSSES)) = option_field(
        "outputs",
        "what is compared with softmax attention: outputs, 1000 times the squared error of each head, "
        "before the output projection; or weights, by their KL divergence, for short inputs and attentions whose "
        "outputs are means of the values",
    )
    transfer_window_dropout: float = option_field(
        0.0,
        "probability of an update in which lolcats attention is its linear part alone, which otherwise may "
        "learn nothing beside the window; 1: the linear part is always by itself",
    )
    distributed_world_size: int = II("distributed_training.distributed_world_size")


@register_criterion("attention_transfer", dataclass=AttentionTransferConfig)
class AttentionTransferCriterion(TeacherCriterion):
    """The distance of each converted attention from the teacher's softmax attention, on the same inputs.

    For language models, masked models and encoder-decoders that start from the teacher's weights; see
    ``fairseq_plugin.distill.attention_transfer``. Only the student's converted attentions run; its softmax attentions
    do not change. ``--lineartime-trained-parameters`` chooses which parameters learn. The loss is the mean over
    attentions and real queries; means over groups of layers are logged, too.

    Raises:
        ValueError: there is no teacher, or it has other sizes, another vocabulary or task; the student has no converted
            attention, or other parameters learn, too; an attention has no weights to compare; data parallelism would
            not reduce gradients of attentions that are called outside of the model's forward pass.
    """

    def __init__(
        self,
        task: FairseqTask,
        teacher: str | None,
        transfer_loss: str,
        transfer_window_dropout: float,
        ddp_backend: str,
        distributed_world_size: int,
    ) -> None:
        super().__init__(task, teacher, ddp_backend)
        self.teacher.check_file()
        if distributed_world_size > 1 and ddp_backend not in ("legacy_ddp", "no_c10d"):
            raise ValueError(
                f"--ddp-backend is {ddp_backend}; allowed with --criterion attention_transfer on several processes: "
                "legacy_ddp, since the model's own forward pass does not run"
            )
        if not 0.0 <= transfer_window_dropout <= 1.0:
            raise ValueError(f"--transfer-window-dropout is {transfer_window_dropout}; allowed: 0 to 1")
        self.loss, self.window_dropout = str(getattr(transfer_loss, "value", transfer_loss)), transfer_window_dropout
        self._checked = False
        self._padding_idx = getattr(self, "padding_idx", -100)  # fairseq sets it for tasks with a target dictionary

    def forward(self, model: nn.Module, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, float, dict]:
        """The mean over attentions of the loss summed over real queries, their mean number, and the logging output.

        With ``reduce`` False, the first is the part of each attention, which add up to the loss.
        """
        student = bare(model)
        teacher = self.teacher.model_like(student)
        if not self._checked:
            with check_of_pair():
                self._check(student, teacher)
        losses = transfer(student, teacher, sample["net_input"], self._padding_idx, self.loss, self._part(model))
        count = len(losses)
        totals = torch.stack([attention_loss.total for attention_loss in losses.values()]) / count
        if self.window_dropout > 0.0 and model.training:  # gives each parameter a gradient, in all processes
            totals = totals + 0.0 * sum(x.sum() for x in student.parameters() if x.requires_grad)
        sample_size = float(sum(attention_loss.queries for attention_loss in losses.values())) / count
        logging_output = {
            "loss": totals.sum().detach(),
            "sample_size": sample_size,
            # Batches of audio do not count what they hold.
            "nsentences": sample["nsentences"] if "nsentences" in sample else len(sample["id"]),
            "ntokens": sample.get("ntokens", sample_size),
            **by_group(converted_attentions(student), losses),
        }
        return totals.sum() if reduce else totals, sample_size, logging_output

    def _part(self, model: nn.Module) -> str | None:
        """The part of LoLCATs to compute alone, or None; random, from the generator that fairseq seeds per update."""
        if self.window_dropout == 0.0 or not model.training:
            return None
        return "linear" if torch.rand(()) < self.window_dropout else None

    def _check(self, student: nn.Module, teacher: nn.Module) -> None:
        attentions = converted_attentions(student)
        if not attentions:
            raise ValueError(
                f"{type(student).__name__} has no converted attention; allowed with --criterion attention_transfer: an "
                "architecture such as hedgehog_lm"
            )
        learn = {id(x) for module in attentions.values() for x in module.parameters()}
        learn -= {id(x) for module in attentions.values() for x in module.out_proj.parameters()}
        if any(x.requires_grad and id(x) not in learn for x in student.parameters()):
            raise ValueError(
                "--lineartime-trained-parameters is all; allowed with --criterion attention_transfer: new, attention "
                "(with hydra: model.lineartime_trained_parameters=new)"
            )
        if self.window_dropout > 0.0 and not any(isinstance(x.inner, LolcatsAttention) for x in attentions.values()):
            raise ValueError(
                f"--transfer-window-dropout is {self.window_dropout}; allowed for a model without lolcats attention: 0"
            )
        for name, attention in attentions.items():
            check_imitates("--transfer-loss", self.loss, attention.inner, name)
        check_pair(student, teacher, self.teacher.path)
        share_memory(student, teacher)
        self._checked = True

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the mean loss, and that of each group of layers, over all workers."""
        sums = {name: sum(log.get(name, 0) for log in logging_outputs) for name in logging_outputs[0]}
        metrics.log_scalar("loss", sums["loss"] / sums["sample_size"], sums["sample_size"], round=4)
        for name in [name.removesuffix(_SUM) for name in sums if name.endswith(_SUM)]:
            queries = sums[name + _QUERIES]
            metrics.log_scalar(name, sums[name + _SUM] / queries, queries, round=4)


def by_group(attentions: dict[str, nn.Module], losses: dict[str, AttentionLoss]) -> dict[str, Any]:
    """Sums over groups of neighbouring layers: ``decoder_0-2_sum``, and the number of queries of each."""
    kinds: dict[str, list[str]] = {}
    for name, attention in attentions.items():
        kind = "cross" if isinstance(attention, InnerCrossAttention) else name.partition(".")[0]
        kinds.setdefault(kind, []).append(name)
    logged: dict[str, Any] = {}
    for kind, names in kinds.items():
        size = -(-len(names) // _GROUPS)
        for i in range(0, len(names), size):
            group = names[i : i + size]
            ends = dict.fromkeys(_layer(name) for name in (group[0], group[-1]))
            label = f"{kind}_{'-'.join(ends)}"
            logged[label + _SUM] = sum(losses[name].total.detach() for name in group)
            logged[label + _QUERIES] = sum(losses[name].queries for name in group)
    return logged


def _layer(name: str) -> str:
    """The number of the layer of the module called ``name``."""
    return re.search(r"layers\.(\d+)\.", name)[1]
