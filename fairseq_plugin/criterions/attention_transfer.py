"""``--criterion attention_transfer``: converted attentions learn what the softmax attentions of a teacher give."""

from dataclasses import dataclass
from typing import Any

import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import ChoiceEnum
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask
from omegaconf import II
from torch import Tensor, nn

from common.attention import LolcatsAttention
from common.imitation import IMITATION_LOSSES, check_imitates

from ..distill.attention_transfer import AttentionLoss, check_pair, share_memory, transfer
from ..distill.teacher import Teacher, TeacherConfig, bare, check_of_pair
from ..loading.known_options import option_field
from ..modules.converted import converted_attentions
from ..modules.cross_attention import InnerCrossAttention

#: Most groups of layers that are logged of the encoder, of the decoder and of its cross-attention.
_GROUPS = 4
#: How entries of a logging output end that are sums over the queries of a group.
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
class AttentionTransferCriterion(FairseqCriterion):
    """The distance of each converted attention from the teacher's softmax attention, on the same inputs.

    For language models, masked models and encoder-decoders that begin with the teacher's weights; see
    ``fairseq_plugin.distill.attention_transfer``. Only the student's attentions run; its softmax attentions stay as
    they are. ``--lineartime-trained-parameters`` says which parameters learn. The loss is the mean over attentions and
    real queries; means over groups of layers are logged too.

    Raises:
        ValueError: no teacher, or one of other sizes, another vocabulary or task; a student without converted attention
            or in which more learns than that; weights of an attention that has none of this kind; data parallelism in
            which attentions that are called by themselves are not reduced.
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
        super().__init__(task)
        self.teacher = Teacher(teacher, task, ddp_backend)
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

    def train(self, mode: bool = True) -> "AttentionTransferCriterion":
        """torch's, and fairseq's sign that an update follows: a teacher that cannot be read is said before it."""
        if mode:
            self.teacher.read()
        return super().train(mode)

    def forward(self, model: nn.Module, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, float, dict]:
        """The mean over attentions of losses that are summed over real queries, the mean number of these, and the log.

        With ``reduce`` False the loss of each attention, which add up to the former.
        """
        student = bare(model)
        teacher = self.teacher.beside(student)
        if not self._checked:
            with check_of_pair():
                self._check(student, teacher)
        losses = transfer(student, teacher, sample["net_input"], self.padding_idx, self.loss, self._part(model))
        count = len(losses)
        totals = torch.stack([each.total for each in losses.values()]) / count
        if self.window_dropout > 0.0 and model.training:  # a gradient for each parameter, in all processes alike
            totals = totals + 0.0 * sum(x.sum() for x in student.parameters() if x.requires_grad)
        sample_size = float(sum(each.queries for each in losses.values())) / count
        logging_output = {
            "loss": totals.sum().detach(),
            "sample_size": sample_size,
            "nsentences": sample["nsentences"],
            "ntokens": sample["ntokens"],
            **_by_group(converted_attentions(student), losses),
        }
        return totals.sum() if reduce else totals, sample_size, logging_output

    def _part(self, model: nn.Module) -> str | None:
        """The part of LoLCATs that is computed alone. fairseq seeds torch's generator with the number of the update."""
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
        """Log the mean loss and that of each group of layers, over all workers."""
        sums = {name: sum(log.get(name, 0) for log in logging_outputs) for name in logging_outputs[0]}
        metrics.log_scalar("loss", sums["loss"] / sums["sample_size"], sums["sample_size"], round=4)
        for name in [name.removesuffix(_SUM) for name in sums if name.endswith(_SUM)]:
            queries = sums[name + _QUERIES]
            metrics.log_scalar(name, sums[name + _SUM] / queries, queries, round=4)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """fairseq's hook: True."""
        return True


def _by_group(attentions: dict[str, nn.Module], losses: dict[str, AttentionLoss]) -> dict[str, Any]:
    """Sums over groups of neighbouring layers: ``decoder_0-2_sum`` and how many queries they are of."""
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
    """The number of the layer that a module belongs to."""
    return name.partition(".layers.")[2].partition(".")[0]
