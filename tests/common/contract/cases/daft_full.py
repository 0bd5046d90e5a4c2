"""DAFT-full: options that only matter together."""

#: Promises that it cannot keep.
WITHOUT = {"padding_beyond_the_longest": "its biases are for as many places as the batch is long"}

VARIANTS = {"ungated, free bias": {"query": False, "bias_dim": None}}
