"""The weights of a linear layer, for operations that use them without calling the layer."""

from torch import Tensor, nn


def weights_of(linear: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight (out, in) and bias (out,) of an ``nn.Linear``, also after torch's ``quantize_dynamic``.

    O(out x in) for a quantised layer, whose weight is converted to floating point at each call.
    """
    if isinstance(linear.weight, Tensor):
        return linear.weight, linear.bias
    return linear.weight().dequantize(), linear.bias()
