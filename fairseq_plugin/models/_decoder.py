"""fairseq's Transformer decoder with our layers."""

from collections.abc import Callable
from typing import Any

from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerConfig, TransformerDecoder
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.utils import safe_getattr
from omegaconf import OmegaConf
from torch import Tensor, nn

from common.modules.norms import build_norm
from common.ops.shared.segments import documents_by_eos

from ..modules.carried_state import CarriedState
from ..modules.chunked_prefill import layers_after, positions_after
from ..modules.documents import ResetAtEos, read_documents, within_documents
from ..modules.multihead_attention import IncrementalState
from ..modules.not_exportable import NoTorchScript, check_not_exported
from ..modules.positions import check_count, check_length, count_real_tokens, find_max_tokens

# NormFormer options of transformer_lm that fairseq's TransformerConfig does not pass to the layers.
_NORMFORMER = ("scale_attn", "scale_fc", "scale_heads", "scale_resids")

#: The options that set the longest input.
_LENGTH_OPTIONS = "--max-target-positions or --tokens-per-sample"
#: The entry of a decoding state with the number of real tokens of each row so far.
_SEEN = "seen"

BuildLayer = Callable[[TransformerConfig, bool], nn.Module]


class LinearTimeDecoder(NoTorchScript, TransformerDecoder):
    """fairseq's ``TransformerDecoder`` with the layers that ``build_layer(cfg, no_encoder_attn)`` returns.

    ``build_positions`` converts fairseq's position embedding to the one that is used, which counts real tokens in every
    mode; ``norm`` names the final normalisation. No tensor of size T x T is allocated. With
    ``args.lineartime_reset_at_eos`` a document begins at each eos, and does not see earlier documents.

    Raises:
        ValueError: when called with more tokens than a part of the model has parameters for, or with
            ``full_context_alignment``.
    """

    __jit_unused_properties__ = ("resets_at_eos",)
    #: The ``Context`` of a part of a sequence, inside ``common.parallel.context_parallel``; otherwise None.
    context: Any = None

    def __init__(
        self,
        args,
        dictionary,
        embed_tokens,
        build_layer: BuildLayer,
        build_positions: Callable[[nn.Module], nn.Module] = count_real_tokens,
        norm: str = "layernorm",
        **host_options,
    ) -> None:
        self.build_layer = build_layer  # a plain attribute, read by build_decoder_layer inside __init__
        if OmegaConf.is_config(args):  # without the enums of fairseq's options, which cannot be pickled
            args = OmegaConf.create(OmegaConf.to_container(args, resolve=True, enum_to_str=True))
        super().__init__(args, dictionary, embed_tokens, **host_options)
        del self.build_layer  # it refers to the enums too
        complete_side(self, args, dictionary, build_positions, norm, self.embed_dim)

    def build_decoder_layer(self, args: TransformerConfig, no_encoder_attn: bool = False) -> nn.Module:
        """fairseq's hook: one layer, wrapped for activation checkpointing and sharding as fairseq wraps its own."""
        cfg = TransformerConfig.from_namespace(args)
        for option in _NORMFORMER:
            setattr(cfg, option, getattr(self.args, option, False))
        return wrap_layer(self.build_layer(cfg, no_encoder_attn), cfg)

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None = None,
        incremental_state: dict[str, dict[str, Tensor | None]] | CarriedState | None = None,
        full_context_alignment: bool = False,
        *alignment,
        **further,
    ) -> tuple[Tensor, dict[str, Any]]:
        """As fairseq's, after checks; with a ``CarriedState`` the tokens are the next block of a stream."""
        if full_context_alignment:
            raise ValueError("full_context_alignment is True; allowed: False, attention is causal by construction")
        if isinstance(incremental_state, CarriedState):
            state = incremental_state.open()
            extended = self.extend_features(prev_output_tokens, state)
            incremental_state.close(state)
            return extended
        if self.resets_at_eos:
            return self._extract_documents(prev_output_tokens, incremental_state, *alignment, **further)
        if self.get_incremental_state(incremental_state, _SEEN) is not None:
            return self.extend_features(prev_output_tokens[:, -1:], incremental_state)
        if self.context is not None and incremental_state is None:
            return self._features_of_part(prev_output_tokens)
        check_not_exported(self)
        check_length(prev_output_tokens, self.padding_idx, self.max_tokens, _LENGTH_OPTIONS)
        if encoder_out is not None:
            # fairseq's generator does not tell an encoder-decoder its beam size and never resets it.
            source_of_row = encoder_out.get("source_of_row")
            self.set_beam_size(source_of_row[0].shape[1] if source_of_row else 1)
        return self.extract_features_scriptable(  # as fairseq's does; a call in between breaks torch.compile's graph
            prev_output_tokens, encoder_out, incremental_state, False, *alignment, **further
        )

    def _features_of_part(self, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """The features of this process's part (B, n) of sequences; positions continue from earlier parts."""
        before = self.context.before
        check_count(before + tokens.ne(self.padding_idx).sum(1), self.max_tokens, _LENGTH_OPTIONS)
        with positions_after(self.embed_positions, before):
            return self.extract_features_scriptable(tokens, None)

    @property
    def resets_at_eos(self) -> bool:
        """Whether a document begins at each eos."""
        # Whole models that were pickled by an earlier version lack the attribute.
        return hasattr(self, "documents") and self.documents.resets

    def _extract_documents(
        self, tokens: Tensor, incremental_state: IncrementalState | None, *alignment, **further
    ) -> tuple[Tensor, dict[str, Any]]:
        """``extract_features`` for rows with several documents, each of which begins at an eos."""
        if incremental_state is not None:
            new = tokens if self.get_incremental_state(incremental_state, _SEEN) is None else tokens[:, -1:]
            features, extra = self.extend_features(new, incremental_state)
            return features[:, -1:], extra
        if self.context is not None:
            raise ValueError("--lineartime-reset-at-eos is given; allowed where processes hold one sequence: not given")
        documents = read_documents(tokens, documents_by_eos(tokens, self.eos_idx, True), self.padding_idx)
        check_count(documents.longest, self.max_tokens, _LENGTH_OPTIONS)
        with within_documents(self.layers, self.embed_positions, documents):
            return self.extract_features_scriptable(tokens, None, None, False, *alignment, **further)

    def extend_features(self, tokens: Tensor, incremental_state: IncrementalState) -> tuple[Tensor, dict[str, Any]]:
        """fairseq's ``extract_features`` for the next tokens (B, n) of sequences: (B, n, C) and fairseq's extras.

        ``incremental_state`` is empty at the beginning of the sequences. It is updated in place with the decoding state
        and the number of real tokens of each row, from which positions continue. A row may have padding anywhere. The
        results are those of the whole forward pass, for one token or many at a time, and single steps of fairseq's
        generator may follow. Gradients pass through the state, and dropout is that of the forward pass. Cost and memory
        are those of the mechanism for n tokens.

        Raises:
            ValueError: the decoder has attention to an encoder; ``incremental_state`` comes from single steps alone,
                which do not count tokens; or there are more tokens than a part of the model has parameters for.
        """
        layers = self.layers.children()  # with layer drop, iterating over the list itself skips layers at random
        if any(layer.encoder_attn is not None for layer in layers if hasattr(layer, "encoder_attn")):
            raise ValueError("the decoder has attention to an encoder; allowed: language models")
        seen = self.get_incremental_state(incremental_state, _SEEN)
        if seen is None and incremental_state:
            raise ValueError(
                "incremental_state is of single steps, which do not count tokens; allowed: an empty one, or one that "
                "extend_features filled"
            )
        if self.resets_at_eos:
            ids = documents_by_eos(tokens, self.eos_idx, True, None if seen is None else seen["document"])
            documents = read_documents(tokens, ids, self.padding_idx, seen)
            check_count(documents.longest, self.max_tokens, _LENGTH_OPTIONS)
            within = within_documents(self.layers, self.embed_positions, documents)
            with layers_after(self.layers, incremental_state), within:
                features = self.extract_features_scriptable(tokens, None)
            self.set_incremental_state(incremental_state, _SEEN, documents.seen)
            return features
        before = tokens.new_zeros(len(tokens)) if seen is None else seen["count"]
        count = before + tokens.ne(self.padding_idx).sum(1)
        check_count(count, self.max_tokens, _LENGTH_OPTIONS)
        with layers_after(self.layers, incremental_state), positions_after(self.embed_positions, before):
            features = self.extract_features_scriptable(tokens, None)
        self.set_incremental_state(incremental_state, _SEEN, {"count": count})
        return features

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> None:
        """Beam search: row i continues from row ``new_order[i]``; fairseq reorders the layers."""
        super().reorder_incremental_state(incremental_state, new_order)
        seen = self.get_incremental_state(incremental_state, _SEEN)
        if seen is not None:
            seen = {name: x.index_select(0, new_order) for name, x in seen.items()}
            self.set_incremental_state(incremental_state, _SEEN, seen)

    def buffered_future_mask(self, tensor: Tensor) -> None:
        """None in place of fairseq's (T, T) mask, which our causal attentions do not need."""
        return None


def complete_side(
    side: nn.Module, args, dictionary, build_positions: Callable[[nn.Module], nn.Module], norm: str, width: int
) -> None:
    """Give ``side``, a decoder or an encoder that fairseq has just built, what fairseq's own does not have.

    These are the positions of ``build_positions``, the final normalisation ``norm`` of ``width`` channels, the longest
    input and the documents in a row.
    """
    if side.embed_positions is not None:
        side.embed_positions = build_positions(side.embed_positions)
    if side.layer_norm is not None and norm != "layernorm":
        side.layer_norm = build_norm(norm, width)
    side.max_tokens = find_max_tokens(side)
    side.documents = ResetAtEos(bool(safe_getattr(args, "lineartime_reset_at_eos", False)))
    side.eos_idx = dictionary.eos() if side.documents.resets else None


def wrap_layer(layer: nn.Module, cfg: TransformerConfig) -> nn.Module:
    """Wrap ``layer`` as fairseq's builders do: in activation checkpointing, then in sharding, as ``cfg`` says."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)
