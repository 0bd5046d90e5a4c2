"""The ``--flash-...`` options of the FLASH paper's models, causal and masked, as fairseq dataclasses."""

from dataclasses import dataclass
from typing import Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from common.modules.forget_gate import FORGETS, NONE
from common.modules.norms import NORMS
from common.modules.relative_bias import RELATIVE_BIASES
from common.ops.linear import CUMULATIVE_SUMS
from common.ops.shared.score_kernels import SCORE_KERNELS

from ..loading.known_options import option_field
from ._options import attention_config


@dataclass
class FlashOptions(FairseqDataclass):
    """Options shared by all models of the paper's tables."""

    flash_norm: ChoiceEnum(tuple(NORMS)) = option_field(
        "layernorm", "normalisation: layernorm, the default of causal models, or scalenorm, that of masked ones"
    )
    flash_no_rotary: bool = option_field(False, "no rotary positions of queries and keys")


@dataclass
class GatedAttentionUnitOptions(FlashOptions):
    """Options of the gated attention unit, quadratic or not."""

    flash_query_dim: int = option_field(128, "width s of queries and keys; 512 in fine-tuning")
    flash_kernel: ChoiceEnum(SCORE_KERNELS) = option_field(
        "relu2", "what turns scores into weights (Table 2); laplace as in Mega"
    )
    flash_relative_bias: ChoiceEnum(RELATIVE_BIASES) = option_field(
        "auto",
        "learned bias on scores by distance: toeplitz, one per distance; rotary, from two rotated vectors; "
        "auto: toeplitz below 512 tokens (a chunk's, or the position limit of FLASH-Quad), else rotary, as in the "
        "paper's pseudocode: parameters of one per distance grow with the tokens. Name one to compare models",
    )
    flash_no_gate: bool = option_field(False, "no gate U (Table 1, with --flash-separate-ffn)")
    flash_separate_ffn: bool = option_field(
        False,
        "a feed-forward block of its own after each unit, as wide inside, for what --flash-no-gate takes "
        "away (131 M parameters in Table 1); with --flash-no-gate alone",
    )


@dataclass
class MixedChunkOptions(GatedAttentionUnitOptions):
    """Options of FLASH."""

    flash_chunk_size: int = option_field(256, "tokens C in a chunk; the paper's large models have 512")
    flash_no_local: bool = option_field(False, "no attention inside chunks (Figure 7)")
    flash_no_linear: bool = option_field(False, "no linear attention across chunks (Figure 7)")
    flash_overlap: bool = option_field(
        False,
        "attention inside chunks also reaches the chunk before and, in masked models, the one after (section 3.2.1)",
    )
    flash_chunk_summaries: bool = option_field(
        False, "softmax attention to the mean of each chunk besides (Appendix A)"
    )


@dataclass
class FirstTokenOptions(FairseqDataclass):
    """The fine-tuning forms of Table 4, of FLASH's and FLASH-Quad's masked models."""

    flash_first_softmax: bool = option_field(
        False, "the first token attends with softmax, whatever the kernel (Table 4)"
    )


@dataclass
class FirstToAllOptions(FirstTokenOptions):
    """The fine-tuning forms of Table 4 of FLASH's masked model."""

    flash_first_to_all: bool = option_field(
        False, "the first token of each chunk attends to the whole sequence with softmax (Table 4)"
    )


@dataclass
class CausalMixedChunkOptions(MixedChunkOptions):
    """Options of FLASH's language model."""

    flash_forget: ChoiceEnum((NONE, *FORGETS)) = option_field(
        NONE,
        "gates from the tokens, by which the sums of the linear attention across chunks forget: one for "
        "each head, or one for each channel of its keys; ours, in no paper of FLASH",
    )


@dataclass
class QuadraticOptions(GatedAttentionUnitOptions):
    """Options of FLASH-Quad."""

    flash_divisor: Optional[int] = option_field(
        None,
        "what scores are divided by, a constant of the model; default: in causal models the position limit "
        "(--tokens-per-sample unless --max-target-positions is given), in masked ones the real tokens of each row",
    )


@dataclass
class TransformerOptions(FlashOptions):
    """Options of the Transformers of the paper's tables."""

    flash_attention_gate: bool = option_field(
        False,
        "a SiLU gate on what attention gives (Table 2, whose number of parameters it has with a "
        "feed-forward width of 13/4 times the embedding dimension)",
    )


@dataclass
class SoftmaxTransformerOptions(TransformerOptions):
    """Options of Transformer+ and Transformer++."""

    flash_kernel: ChoiceEnum(SCORE_KERNELS) = option_field(
        "softmax",
        "what turns scores into weights (Table 2); relu2 and laplace divide them by the position limit, or "
        "in masked models by the real tokens of each row",
    )


@dataclass
class MixedChunkTransformerOptions(
    attention_config("mixed_chunk", only=["chunk_size", "kernel"], prefix="flash"), TransformerOptions
):
    """Options of MC-TFM++."""


@dataclass
class CausalPerformerOptions(TransformerOptions):
    """Options of Performer's language model."""

    flash_cumulative_sum: ChoiceEnum(CUMULATIVE_SUMS) = option_field(
        "matmul",
        "how sums over earlier tokens are computed, with the same result: matmul, products of matrices "
        "chunk by chunk (Performer-Matmul, Table 11), or scan, one token after the other (Performer)",
    )


@dataclass
class CombinerOptions(attention_config("combiner", only=["row_length"], prefix="flash"), TransformerOptions):
    """Options of Combiner."""
