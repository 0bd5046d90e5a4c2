"""Trainings and measurements of text encoders: attention transfer, distillation of hidden states, and embeddings.

Legend: N texts, B texts of a batch, T tokens, D width.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from fairseq.data.data_utils import collate_tokens
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from fairseq_plugin.distill.attention_transfer import transfer

#: Texts that are embedded at a time.
_BATCH = 64
#: How often in stage 1 the linear part of a form with a window learns by itself.
LINEAR_ALONE = 0.5


def draw_batches(texts: Sequence[Tensor], size: int, count: int, padding: int, seed: int) -> list[Tensor]:
    """``count`` batches (B, T) of ``size`` texts, each of which is drawn by itself."""
    drawn = np.random.default_rng(seed).integers(len(texts), size=(count, size))
    return [collate_tokens([texts[i] for i in chosen], padding) for chosen in drawn]


def hidden_states(model: nn.Module, tokens: Tensor) -> Tensor:
    """The outputs of all layers (L, B, T, D) for ``tokens`` (B, T)."""
    _, extra = model(tokens, features_only=True, return_all_hiddens=True)
    return torch.stack(extra["inner_states"][1:]).transpose(1, 2)


def pooled(states: Tensor, real: Tensor) -> Tensor:
    """The mean over ``real`` tokens (B, T) of ``states`` (B, T, D), with <s> and </s>, as sentence encoders have it."""
    weights = real[..., None].to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1)


@torch.no_grad()
def embed(model: nn.Module, texts: Sequence[Tensor], padding: int) -> Tensor:
    """The embeddings (N, D) of texts (T,), of length 1."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    parts = []
    for start in range(0, len(texts), _BATCH):
        tokens = collate_tokens([texts[i] for i in order[start : start + _BATCH]], padding)
        parts.append(pooled(model(tokens, features_only=True)[0], tokens.ne(padding)))
    return F.normalize(torch.cat(parts), dim=-1)[torch.tensor(order).argsort()]


def train_transfer(
    student: nn.Module, teacher: nn.Module, batches: list[Tensor], padding: int, lr: float, windowed: bool
) -> None:
    """Stage 1: the student's attentions imitate the teacher's, in those parameters that learn."""

    def loss(tokens: Tensor) -> Tensor:
        part = "linear" if windowed and torch.rand(()) < LINEAR_ALONE else None
        losses = transfer(student, teacher, {"src_tokens": tokens}, padding, "outputs", part).values()
        return sum(x.total for x in losses) / sum(x.queries for x in losses)

    _fit(student, loss, batches, lr, "stage 1")


def train_distillation(student: nn.Module, teacher: nn.Module, batches: list[Tensor], padding: int, lr: float) -> None:
    """Stage 2: all layers learn to have the teacher's outputs and embeddings; embeddings of tokens stay as they are.

    The loss is the squared error of the outputs of each layer over their squares, the mean over layers, and 1 minus the
    cosine of the embeddings of texts.
    """
    student.encoder.sentence_encoder.layers.requires_grad_(True)

    def loss(tokens: Tensor) -> Tensor:
        real = tokens.ne(padding)
        with torch.no_grad():
            wanted = hidden_states(teacher, tokens)
        states = hidden_states(student, tokens)
        errors = (states - wanted)[:, real].square().sum((1, 2)) / wanted[:, real].square().sum((1, 2))
        cosines = F.cosine_similarity(pooled(states[-1], real), pooled(wanted[-1], real), dim=-1)
        return errors.mean() + (1.0 - cosines).mean()

    _fit(student, loss, batches, lr, "stage 2")


def _fit(model: nn.Module, loss_of: Callable[[Tensor], Tensor], batches: list[Tensor], lr: float, title: str) -> None:
    """One update of the parameters that learn for each batch, by Adam, with warmup and a cosine to 0."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(learning, lr, betas=(0.9, 0.98))
    warmup = max(1, len(batches) // 10)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * i / len(batches)))
    )
    model.train()
    for tokens in tqdm(batches, desc=f"  {title}", unit=" updates", leave=False, disable=None):
        loss = loss_of(tokens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        rates.step()
    model.eval()
