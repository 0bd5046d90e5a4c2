"""Sparse Transformer: options that matter together."""

#: With as many columns as a chunk has tokens, the fixed pattern would be all tokens.
SMALL = {"columns": 2}
VARIANTS = {"strided, three": {"pattern": "strided", "stride": 3}, "fixed, one of three": {"stride": 3, "columns": 1}}
