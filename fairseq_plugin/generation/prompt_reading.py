"""Reads many tokens of a prompt at once with the decoder of our language models or of ``transformer_lm``."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from fairseq.models.transformer import TransformerDecoderBase
from torch import Tensor, nn

from ..models._decoder import LinearTimeDecoder
from ..modules.chunked_prefill import layers_after
from ..modules.multihead_attention import IncrementalState


def check_readable(model: nn.Module) -> None:
    """Raise ValueError unless ``model`` is a language model with fairseq's Transformer decoder or ours."""
    if hasattr(model, "encoder") or not isinstance(getattr(model, "decoder", None), TransformerDecoderBase):
        raise ValueError(
            f"the model is a {type(model).__name__}; allowed with prompts that are read in one pass: language models "
            "of this plugin and transformer_lm"
        )


def counts_tokens(decoder: nn.Module) -> bool:
    """Whether ``decoder`` counts the tokens that it has read; fairseq's uses the number of columns of its input."""
    return isinstance(decoder, LinearTimeDecoder)


def read_block(
    decoder: TransformerDecoderBase, tokens: Tensor, begin: int, end: int, incremental_state: IncrementalState
) -> Tensor:
    """Features (B, end - begin, C) of ``tokens[:, begin:end]``, given the state after the earlier tokens.

    ``tokens`` (B, n) have no padding. The state is updated in place. O(end - begin) if the mechanism is linear;
    (end - begin) x ``end`` scores for fairseq's own attention.
    """
    if counts_tokens(decoder):
        return decoder.extend_features(tokens[:, begin:end], incremental_state)[0]
    scores = next(decoder.parameters()).new_full((end - begin, end), -math.inf)
    with (
        layers_after(decoder.layers, incremental_state, scores.triu(begin + 1)),
        _positions_within(decoder.embed_positions, tokens[:, :end], begin),
    ):
        return decoder.extract_features(tokens[:, begin:end], None)[0]


@contextmanager
def _positions_within(embed_positions: nn.Module | None, tokens: Tensor, begin: int) -> Iterator[None]:
    """Inside, fairseq's ``embed_positions``, which has no offset, embeds ``tokens`` and returns ``[:, begin:]``."""
    if embed_positions is None:
        yield
        return
    hooks = (
        embed_positions.register_forward_pre_hook(lambda module, args, kwargs: ((tokens,), kwargs), with_kwargs=True),
        embed_positions.register_forward_hook(lambda module, args, embedded: embedded[:, begin:]),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
