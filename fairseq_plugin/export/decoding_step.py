"""One decoding step of a language model as a module whose state comes in and goes out, for ``torch.export``.

``python -m fairseq_plugin.export_step`` writes it to a file; this is the same in Python.
"""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from fairseq.modules import CharacterTokenEmbedder
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from common.attention import InnerAttention
from common.modules.gated_attention_unit import GatedAttentionUnit
from common.ops.shared.checks import check_positive_int
from common.ops.shared.state import largest_states

from ..models._decoder import LinearTimeDecoder
from ..modules.multihead_attention import IncrementalState
from ..modules.named_states import named_state, state_of
from ..modules.positions import ComputedSinusoids, SinusoidalPositions
from .onnx_operators import DECOMPOSITIONS


class Entry(NamedTuple):
    """One tensor of the decoding state, of one row."""

    name: str  # LAYER.ENTRY, or decoder.count, how many real tokens the row had
    shape: tuple[int, ...]  # after the batch
    dtype: torch.dtype
    fill: float | int | bool  # every number of it before the first token


class DecodingStep(nn.Module):
    """``step(tokens, order, *past) -> (logits, *present)``, for a language model whose decoding state is constant.

    A state with a largest size counts as constant: here it has that size from the beginning.
    tokens (B, n) are the next ones of B sequences; one or many, with padding anywhere, which changes no state. order
    (B,) says which row of ``past`` each goes on from, so that beams, and samples of one prompt, need no other call.
    logits (B, V) are of what follows each row's last real token (a row that is all padding has none that mean
    anything); log-probabilities where the softmax is adaptive. ``past`` and ``present`` are the tensors of ``entries``,
    batch first; ``initial_state`` is the past of a sequence that begins.

    A model that was trained with ``--lineartime-reset-at-eos`` begins anew at each eos: the state before it, and the
    tokens before it in the same call, are not looked at.

    Nothing in it depends on values, so that it can be exported; nothing checks ``max_tokens`` either, which is that of
    a document where they begin anew. The weights are a copy. Cost and memory are those of the mechanism for n tokens.

    Raises:
        ValueError: a model of another kind, whose decoding state grows, or whose embeddings are not of tokens alone.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        decoder = getattr(model, "decoder", None)
        if not isinstance(decoder, LinearTimeDecoder) or hasattr(model, "encoder"):
            raise ValueError(f"the model is a {type(model).__name__}; allowed: language models of this plugin")
        if not isinstance(decoder.embed_tokens, nn.Embedding):
            given = "--character-embeddings" if _has(decoder, CharacterTokenEmbedder) else "--adaptive-input"
            raise ValueError(f"the model has {given}; allowed: a vector for each token, without that option")
        self.decoder = copy.deepcopy(decoder).requires_grad_(False)
        self._resets = decoder.resets_at_eos
        if self._resets:
            self.decoder.documents.resets = False  # its documents get rows of their own, as many as values say
        #: The most tokens of a sequence for which the model has weights; None for any number.
        self.max_tokens = decoder.max_tokens
        self.decoder.max_tokens = None  # a limit would look at the counts
        # Otherwise fairseq looks whether there is padding; with this, layers always have a mask.
        self.decoder.cross_self_attention = True
        if isinstance(self.decoder.embed_positions, SinusoidalPositions):
            self.decoder.embed_positions = ComputedSinusoids(self.decoder.embed_positions)
        self.eval()
        self.entries = self._find_entries()

    def forward(self, tokens: Tensor, order: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """See the class."""
        names = [entry.name for entry in self.entries]
        if self._resets:
            tokens, order, past = self._from_last_eos(tokens, order, past)
        state = state_of(self.decoder, {self._names[name]: x for name, x in zip(names, past, strict=True)}, order)
        features = self.decoder.extend_features(tokens, state)[0]
        if tokens.shape[1] > 1:
            real = tokens.ne(self.decoder.padding_idx)
            last = (real.cumsum(1) * real).argmax(1)  # the last real token of each row
            features = features.gather(1, last[:, None, None].expand(-1, 1, features.shape[2]))
        present = self._taken(state)
        return (self._logits(features)[:, 0], *(present[name] for name in names))

    def _from_last_eos(
        self, tokens: Tensor, order: Tensor, past: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """Arguments of ``forward`` in which padding and an empty state replace what is before each row's last eos."""
        ends = tokens.eq(self.decoder.dictionary.eos())
        begins, later = ends.any(1), ends.flip(1).cumsum(1).flip(1) - ends.long()  # eos after each token
        fresh = [
            torch.where(begins.view(-1, *[1] * len(entry.shape)), entry.fill, x.index_select(0, order))
            for entry, x in zip(self.entries, past, strict=True)
        ]
        tokens = tokens.masked_fill(later > 0, self.decoder.padding_idx)
        return tokens, torch.arange(tokens.shape[0], device=tokens.device), fresh

    def initial_state(self, rows: int = 1) -> list[Tensor]:
        """The past of ``rows`` sequences that begin."""
        return [torch.full((rows, *entry.shape), entry.fill, dtype=entry.dtype) for entry in self.entries]

    def _logits(self, features: Tensor) -> Tensor:
        if self.decoder.adaptive_softmax is None:
            return self.decoder.output_layer(features)
        return self.decoder.adaptive_softmax.get_log_prob(features, None)

    @torch.no_grad()
    def _find_entries(self) -> list[Entry]:
        """Entries of the state before the first token, in its largest size; reading one padded token gives it."""
        for module in self.decoder.modules():
            if isinstance(module, (InnerAttention, GatedAttentionUnit)) and module.state_tokens() is None:
                name = getattr(module, "name", "") or type(module).__name__
                raise ValueError(
                    f"the model's decoding state grows with every token, in attention {name!r}; allowed: a mechanism "
                    "whose state has a largest size"
                )
        state: IncrementalState = {}
        with largest_states():
            self.decoder.extend_features(torch.tensor([[self.decoder.padding_idx]]), state)
        self._names = {_flat(name): name for name in named_state(self.decoder, state)}
        first = self._taken(state)
        return [
            Entry(name, tuple(x.shape[1:]), x.dtype, _fill(name, x)) for name, x in sorted(first.items(), key=_place)
        ]

    def _taken(self, state: IncrementalState) -> dict[str, Tensor]:
        """The tensors of ``state`` by their names here."""
        return {_flat(name): x for name, x in named_state(self.decoder, state).items()}


