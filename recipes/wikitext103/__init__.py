"""WikiText-103: getting the data and the paper's commands; see README.md."""
