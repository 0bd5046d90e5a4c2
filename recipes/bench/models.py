"""Models of fairseq in one shape for all architectures, their training steps, and the states of their decoding."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.attention import InnerAttention
from common.modules.gated_attention_unit import GatedAttentionUnit
from common.ops import mixed_chunk

from .. import models
from .measure import Place, error
from .peers import attention_maps

#: Words of the vocabulary: few, so that the output layer is small; fairseq adds four symbols.
WORDS = 996
#: Gated attention units, two of which count as one layer.
UNITS = ("flash_lm", "flash_quad_lm")
State = dict[str, dict[str, Tensor | None]]


def built(command: Iterable[object]) -> nn.Module:
    """The model that ``fairseq-train`` builds, from a fixed seed."""
    torch.manual_seed(1)
    return models.build(["--dropout", "0", *command], models.dictionary_of(WORDS + 4))


def language_model(architecture: str, width: int, layers: int, positions: int) -> nn.Module:
    """Pre-norm layers with heads of at most 64 channels, without dropout; ``positions`` is the longest length.

    Options may follow the name of the architecture, as in "linear_lm --linear-forget head".
    """
    architecture, *options = architecture.split()
    command = ["--task", "language_modeling", "--arch", architecture, *options, "--tokens-per-sample", positions]
    command += ["--share-decoder-input-output-embed"]
    for option in ("embed", "input", "output"):
        command += [f"--decoder-{option}-dim", width]
    command += ["--decoder-layers", 2 * layers if architecture in UNITS else layers]
    if architecture not in UNITS:
        command += ["--decoder-attention-heads", max(1, width // 64)]
        if architecture != "transformer_pp_lm":  # Transformer++ has a feed-forward block of its own
            command += ["--decoder-ffn-embed-dim", 4 * width, "--decoder-normalize-before"]
    model = built(command)
    for unit in model.modules():
        if isinstance(unit, GatedAttentionUnit):  # their weights start near zero, which would hide an error
            nn.init.normal_(unit.in_proj.weight, std=2.0 * unit.dim**-0.5)
            nn.init.normal_(unit.out_proj.weight, std=unit.expanded_dim**-0.5)
            for parameter in (unit.gamma, unit.beta):
                nn.init.normal_(parameter)
            for parameter in unit.bias.parameters():
                nn.init.normal_(parameter, std=0.3)
    return model


def tokens(size: int, rows: int = 1) -> Tensor:
    """Sequences of random words (``rows``, ``size``) without padding."""
    return torch.randint(4, WORDS, (rows, size), generator=torch.Generator().manual_seed(2))


def next_token_loss(model: nn.Module, words: Tensor) -> Tensor:
    """Cross-entropy of the next token at each of ``words`` (B, n); the first token follows the last."""
    logits, _ = model(words)
    return F.cross_entropy(logits.flatten(0, 1).float(), words.roll(-1, 1).flatten())


def training_step(loss: Callable[[], Tensor], parameters: Iterable[Tensor]) -> Callable[[], list[Tensor]]:
    """A function that does one update of ``parameters`` with AdamW and leaves no gradients behind."""
    optimizer = torch.optim.AdamW(list(parameters), lr=1e-4)

    def step() -> list[Tensor]:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        return []

    return step


def training_errors(
    loss: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    reference: Callable[[], Tensor],
    reference_parameters: Sequence[Tensor],
    literal: AbstractContextManager | None = None,
) -> dict[str, float]:
    """Errors of a loss and of its gradients, which are one vector, since some are only rounding errors.

    ``literal`` is entered for both passes of the reference: a layer may compute its output again in the backward pass.
    """

    def both(loss: Callable[[], Tensor], parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        value = loss()
        gradients = torch.autograd.grad(value, parameters)
        return value.detach(), torch.cat([x.double().flatten() for x in gradients])

    actual = both(loss, parameters)
    with literal or nullcontext():
        expected = both(reference, reference_parameters)
    return {name: error(x, y) for name, x, y in zip(("loss", "gradient"), actual, expected)}


@contextmanager
def attention_written_out() -> Iterator[None]:
    """Compute gated attention units and fused softmax attention by maps of all pairs of tokens."""

    def literal(*heads: Tensor, chunk_size: int, bias: Tensor | None = None, **_: Any) -> Tensor:
        return attention_maps.mixed_chunk_attention(*heads, chunk_size=chunk_size, bias=bias)

    with mock.patch.object(mixed_chunk, "mixed_chunk_attention", literal), sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def attention_by_reference(model: nn.Module) -> Iterator[None]:
    """Compute every attention of ``model`` by its literal ``reference``, without dropout."""

    def literal(attention: InnerAttention, *inputs: Tensor | float, dropout_p: float = 0.0, **further: Any) -> Tensor:
        return attention.reference(*inputs[:5], **further)  # q, k, v and two masks

    with ExitStack() as patches:
        for module in model.modules():
            if isinstance(module, InnerAttention):
                patches.enter_context(mock.patch.object(module, "forward", partial(literal, module)))
        yield


def layer_inputs(decoder: nn.Module, forward: Callable[[], tuple]) -> tuple[list[Tensor], Tensor]:
    """The inputs (n, B, C) of a decoder's layers in a forward pass, and the logits after the last token."""
    inputs: list[Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0])) for layer in decoder.layers]
    try:
        with torch.no_grad():
            logits = forward()[0][:, -1]
    finally:
        for hook in hooks:
            hook.remove()
    return inputs, logits


def fill_cache(attention: nn.Module, x: Tensor, state: State) -> None:
    """Fill the cache of one of fairseq's own self-attentions from its input x (T, B, C)."""

    def heads(projected: Tensor) -> Tensor:  # (T, B, C) -> (B, H, T, d)
        return projected.unflatten(-1, (attention.num_heads, -1)).permute(1, 2, 0, 3).contiguous()

    keys, values = heads(attention.k_proj(x)), heads(attention.v_proj(x))
    attention._set_input_buffer(state, {"prev_key": keys, "prev_value": values, "prev_key_padding_mask": None})


def decoding_step(
    decoder: nn.Module, words: Tensor, order: Tensor, state: State, encoder_out: Callable[[], Any] = lambda: None
) -> Callable[[], list[Tensor]]:
    """A step of fairseq's generator without the choice of words: reorder the beam, then the logits after ``words``.

    ``words`` (B, n) are the rows after the reorder, and ``state`` holds all but the last token of the rows before it.
    """

    @torch.no_grad()
    def step() -> list[Tensor]:
        # A step replaces tensors of the state and never changes them, so a shallow copy suffices.
        copy = {name: dict(entry) for name, entry in state.items()}
        if len(order) > 1:
            decoder.reorder_incremental_state_scripting(copy, order)
        logits, _ = decoder(words, encoder_out(), copy)
        return [logits[:, -1]]

    return step


def placed(model: nn.Module, place: Place) -> nn.Module:
    """The model on a device, in evaluation mode: random features draw no new directions, and nothing is dropped."""
    place(model).eval()  # returns None after fairseq's make_generation_fast_
    return model
