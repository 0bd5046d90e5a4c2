"""The head and the initialisation of the classifiers of the Long Range Arena (Tay et al., ICLR 2021)."""

import torch
from fairseq.modules import LearnedPositionalEmbedding
from torch import Tensor, nn
from torch.nn import functional as F

from .gated_attention_unit_layer import GatedAttentionUnitEncoderLayer


class ArenaHead(nn.Module):
    """Linear, relu, linear; for two sequences: linear, relu, linear to half the width, relu, linear.

    The names ``dense`` and ``out_proj`` are those of RoBERTa's head, which fairseq expects in checkpoints.
    """

    def __init__(self, input_dim: int, inner_dim: int, num_classes: int, sequences: int = 1) -> None:
        super().__init__()
        last_dim = inner_dim if sequences == 1 else max(inner_dim // 2, 1)
        self.dense = nn.Linear(sequences * input_dim, inner_dim)
        self.between = nn.Linear(inner_dim, last_dim) if sequences > 1 else None
        self.out_proj = nn.Linear(last_dim, num_classes)
        for layer in filter(None, (self.dense, self.between, self.out_proj)):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)  # flax's default for its dense layers
            nn.init.zeros_(layer.bias)

    def forward(self, pooled: Tensor) -> Tensor:
        """pooled (B, 1, sequences C) -> scores (B, classes)."""
        x = F.relu(self.dense(pooled[:, 0]))
        if self.between is not None:
            x = F.relu(self.between(x))
        return self.out_proj(x)


@torch.no_grad()
def init_as_arena(model: nn.Module) -> None:
    """Initialise the weights of a fairseq Transformer encoder as the Long Range Arena does.

    Matrices are Xavier-uniform, biases from N(0, 1e-6), token embeddings from N(0, 1), learned positions from
    N(0, 0.02). The first token of the dictionary, ``<s>``, which is prepended to summarise the sequence, starts as
    zeros. Gated attention units, which the Arena lacks, and parameters inside attentions are not changed.
    """
    unit_ids = {id(x) for m in model.modules() if isinstance(m, GatedAttentionUnitEncoderLayer) for x in m.modules()}
    for module in model.modules():
        if id(module) in unit_ids:
            continue
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.normal_(module.bias, std=1e-6)
        elif isinstance(module, LearnedPositionalEmbedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
            nn.init.zeros_(module.weight[0])
