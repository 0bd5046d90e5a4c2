"""Position biases, and whatever else attention holds for each position, for images of another size.

Legend: N tokens, n the width of the factors, prefix the tokens beside those of patches, which come first.
"""

from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from common.attention import CosformerAttention, DaftFullAttention, InnerAttention

Grid = tuple[int, int]


def resample_position_bias(name: str, bias: Tensor, new: Grid, old: Grid, num_prefix_tokens: int) -> Tensor:
    """pe0, pe1 (N, n) or w (N, N) for the tokens of the grid ``new``, bicubically; ``name`` tells w from a factor."""

    def resample(x: Tensor) -> Tensor:
        return resample_abs_pos_embed(x[None], list(new), list(old), num_prefix_tokens=num_prefix_tokens)[0]

    bias = resample(bias)
    return resample(bias.transpose(0, 1)).transpose(0, 1).contiguous() if name == "w" else bias


def check_grid_size(mechanism: str, attention: InnerAttention, new: Grid, old: Grid, num_prefix_tokens: int) -> None:
    """Raise ValueError unless ``set_grid_size`` can take ``attention``, of that mechanism, from ``old`` to ``new``."""
    tokens = old[0] * old[1] + num_prefix_tokens
    if attention.max_tokens != tokens:
        raise ValueError(
            f"max_tokens is {attention.max_tokens}, and {old[0]} x {old[1]} patches with {num_prefix_tokens} other "
            f"tokens are {tokens}; allowed: timm_plugin.tell_grid before set_input_size as well, or max_tokens={tokens}"
        )
    if new == old or isinstance(attention, CosformerAttention):
        return
    if not isinstance(attention, DaftFullAttention):
        raise ValueError(
            f"the tokens lie on {new[0]} x {new[1]}; allowed for attention {mechanism!r}, whose weights belong to "
            f"positions and are not resampled: {old[0]} x {old[1]}, for which it was built"
        )
    computed = [name for name in ("pe0", "pe1", "w") if is_parametrized(attention, name)]
    if computed:
        raise ValueError(
            f"{', '.join(computed)} of the attention is parametrised; allowed for another image size: plain "
            "parameters, as torch.nn.utils.parametrize.remove_parametrizations makes them"
        )


def set_grid_size(attention: InnerAttention, new: Grid, old: Grid, num_prefix_tokens: int) -> None:
    """Fit ``attention``, which ``check_grid_size`` allows, for good, to tokens of the grid ``new``.

    Position biases are resampled. M of cosFormer is the number of tokens, so that weights fall off over an image.
    """
    if new == old:
        return
    for name, parameter in list(attention.named_parameters()):
        resampled = resample_position_bias(name, parameter.detach(), new, old, num_prefix_tokens)
        setattr(attention, name, nn.Parameter(resampled, requires_grad=parameter.requires_grad))
    attention.max_tokens = new[0] * new[1] + num_prefix_tokens
    attention.shape = attention.shape._replace(max_tokens=attention.max_tokens)
