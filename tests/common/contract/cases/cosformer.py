"""cosFormer."""

#: Promises that it cannot keep.
WITHOUT = {"one_mask": "positions of queries count those that are real"}
