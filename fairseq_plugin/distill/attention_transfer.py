"""Attention transfer: a converted attention learns to reproduce softmax attention on the same inputs.

The teacher's layers run, and at each of its attentions the student's attention is computed from the same inputs.
The losses are those of ``common.imitation``.

Legend: B batch, T queries, S keys, C width.
"""

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.attention import LolcatsAttention, SoftmaxAttention, only_part
from common.checkpoints import listed
from common.imitation import IMITATION_LOSSES

from ..modules.converted import Converted, converted_attentions
from ..modules.cross_attention import InnerCrossAttention
from ..modules.multihead_attention import InnerMultiheadAttention, project_heads, read_padding

#: Attributes, in addition to weights, that must be equal in modules of the same name.
_ALIKE = ("num_heads", "normalize_before", "activation_fn", "embed_scale")


class Call(NamedTuple):
    """The inputs of one call of an attention."""

    query: Tensor  # (T, B, C)
    key: Tensor  # (S, B, C)
    key_padding_mask: Tensor | None  # (B, S), True = padding
    query_padding_mask: Tensor | None  # (B, T)
    segment_ids: Tensor | None  # (B, S), the documents of a row


class AttentionLoss(NamedTuple):
    """The loss of one attention, summed over the real queries of a batch."""

    total: Tensor
    queries: Tensor  # their number, as a tensor: fairseq reduces numbers and tensors of a log separately


def check_pair(student: nn.Module, teacher: nn.Module, path: str) -> None:
    """Raise ValueError unless ``student`` and ``teacher``, loaded from ``path``, only differ in their attention.

    Compares everything that both have except parameters that learn, and checks that the teacher has softmax attention
    where the student's is converted.
    """
    if _resets_at_eos(student) != _resets_at_eos(teacher):
        which = "is given" if _resets_at_eos(student) else "is not given"
        raise ValueError(f"--lineartime-reset-at-eos {which}; allowed with --teacher {path!r}: as the teacher has it")
    for difference in (*_differing_parameters(student, teacher), *_differing_modules(student, teacher)):
        raise ValueError(
            f"--teacher {path!r} is not the model that the student begins with: {difference}; allowed: the file "
            "of which python -m fairseq_plugin.convert made the one that --finetune-from-model names, and its options"
        )


def share_memory(student: nn.Module, teacher: nn.Module) -> None:
    """Let ``teacher`` share the memory of parameters of ``student`` that do not learn."""
    student_parameters = _parameters(student)
    for name, parameter in teacher.named_parameters(remove_duplicate=False):
        if not student_parameters[name].requires_grad:
            parameter.data = student_parameters[name].data


def transfer(
    student: nn.Module,
    teacher: nn.Module,
    net_input: dict[str, Tensor],
    padding_idx: int,
    loss: str,
    part: str | None = None,
) -> dict[str, AttentionLoss]:
    """The loss of each converted attention of ``student``, by name, in one pass of ``teacher``.

    Gradients only reach the student's attentions, since the teacher computed their inputs. ``loss`` is a name in
    ``IMITATION_LOSSES``, ``part`` the part of LoLCATs that is computed, as in ``common.attention.only_part``; None
    computes all of it. Memory holds the maps of one layer at a time.
    """
    losses: dict[str, AttentionLoss] = {}
    has_gradient = torch.is_grad_enabled()
    targets = net_input.get("prev_output_tokens")

    def compare(name: str, attention: Converted, module: nn.Module, args: tuple, inputs: dict, output: Any) -> None:
        call = _call(attention, module, inputs, None if targets is None else targets.eq(padding_idx))
        with torch.set_grad_enabled(has_gradient):
            arguments = (loss, attention, module, call, part)
            if has_gradient and loss == "weights":  # recomputed in the backward pass, layer by layer
                query_losses = checkpoint(_loss_of_queries, *arguments, use_reentrant=False)
            else:
                query_losses = _loss_of_queries(*arguments)
            losses[name] = _sum_of_real(query_losses, call.query_padding_mask)

    modules = dict(teacher.named_modules())
    hooks = [
        modules[name].register_forward_hook(partial(compare, name, attention), with_kwargs=True)
        for name, attention in converted_attentions(student).items()
    ]
    for layer in modules.values():
        if hasattr(layer, "need_attn"):
            layer.need_attn = False  # weights of cross-attention, which decoders return in evaluation
    try:
        with torch.no_grad():
            teacher(**net_input, **_least_work(teacher))
    finally:
        for hook in hooks:
            hook.remove()
    return losses


def _least_work(model: nn.Module) -> dict[str, bool]:
    """Arguments of ``model`` that leave out logits and outputs of layers, as far as it takes them."""
    arguments = {"features_only": True, "return_all_hiddens": False}
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):  # handed on to a decoder
        return arguments
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}  # models of audio lack one or both


