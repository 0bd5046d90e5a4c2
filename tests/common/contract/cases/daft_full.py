"""DAFT-full: options that matter together."""

VARIANTS = {"ungated, free bias": {"query": False, "bias_dim": None}}
