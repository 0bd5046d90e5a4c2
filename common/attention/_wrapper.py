"""The base class of modules around an attention that change the tensors it gets: gates, positions, convolutions."""

from ._base import InnerAttention


class WrappingAttention(InnerAttention):
    """Declares what ``inner`` declares, except a state of a source, TorchScript and the features ``without``.

    ``name`` defaults to that of ``inner``. A subclass has ``forward``, ``extend`` and ``reference``, which call those
    of ``inner``, and may add to ``needs``.
    """

    __jit_unused_properties__ = ("linear_cost",)

    def __init__(self, inner: InnerAttention, name: str | None = None, without: frozenset[str] = frozenset()) -> None:
        self.supports = inner.supports - {"source", "torchscript"} - without
        self.name = inner.name if name is None else name
        super().__init__(inner.causal)
        self.inner = inner
        self.needs = inner.needs

    @property
    def linear_cost(self) -> bool:
        """Whether the inner attention has a linear cost."""
        return self.inner.linear_cost

    def packs_documents(self) -> bool:
        """Whether the inner attention accepts ``segment_ids``."""
        return self.inner.packs_documents()

    def state_tokens(self) -> int | None:
        """The value of the inner attention."""
        return self.inner.state_tokens()

    def projections(self, head_dim: int) -> dict[str, int]:
        """Channels per head of the inner attention's projections."""
        return self.inner.projections(head_dim)

    def key_features(self, head_dim: int) -> int:
        """The value of the inner attention."""
        return self.inner.key_features(head_dim)
