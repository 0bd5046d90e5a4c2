"""One decoding step of a language model as a module with the state as input and output, for ``torch.export``.

``python -m fairseq_plugin.export_step`` writes it to a file; this is the Python interface.
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
    """One tensor of the decoding state, for one row."""

    name: str  # LAYER.ENTRY, or decoder.count, the number of real tokens of the row so far
    shape: tuple[int, ...]  # without the batch dimension
    dtype: torch.dtype
    fill: float | int | bool  # the value of all its elements before the first token


class DecodingStep(nn.Module):
    """``step(tokens, order, *past) -> (logits, *present)``, for language models with a decoding state of constant size.

    A state with a largest size counts as constant: here it has that size from the beginning.
    tokens (B, n) are the next tokens of B sequences, one or many, with padding anywhere, which changes no state. order
    (B,) is the row of ``past`` from which each sequence continues, so beams, and samples of one prompt, need no other
    call. logits (B, V) predict the token after each row's last real token (they are meaningless for a row of padding);
    with an adaptive softmax they are log-probabilities. ``past`` and ``present`` are the tensors of ``entries``, batch
    first; ``initial_state`` is the past at the beginning of a sequence.

    A model that was trained with ``--lineartime-reset-at-eos`` restarts at each eos: the earlier state, and earlier
    tokens of the same call, are ignored.

    Control flow does not depend on values, so it can be exported. Therefore ``max_tokens`` is not checked; with
    restarts, it is the limit of a document. The weights are copied. Cost and memory are those of the mechanism for n
    tokens.

    Raises:
        ValueError: the model is of another kind, its decoding state grows, or it embeds more than single tokens.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        decoder = getattr(model, "decoder", None)
        if not isinstance(decoder, LinearTimeDecoder) or hasattr(model, "encoder"):
            raise ValueError(f"the model is a {type(model).__name__}; allowed: language models of this plugin")
        if not isinstance(decoder.embed_tokens, nn.Embedding):
            option = "--character-embeddings" if _has(decoder, CharacterTokenEmbedder) else "--adaptive-input"
            raise ValueError(f"the model has {option}; allowed: a vector for each token, without that option")
        self.decoder = copy.deepcopy(decoder).requires_grad_(False)
        self._resets = decoder.resets_at_eos
        if self._resets:
            self.decoder.documents.resets = False  # it makes a row per document, so shapes depend on values
        #: The longest sequence for which the model has weights; None for any length.
        self.max_tokens = decoder.max_tokens
        self.decoder.max_tokens = None  # checking a limit would depend on values
        # Otherwise fairseq checks whether there is padding; with this, layers always get a mask.
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
        """Arguments of ``forward`` with padding and an empty state in place of all before each row's last eos."""
        ends = tokens.eq(self.decoder.dictionary.eos())
        begins, later = ends.any(1), ends.flip(1).cumsum(1).flip(1) - ends.long()  # the number of eos after each token
        fresh = [
            torch.where(begins.view(-1, *[1] * len(entry.shape)), entry.fill, x.index_select(0, order))
            for entry, x in zip(self.entries, past, strict=True)
        ]
        tokens = tokens.masked_fill(later > 0, self.decoder.padding_idx)
        return tokens, torch.arange(tokens.shape[0], device=tokens.device), fresh

    def initial_state(self, rows: int = 1) -> list[Tensor]:
        """The past of ``rows`` new sequences."""
        return [torch.full((rows, *entry.shape), entry.fill, dtype=entry.dtype) for entry in self.entries]

    def _logits(self, features: Tensor) -> Tensor:
        if self.decoder.adaptive_softmax is None:
            return self.decoder.output_layer(features)
        return self.decoder.adaptive_softmax.get_log_prob(features, None)

    @torch.no_grad()
    def _find_entries(self) -> list[Entry]:
        """The entries of the state before the first token, in its largest size, found by reading one padding token."""
        for module in self.decoder.modules():
            if isinstance(module, (InnerAttention, GatedAttentionUnit)) and module.state_tokens() is None:
                name = getattr(module, "name", "") or type(module).__name__
                raise ValueError(
                    f"the model's decoding state grows with every token, in attention {name!r}; allowed: an "
                    "--arch, or --lineartime-layers, of mechanisms whose states have a largest size"
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
        """The tensors of ``state`` by entry name."""
        return {_flat(name): x for name, x in named_state(self.decoder, state).items()}


def export_program(step: DecodingStep, tokens: int = 1) -> ExportedProgram:
    """``torch.export`` of ``step`` for ``tokens`` tokens per call and any numbers of rows before and after it.

    Raises:
        ValueError: ``tokens`` is less than 1.
    """
    check_positive_int("--prompt-tokens", tokens)
    rows, before = 3, 2  # with an example of one row, torch would fix the number of rows
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
    """The entry name of a tensor that ``named_state`` calls layers.LAYER.MODULE.KEY.ENTRY, or .KEY.ENTRY."""
    first, _, remaining = name.partition(".")
    layer = remaining.partition(".")[0] if first == "layers" else "decoder"
    return f"{layer}.{name.rpartition('.')[2]}"


def _place(named: tuple[str, Tensor]) -> tuple[int, str]:
    """The sort key of a named tensor: the decoder's own first, then layer by layer."""
    layer, _, entry = named[0].partition(".")
    return (int(layer) if layer.isdigit() else -1), entry


def _has(module: nn.Module, kind: type) -> bool:
    return any(isinstance(part, kind) for part in module.modules())


def _fill(name: str, x: Tensor) -> float | int | bool:
    """The value that all elements of ``x`` have."""
    values = x.unique()
    if len(values) != 1:
        raise ValueError(f"{name} of the model's decoding state begins with several numbers; allowed: one")
    return values.item()
