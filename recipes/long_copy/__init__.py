"""Long copy: write down, in order, the passages that are marked in 2,048 tokens of real text."""
