"""How long torch.compile takes for language models."""
