"""BigBird: options that only matter together."""

#: If a chunk had as many random chunks as tokens, nearly all tokens would be seen.
SMALL = {"random_chunks": 2}
LONG = {"random_chunks": 2}
