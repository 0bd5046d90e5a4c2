"""Gated linear attention: options that only matter together."""

VARIANTS = {"bare": {"output_norm": "none", "output_gate": "none", "temperature": 0.5}}
