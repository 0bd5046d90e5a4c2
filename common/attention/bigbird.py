"""BigBird's attention as a module."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.bigbird import bigbird_attention, draw_numbers
from ..ops.bigbird.reference import bigbird_attention_reference
from ._base import OpAttention
from ._options import About, AttentionOptions, count
from ._registry import register_attention


@dataclass(frozen=True)
class BigbirdOptions(AttentionOptions):
    """Options of BigBird's attention; see ``common.ops.bigbird_attention``."""

    chunk_size: int = count(64, "tokens of a chunk, which the paper calls a block: part of the model")
    random_chunks: int | None = count(
        3,
        "random chunks that each chunk sees besides its neighbours, the first and the last; 0 for none",
        optional=True,
        setup_only=True,
    )


@register_attention("bigbird")
class BigbirdAttention(OpAttention):
    """Softmax over neighbouring, first, last and random chunks; not causal.

    ``numbers`` (1024, r) choose the random chunks, the same for all heads. They are drawn from ``seed``, which comes
    from torch's generator when the module is built. A state dict records the seed instead of the numbers, which would
    be rounded when state dicts are averaged in float32. Files of version 0.2 hold the numbers: these are loaded,
    ``seed`` is then 0, and a state dict holds the numbers too. An image is the sequence of its rows. Shapes and masks
    as in ``InnerAttention``; options as in ``common.ops.bigbird_attention``.
    """

    about = About(
        "BigBird's attention",
        "Zaheer et al., NeurIPS 2020",
        "n (5 + r) C d",
        sizes={"C": "chunk_size", "r": "random_chunks"},
        url="https://arxiv.org/abs/2007.14062",
    )
    Options = BigbirdOptions
    supports = frozenset({"bidirectional"})
    op = staticmethod(bigbird_attention)
    reference_op = staticmethod(bigbird_attention_reference)
    counts = ("seed",)
    former_names = frozenset({"numbers"})
    numbers: Tensor
    seed: int = 0  # the seed of the numbers; 0 if these come from a file of version 0.2

    def setup(self) -> None:
        self.register_buffer("numbers", torch.empty(0), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw a new seed, and the random chunks from it."""
        self.seed = int(torch.randint(1, 2**31, (), device="cpu"))
        self.numbers = self._draw().to(self.numbers.device)

    def restore_counts(self, counts: dict[str, int]) -> None:
        """Restore the random chunks that the weights were trained with, if their seed is known."""
        super().restore_counts(counts)
        if self.seed:
            numbers = self._draw()
            # A model on "meta" gets its tensors from the file (assign=True), but these are not in the file.
            self.numbers = numbers if self.numbers.is_meta else numbers.to(self.numbers)

    def restore_former(self, tensors: dict[str, Tensor]) -> None:
        """Load the numbers of a file without a seed."""
        numbers = tensors["numbers"].round().long()
        self.seed, self.numbers = 0, numbers if self.numbers.is_meta else numbers.to(self.numbers)

    def _draw(self) -> Tensor:
        return draw_numbers(self.options.random_chunks or 0, self.seed)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.seed:
            # Floating point, since fairseq's moving average multiplies all tensors.
            destination[f"{prefix}numbers"] = self.numbers.double()

    def op_kwargs(self) -> dict[str, Any]:
        """The numbers that choose random chunks."""
        return {"numbers": self.numbers}
