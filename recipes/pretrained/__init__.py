"""Released, stock and own checkpoints as a start: commands, and what the start is worth on data at hand."""