def _differing_parameters(student: nn.Module, teacher: nn.Module) -> Iterator[str]:
    """Describe differences of the parameters: present in one model only, other shapes, other values."""
    new = tuple(f"{name}.inner." for name in converted_attentions(student))
    student_parameters, teacher_parameters = _parameters(student), _parameters(teacher)
    in_one = [
        name for name in sorted(student_parameters.keys() ^ teacher_parameters.keys()) if not name.startswith(new)
    ]
    both = sorted(student_parameters.keys() & teacher_parameters.keys())
    shapes = [name for name in both if student_parameters[name].shape != teacher_parameters[name].shape]
    frozen = [name for name in both if name not in shapes and not student_parameters[name].requires_grad]
    values = [name for name in frozen if not torch.equal(student_parameters[name], teacher_parameters[name])]
    kinds = {"of other shapes": shapes, "in one of the two alone": in_one, "of other values": values}
    yield from (f"{len(names)} parameters are {what}{listed(names)}" for what, names in kinds.items() if names)


def _differing_modules(student: nn.Module, teacher: nn.Module) -> Iterator[str]:
    """Describe differences of the teacher's modules: no softmax attention, or other ``_ALIKE`` attributes."""
    teacher_modules = dict(teacher.named_modules())
    not_softmax = [name for name in converted_attentions(student) if not _is_softmax(teacher_modules.get(name))]
    if not_softmax:
        yield f"{len(not_softmax)} attentions are no softmax attention there{listed(not_softmax)}"
    for name, module in student.named_modules():
        for attribute in _ALIKE if name in teacher_modules else ():
            value, teacher_value = (_described(getattr(x, attribute, None)) for x in (module, teacher_modules[name]))
            if value != teacher_value:
                yield f"{name}.{attribute} is {teacher_value}, and {value} in the student"


def _call(attention: Converted, module: nn.Module, inputs: dict[str, Any], target_mask: Tensor | None) -> Call:
    """The inputs with which fairseq's layer called ``module``, the teacher's attention, for ``attention``."""
    query, key, mask = inputs["query"], inputs["key"], read_padding(inputs["key_padding_mask"])
    if isinstance(attention, InnerCrossAttention):
        return Call(query, key, mask, read_padding(target_mask), None)
    segment_ids = getattr(module, "segment_ids", None)
    return Call(query, key, mask, None if mask is None else mask[:, -len(query) :], segment_ids)


def _loss_of_queries(
    loss: str, student: Converted, teacher: MultiheadAttention, call: Call, part: str | None
) -> Tensor:
    """The loss (B, T) of each query: the student's inner attention compared with softmax attention."""
    method = IMITATION_LOSSES[loss].method
    is_cross = isinstance(student, InnerCrossAttention)
    softmax = SoftmaxAttention(causal=student.inner.causal)
    # Self-attention may read the source before the target: then queries of the source are computed and left out.
    query = call.query if is_cross else call.key
    masks = _masks(call, is_cross)
    masks |= {} if call.segment_ids is None else {"segment_ids": call.segment_ids}
    with torch.no_grad():
        target = getattr(softmax, method)(*project_heads(teacher, query, call.key), **masks)
    extra_inputs = student.extra_inputs(call.key)
    in_part = part is not None and isinstance(student.inner, LolcatsAttention)
    with only_part(student, part) if in_part else nullcontext():
        result = getattr(student.inner, method)(*project_heads(student, query, call.key), **masks, **extra_inputs)
    return IMITATION_LOSSES[loss].of(*(x[:, :, -len(call.query) :] for x in (result, target)))


def _masks(call: Call, is_cross: bool) -> dict[str, Tensor | None]:
    """The masks of keys and queries; if only one is given, the other has no padding."""
    key_mask = call.key_padding_mask
    if not is_cross:
        return {"key_padding_mask": key_mask, "query_padding_mask": key_mask}
    query_mask = call.query_padding_mask
    batch, device = call.key.shape[1], call.key.device
    no_padding = [torch.zeros(batch, len(x), dtype=torch.bool, device=device) for x in (call.key, call.query)]
    both = [default if mask is None else mask for mask, default in zip((key_mask, query_mask), no_padding)]
    return dict(zip(("key_padding_mask", "query_padding_mask"), both))


def _sum_of_real(losses: Tensor, padding_mask: Tensor | None) -> AttentionLoss:
    if padding_mask is None:
        return AttentionLoss(losses.sum(), losses.new_full((), losses.numel(), dtype=torch.long))
    return AttentionLoss(losses.masked_fill(padding_mask, 0.0).sum(), (~padding_mask).sum())


def _is_softmax(attention: nn.Module | None) -> bool:
    """Whether ``attention`` is fairseq's own with default options, or our softmax attention."""
    if isinstance(attention, InnerMultiheadAttention):
        return isinstance(attention.inner, SoftmaxAttention) and attention.gate_proj is None
    special = ("inner", "bias_k", "add_zero_attn", "use_xformers")
    return isinstance(attention, MultiheadAttention) and not any(
        getattr(attention, name, None) not in (None, False) for name in special
    )


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name; shared parameters appear under all of their names."""
    return dict(model.named_parameters(remove_duplicate=False))


def _resets_at_eos(model: nn.Module) -> bool:
    return any(getattr(module, "resets", False) for module in model.modules())


def _described(value: Any) -> Any:
    return getattr(value, "__name__", value)
