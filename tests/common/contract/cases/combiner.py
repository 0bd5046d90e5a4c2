"""Combiner."""

#: Promises that it cannot keep.
WITHOUT = {"query_padding": "the queries of all real keys make the summaries of their rows"}
