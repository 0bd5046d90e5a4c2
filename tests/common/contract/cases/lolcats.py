"""LoLCATs: a window and sums."""

#: Promises that it cannot keep.
WITHOUT = {"export_of_any_length": "torch.export cannot prove that padding up to whole chunks is right for any length"}
