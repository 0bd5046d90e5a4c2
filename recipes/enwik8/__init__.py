"""Characters: the first 100 million bytes of Wikipedia, one token per byte."""
