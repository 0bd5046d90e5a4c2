"""Softmax attention."""

#: Promises that it cannot keep.
WITHOUT = {"second_order": "torch's fused kernel for the CPU has no second derivative, its plain one has"}
