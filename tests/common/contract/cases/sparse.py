"""Sparse Transformer: options that only matter together."""

#: If there were as many columns as tokens in a chunk, the fixed pattern would cover all tokens.
SMALL = {"columns": 2}
VARIANTS = {"strided, three": {"pattern": "strided", "stride": 3}, "fixed, one of three": {"stride": 3, "columns": 1}}
