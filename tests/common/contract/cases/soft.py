"""SOFT."""

#: Promises that it cannot keep.
WITHOUT = {"query_padding": "the queries are the keys as well"}
