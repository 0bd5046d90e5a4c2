"""DAFT-full's position biases for images of another size.

Legend: N tokens, n the width of the factors, prefix the tokens beside those of patches, which come first.
"""

from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

Grid = tuple[int, int]


def resample_position_bias(name: str, bias: Tensor, new: Grid, old: Grid, num_prefix_tokens: int) -> Tensor:
    """pe0, pe1 (N, n) or w (N, N) for the tokens of the grid ``new``, bicubically; ``name`` tells w from a factor."""

    def resample(x: Tensor) -> Tensor:
        return resample_abs_pos_embed(x[None], list(new), list(old), num_prefix_tokens=num_prefix_tokens)[0]

    bias = resample(bias)
    return resample(bias.transpose(0, 1)).transpose(0, 1).contiguous() if name == "w" else bias


def check_parameters(attention: nn.Module) -> None:
    """Raise ValueError where a ``DaftFullAttention`` has position biases that are computed from other parameters."""
    computed = [name for name in ("pe0", "pe1", "w") if is_parametrized(attention, name)]
    if computed:
        raise ValueError(
            f"{', '.join(computed)} of the attention is parametrised; allowed for another image size: plain "
            "parameters, as torch.nn.utils.parametrize.remove_parametrizations makes them"
        )


def set_grid_size(attention: nn.Module, new: Grid, old: Grid, num_prefix_tokens: int) -> None:
    """Resample the parameters of a ``DaftFullAttention``, for good, from the grid ``old`` of tokens to ``new``."""
    for name, parameter in list(attention.named_parameters()):
        resampled = resample_position_bias(name, parameter.detach(), new, old, num_prefix_tokens)
        setattr(attention, name, nn.Parameter(resampled, requires_grad=parameter.requires_grad))
    attention.max_tokens = new[0] * new[1] + num_prefix_tokens
