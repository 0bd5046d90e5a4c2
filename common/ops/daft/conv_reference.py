"""DAFT-conv, literally: equation 5 with the w of equation 7, and every key of the input in both sums."""

from collections.abc import Sequence

import torch
from torch import Tensor


def daft_conv_reference(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    *,
    causal: bool = False,
    spatial_shape: Sequence[int] | None = None,
    key_padding_mask: Tensor | None = None,
    local_only: bool = False,
) -> Tensor:
    """w is r inside a window and 0, or -inf if ``local_only``, outside; arguments as in ``daft_conv``. O(T² d).

    Equation 8's exp(r) - 1 is not formed: for r of -50 it is -1, and the sums would cancel to nothing.
    """
    heads, channels = k.shape[2], v.shape[2] // k.shape[2]
    rows = []
    for b in range(k.shape[0]):
        places = _places(k.shape[1], spatial_shape, None if key_padding_mask is None else key_padding_mask[b])
        outputs = []
        for position in places:
            if position is None:
                outputs.append(torch.zeros_like(v[b, 0]))
                continue
            seen = [i for i, other in enumerate(places) if other is not None and not (causal and other > position)]
            if local_only:
                seen = [i for i in seen if _index(r, position, places[i], causal) is not None]
            logits = torch.stack([k[b, i] + _bias(r, position, places[i], causal) for i in seen])  # (seen, h)
            weights = torch.exp(logits - logits.max(0).values)
            numerator = sum(weight[:, None] * v[b, i].view(heads, channels) for weight, i in zip(weights, seen))
            denominator = weights.sum(0)
            outputs.append((numerator / denominator[:, None]).flatten())
        rows.append(torch.stack(outputs))
    out = torch.stack(rows)
    return out if q is None else torch.sigmoid(q) * out  # padding stays 0


def filters_reference(
    r: Tensor, gamma: Tensor | None, beta: Tensor | None, temperature: float | None, training: bool
) -> Tensor:
    """The filters of one call, shaped as the parameters r (h, window) or (h, height, width).

    With ``gamma`` and ``beta`` (h, 1): γ (r - mean) / std + β of each head (section 3.2). With a ``temperature``: in
    training, times a Gumbel-softmax sample of itself from torch's generator (equation 11), else only its largest entry.
    """
    flat = r.flatten(1)
    if gamma is not None:
        centred = flat - flat.mean(1, keepdim=True)
        flat = gamma * centred / torch.sqrt((centred**2).mean(1, keepdim=True) + 1e-6) + beta
    if temperature is not None and training:
        gumbel = -torch.log(torch.empty_like(flat).exponential_())
        flat = flat * torch.softmax((flat + gumbel) / temperature, dim=1)
    elif temperature is not None:
        largest = [row.tolist().index(max(row.tolist())) for row in flat]
        flat = torch.stack([row * (torch.arange(len(row), device=r.device) == i) for row, i in zip(flat, largest)])
    return flat.reshape(r.shape)


def _places(tokens: int, shape: Sequence[int] | None, padding: Tensor | None) -> list[tuple[int, ...] | None]:
    """The position of each token, None for padding: (index among the real tokens,), or (row, column)."""
    places: list[tuple[int, ...] | None] = []
    real = 0
    for i in range(tokens):
        if padding is not None and padding[i]:
            places.append(None)
            continue
        places.append((real,) if shape is None else divmod(i, shape[1]))
        real += 1
    return places


def _index(r: Tensor, place: tuple[int, ...], other: tuple[int, ...], causal: bool) -> tuple[int, ...] | None:
    """The index of ``other`` in the window of ``place``; None outside of it."""
    window = r.shape[1:]
    if causal:
        index = [window[0] - 1 - (place[0] - other[0])]
    else:
        index = [there - here + size // 2 for here, there, size in zip(place, other, window)]
    return None if any(i < 0 or i >= size for i, size in zip(index, window)) else tuple(index)


def _bias(r: Tensor, place: tuple[int, ...], other: tuple[int, ...], causal: bool) -> Tensor:
    """w of every head (h,): r where ``other`` is in the window of ``place``, else 0."""
    index = _index(r, place, other, causal)
    return torch.zeros_like(r.flatten(1)[:, 0]) if index is None else r[(slice(None), *index)]
