"""The ``--flash-...`` options of the FLASH paper's models, causal and masked: dataclasses as fairseq has them."""

from dataclasses import dataclass, field
from typing import Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from common.modules.norms import NORMS
from common.modules.relative_bias import RELATIVE_BIASES
from common.ops.shared.score_kernels import SCORE_KERNELS

from ._options import attention_config


@dataclass
class FlashOptions(FairseqDataclass):
    """Options that all models of the paper's tables share."""

    flash_norm: ChoiceEnum(tuple(NORMS)) = field(
        default="layernorm",
        metadata={"help": "normalisation: layernorm, the default of causal models, or scalenorm, that of masked ones"},
    )
    flash_no_rotary: bool = field(default=False, metadata={"help": "no rotary positions of queries and keys"})


@dataclass
class GatedAttentionUnitOptions(FlashOptions):
    """Options of the gated attention unit, quadratic or not."""

    flash_query_dim: int = field(default=128, metadata={"help": "width s of queries and keys; 512 in fine-tuning"})
    flash_kernel: ChoiceEnum(SCORE_KERNELS) = field(
        default="relu2", metadata={"help": "what turns scores into weights (Table 2); laplace as in Mega"}
    )
    flash_relative_bias: ChoiceEnum(RELATIVE_BIASES) = field(
        default="auto",
        metadata={
            "help": "learned bias on scores by distance: toeplitz, one per distance; rotary, from two rotated vectors; "
            "auto: toeplitz below 512 tokens (a chunk's, or the position limit of FLASH-Quad), else rotary"
        },
    )
    flash_no_gate: bool = field(default=False, metadata={"help": "no gate U (ablation)"})


@dataclass
class MixedChunkOptions(GatedAttentionUnitOptions):
    """Options of FLASH."""

    flash_chunk_size: int = field(
        default=256, metadata={"help": "tokens C in a chunk; the paper's large models have 512"}
    )
    flash_no_local: bool = field(default=False, metadata={"help": "no attention inside chunks (Figure 7)"})
    flash_no_linear: bool = field(default=False, metadata={"help": "no linear attention across chunks (Figure 7)"})


@dataclass
class QuadraticOptions(GatedAttentionUnitOptions):
    """Options of FLASH-Quad."""

    flash_divisor: Optional[int] = field(
        default=None,
        metadata={
            "help": "what scores are divided by, a constant of the model; default: in causal models the position limit "
            "(--tokens-per-sample unless --max-target-positions is given), in masked ones the real tokens of each row"
        },
    )


@dataclass
class TransformerOptions(FlashOptions):
    """Options of the Transformers of the paper's tables."""

    flash_attention_gate: bool = field(
        default=False, metadata={"help": "a SiLU gate on what attention gives (Table 2)"}
    )


@dataclass
class SoftmaxTransformerOptions(TransformerOptions):
    """Options of Transformer+ and Transformer++."""

    flash_kernel: ChoiceEnum(SCORE_KERNELS) = field(
        default="softmax",
        metadata={
            "help": "what turns scores into weights (Table 2); relu2 and laplace divide them by the position limit, or "
            "in masked models by the real tokens of each row"
        },
    )


@dataclass
class MixedChunkTransformerOptions(
    attention_config("mixed_chunk", only=["chunk_size", "kernel"], prefix="flash"), TransformerOptions
):
    """Options of MC-TFM++."""


@dataclass
class CombinerOptions(attention_config("combiner", only=["row_length"], prefix="flash"), TransformerOptions):
    """Options of Combiner."""
