"""Softmax attention."""

#: Promises that it cannot keep.
WITHOUT = {
    "dropout_of_sources": "torch drops entries of the map",
    "second_order": "torch's fused kernel for the CPU has no second derivative, its plain one has",
}
