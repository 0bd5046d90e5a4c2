"""The weights of a linear layer, for operations that take them and do not call the layer."""

from torch import Tensor, nn


def weights_of(linear: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight (out, in) and bias (out,) of an ``nn.Linear``, or of what ``quantize_dynamic`` of torch made of it.

    O(out x in) for the latter, whose weight becomes a float tensor at each call.
    """
    if isinstance(linear.weight, Tensor):
        return linear.weight, linear.bias
    return linear.weight().dequantize(), linear.bias()
