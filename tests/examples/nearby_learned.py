import torch

from common.attention import register_attention


@register_attention("nearby_learned", parameters=lambda heads, channels: {"log_reach": torch.linspace(1, 5, heads)})
def nearby_learned(q, k, v, *, causal, log_reach, sharpness=1.0):
    """A mean of the values, weighed by agreement and by nearness, whose reach each head learns."""
    place = torch.arange(v.shape[2], device=v.device, dtype=v.dtype)
    nearness = torch.exp(-(place[:, None] - place).abs() / log_reach.exp()[:, None, None])
    weights = torch.sigmoid(sharpness * q) @ torch.sigmoid(k).transpose(-2, -1) * nearness
    weights = weights.tril() if causal else weights
    return weights @ v / weights.sum(-1, keepdim=True)
