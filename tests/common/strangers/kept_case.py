"""The stranger's case: options that matter together."""

VARIANTS = {"both": {"phi": "sigmoid", "chunk_size": 3}}
