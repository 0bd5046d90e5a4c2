"""RoBERTa's encoder with our layers."""

from collections.abc import Callable

import torch
from fairseq.models.roberta import RobertaEncoder
from fairseq.models.transformer import TransformerConfig, TransformerEncoder
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from torch import Tensor, nn

from common.ops.shared.segments import documents_by_eos

from ..modules.documents import read_documents, within_documents
from ..modules.not_exportable import NoTorchScript, check_not_exported
from ..modules.positions import check_count, check_length, count_real_tokens
from ._decoder import complete_side, wrap_layer

BuildLayer = Callable[[TransformerConfig], nn.Module]


class LinearTimeEncoder(NoTorchScript, TransformerEncoder):
    """fairseq's ``TransformerEncoder`` with the layers that ``build_layer(cfg)`` returns.

    ``build_positions`` converts fairseq's position embedding to the one that is used; ``norm`` names the final
    normalisation. With ``args.lineartime_reset_at_eos`` a document begins after each eos, and no document sees another.

    Raises:
        ValueError: when called with more tokens than a part of the model has parameters for.
    """

    #: The command-line options that set the longest input.
    length_options = "--max-positions or --tokens-per-sample"

    def __init__(
        self,
        args,
        dictionary,
        embed_tokens,
        build_layer: BuildLayer,
        build_positions: Callable[[nn.Module], nn.Module] = count_real_tokens,
        norm: str = "layernorm",
    ) -> None:
        self.build_layer = build_layer  # a plain attribute, read by build_encoder_layer inside __init__
        super().__init__(args, dictionary, embed_tokens)
        del self.build_layer  # it cannot be pickled
        complete_side(self, args, dictionary, build_positions, norm, embed_tokens.embedding_dim)

    def forward(self, src_tokens: Tensor, *options, **further) -> dict[str, list[Tensor]]:
        """fairseq's forward, for inputs no longer than the model has parameters for."""
        check_not_exported(self)
        if hasattr(self, "documents") and self.documents.resets:
            ids = documents_by_eos(src_tokens, self.eos_idx, False)
            documents = read_documents(src_tokens, ids, self.padding_idx)
            check_count(documents.longest, self.max_tokens, self.length_options)
            with within_documents(self.layers, self.embed_positions, documents):
                return self.forward_scriptable(src_tokens, *options, **further)
        check_length(src_tokens, self.padding_idx, self.max_tokens, self.length_options)
        return self.forward_scriptable(src_tokens, *options, **further)  # as fairseq's; see the decoder's

    def reorder_encoder_out(self, encoder_out: dict[str, list[Tensor]], new_order: Tensor) -> dict[str, list[Tensor]]:
        """As fairseq's, but nothing is copied if each row keeps its source, as between the steps of beam search.

        The result also has ``source_of_row`` (sources, rows of each), which tells the decoder which rows are equal.
        """
        previous = [x.flatten() for x in encoder_out.get("source_of_row", [])]
        source_of_row = previous[0].index_select(0, new_order) if previous else new_order
        if previous and torch.equal(source_of_row, previous[0]):
            return encoder_out
        rows = torch.unique_consecutive(source_of_row, return_counts=True)[1]
        grouped = source_of_row.view(-1, int(rows[0]) if len(rows) and bool((rows == rows[0]).all()) else 1)
        return {**super().reorder_encoder_out(encoder_out, new_order), "source_of_row": [grouped]}

    def build_encoder_layer(self, args: TransformerConfig) -> nn.Module:
        """fairseq's hook: one layer, wrapped for activation checkpointing and sharding as fairseq wraps its own."""
        cfg = TransformerConfig.from_namespace(args)
        return wrap_layer(self.build_layer(cfg), cfg)


class LinearTimeRobertaEncoder(RobertaEncoder):
    """fairseq's ``RobertaEncoder``, with its language-model head, around ``LinearTimeEncoder(**encoder_options)``."""

    def __init__(self, args, dictionary, **encoder_options) -> None:
        self.encoder_options = encoder_options  # a plain attribute, read by build_encoder inside __init__
        super().__init__(args, dictionary)
        del self.encoder_options  # functions that build layers cannot be pickled

    def build_encoder(self, args, dictionary, embed_tokens) -> nn.Module:
        """fairseq's hook: the stack of layers, initialised as fairseq initialises its own."""
        encoder = LinearTimeEncoder(args, dictionary, embed_tokens, **self.encoder_options)
        return encoder.apply(init_bert_params)
