"""WikiText-103: the data, the paper's command, and what recalls the order of tokens; see README.md."""
