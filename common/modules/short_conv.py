"""A short causal convolution of each channel over the real tokens of a sequence, with its decoding state."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops.shared.padding import put_back, real_first, take, zero_padding
from ..ops.shared.precision import autocast_off, compute_dtype
from ..ops.shared.reference_tools import real_tokens
from ..ops.shared.segments import Documents


class ShortConv(nn.Module):
    """y_t = Σ_j w_j x_(t-j), j = 0 ... ``taps`` - 1, for each channel of each head; O(n taps) per channel.

    t counts the real tokens of a sequence, which is preceded by zeros. ``weight`` is (H, c, taps), w_0 last.
    """

    def __init__(self, heads: int, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, channels, taps))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise uniformly between ±1/√taps, as in torch's own convolutions.

        Flow-Attention on characters learned better from this than from the identity, w_0 = 1: perplexity 7.82 and 7.78
        against 8.11 and 8.08 after 1,024 updates of 1,024 tokens, 2 layers of width 64 (2026-11-22, two seeds).
        """
        bound = self.weight.shape[-1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        before: Tensor | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x (B, H, n, c) -> y (B, H, n, c) in x's dtype, and the last taps - 1 real tokens (B, H, taps - 1, c).

        ``padding_mask`` is bool (B, n), True = padding, where y is 0. ``before`` are the last real tokens before x;
        None starts a sequence. These and the returned tokens are float32, or float64 if x is float64. With
        ``documents``, each document is preceded by zeros.
        """
        dtype, shape = compute_dtype(x), self.state_shape(x.shape[0])
        order = real_first(padding_mask)
        real = take(zero_padding(x, padding_mask), order).to(dtype)
        if before is None:
            before = real.new_zeros(shape)
        seen = torch.cat([before, real], dim=2)  # (B, H, taps - 1 + n, c)
        last = _last(seen, padding_mask, shape[2])
        if documents is not None:
            y = put_back(self._of_documents(seen, order, documents), order).to(x.dtype)
            return zero_padding(y, padding_mask), _of_last_document(last, documents)
        channels = seen.transpose(2, 3).flatten(1, 2)  # (B, H c, taps - 1 + n)
        with autocast_off(x):
            y = F.conv1d(channels, self.weight.to(dtype).flatten(0, 1).unsqueeze(1), groups=channels.shape[1])
        y = y.unflatten(1, self.weight.shape[:2]).transpose(2, 3).to(x.dtype)
        return zero_padding(put_back(y, order), padding_mask), last

    def _of_documents(self, seen: Tensor, order: Tensor | None, documents: Documents) -> Tensor:
        """y (B, H, n, c) from ``seen`` (B, H, taps - 1 + n, c), earlier and current real tokens, tap by tap."""
        taps = self.weight.shape[-1]
        # How many tokens of its document each token can look back to; missing tokens of earlier calls are zeros.
        back = documents.places + taps * documents.goes_on
        back = (back if order is None else back.gather(1, order))[:, None, :, None]
        weight, n, y = self.weight.to(seen.dtype), back.shape[2], 0
        for j in range(taps):
            tap = seen[:, :, taps - 1 - j : taps - 1 - j + n] * weight[:, None, :, -1 - j]
            y = y + (tap if j == 0 else tap.masked_fill(back < j, 0.0))
        return y

    def state_shape(self, batch: int) -> tuple[int, ...]:
        """Shape of the last real tokens, which are the state: (B, H, taps - 1, c)."""
        heads, channels, taps = self.weight.shape
        return batch, heads, taps - 1, channels

    def reference(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """The sum above, token by token; shapes and mask as in ``forward``, but y = x at padding."""
        y = x.clone()
        for b in range(x.shape[0]):
            tokens = real_tokens(padding_mask, b, x.shape[2])
            for t, token in enumerate(tokens):
                taps = range(min(self.weight.shape[-1], t + 1))
                y[b, :, token] = sum(self.weight[:, :, -1 - j] * x[b, :, tokens[t - j]] for j in taps)
        return y

    def extra_repr(self) -> str:
        """Heads, channels and taps, for ``print(model)``."""
        return ", ".join(f"{name}={size}" for name, size in zip(("heads", "channels", "taps"), self.weight.shape))


def _of_last_document(last: Tensor, documents: Documents) -> Tensor:
    """``last`` (B, H, count, c), the last real tokens, with zeros for tokens of earlier documents."""
    count = last.shape[2]
    reach = documents.count + count * documents.last_goes_on
    other = torch.arange(count, 0, -1, device=last.device) > reach[:, None]  # (B, count)
    return last.masked_fill(other[:, None, :, None], 0.0)


def _last(seen: Tensor, padding_mask: Tensor | None, count: int) -> Tensor:
    """The last ``count`` real tokens of (B, H, count + n, c), where real tokens precede padding; mask (B, n)."""
    if padding_mask is None:
        return seen[:, :, seen.shape[2] - count :].contiguous()
    first = (~padding_mask).sum(1, keepdim=True)  # (B, 1)
    return take(seen, first + torch.arange(count, device=seen.device))
