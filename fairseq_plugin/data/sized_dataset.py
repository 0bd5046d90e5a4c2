"""A fairseq dataset whose items have known sizes, in a new random order in every epoch."""

import numpy as np
from fairseq.data import FairseqDataset


class SizedDataset(FairseqDataset):
    """fairseq's hooks derived from ``sizes`` (N,), the number of tokens of each item, which a subclass sets.

    Every epoch has new batches.
    """

    can_reuse_epoch_itr_across_epochs = False
    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.sizes)

    def num_tokens(self, index: int) -> int:
        """fairseq's hook: the tokens of an item."""
        return int(self.sizes[index])

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        """fairseq's hook: the tokens of several items."""
        return self.sizes[indices]

    def size(self, index: int) -> int:
        """fairseq's hook: the tokens of an item."""
        return int(self.sizes[index])

    def ordered_indices(self) -> np.ndarray:
        """fairseq's hook, which seeds numpy by seed and epoch: all items in a random order."""
        return np.random.permutation(len(self))
