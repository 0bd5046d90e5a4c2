"""LSH attention of the Reformer."""

#: Promises that it cannot keep.
WITHOUT = {"query_padding": "the queries of real keys are these keys"}

#: Every pair of hash rounds is compared.
SMALL = {"rounds": 3}
LONG = {"rounds": 2}
