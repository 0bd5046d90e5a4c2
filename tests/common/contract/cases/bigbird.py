"""BigBird: options that matter together."""

#: With as many random chunks as a chunk has tokens, nearly all tokens would be seen.
SMALL = {"random_chunks": 2}
LONG = {"random_chunks": 2}
