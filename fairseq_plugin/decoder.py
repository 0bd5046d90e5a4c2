"""fairseq's Transformer decoder over layers of ours."""

from typing import Callable

from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerConfig, TransformerDecoder
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from torch import Tensor, nn

from common.linear import use_faster_linear
from common.norms import build_norm

from .positions import count_real_tokens

# NormFormer options of transformer_lm that fairseq's own TransformerConfig does not carry on to the layers.
_NORMFORMER = ("scale_attn", "scale_fc", "scale_heads", "scale_resids")

BuildLayer = Callable[[TransformerConfig, bool], nn.Module]


class LinearTimeDecoder(TransformerDecoder):
    """fairseq's ``TransformerDecoder`` over the layers that ``build_layer(cfg, no_encoder_attn)`` makes.

    ``build_positions`` turns fairseq's position embedding into the one that is used, which counts real tokens in every
    mode; ``norm`` names the final normalisation. Linear layers are those of ``common.linear``. Nothing of size T x T is
    allocated.
    """

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
        self.build_layer = build_layer  # a plain attribute, read by build_decoder_layer inside of __init__
        super().__init__(args, dictionary, embed_tokens, **host_options)
        if self.embed_positions is not None:
            self.embed_positions = build_positions(self.embed_positions)
        if self.layer_norm is not None and norm != "layernorm":
            self.layer_norm = build_norm(norm, self.embed_dim)
        use_faster_linear(self)

    def build_decoder_layer(self, args: TransformerConfig, no_encoder_attn: bool = False) -> nn.Module:
        """fairseq's hook: one layer, wrapped for activation checkpointing and sharding as fairseq wraps its own."""
        cfg = TransformerConfig.from_namespace(args)
        for option in _NORMFORMER:
            setattr(cfg, option, getattr(self.args, option, False))
        return wrap_layer(self.build_layer(cfg, no_encoder_attn), cfg)

    def buffered_future_mask(self, tensor: Tensor) -> Tensor:
        """An empty tensor where fairseq builds a (T, T) one: the marker by which layers know attention is causal."""
        return tensor.new_empty(0)


def wrap_layer(layer: nn.Module, cfg: TransformerConfig) -> nn.Module:
    """``layer`` as fairseq's builders wrap theirs: activation checkpointing inside of sharding, where asked for."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)
