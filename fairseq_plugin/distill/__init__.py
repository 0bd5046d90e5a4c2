"""Teachers, and attention transfer from softmax to linear attention."""