def export_program(step: DecodingStep, tokens: int = 1) -> ExportedProgram:
    """``torch.export`` of ``step`` for so many tokens in a call, and any number of rows before and after it.

    Raises:
        ValueError: ``tokens`` is less than 1.
    """
    check_positive_int("--prompt-tokens", tokens)
    rows, before = 3, 2  # torch takes an example of one row for a step of one row
    example = torch.full((rows, tokens), step.decoder.dictionary.unk())
    past = tuple(step.initial_state(before))
    sizes = {0: Dim("rows", min=1, max=1 << 20)}
    sizes_before = {0: Dim("rows_before", min=1, max=1 << 20)}
    shapes = (sizes, sizes, tuple(sizes_before for _ in past))
    with torch.no_grad():
        program = torch.export.export(
            step, (example, torch.zeros(rows, dtype=torch.int64), *past), dynamic_shapes=shapes, strict=False
        )
        return program.run_decompositions(DECOMPOSITIONS)


def _flat(name: str) -> str:
    """The name here of a tensor that ``named_state`` calls layers.LAYER.MODULE.KEY.ENTRY, or .KEY.ENTRY."""
    first, _, rest = name.partition(".")
    layer = rest.partition(".")[0] if first == "layers" else "decoder"
    return f"{layer}.{name.rpartition('.')[2]}"


def _place(named: tuple[str, Tensor]) -> tuple[int, str]:
    """Sort key of a named tensor: the decoder's own come first, then those of each layer in turn."""
    layer, _, entry = named[0].partition(".")
    return (int(layer) if layer.isdigit() else -1), entry


def _has(module: nn.Module, kind: type) -> bool:
    return any(isinstance(part, kind) for part in module.modules())


def _fill(name: str, x: Tensor) -> float | int | bool:
    """The number that all of ``x`` are."""
    values = x.unique()
    if len(values) != 1:
        raise ValueError(f"{name} of the model's decoding state begins with several numbers; allowed: one")
    return values.item()
