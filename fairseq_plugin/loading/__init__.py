"""Reading checkpoints and their configurations without running code from them."""
