"""Gated attention units."""

#: Promises that they do not keep.
WITHOUT = {
    "dropout_of_sources": "the values are the unit's whole tokens",
    "export_of_any_length": "torch.export cannot prove that padding up to whole chunks is right for any length",
}
