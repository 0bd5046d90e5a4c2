"""Training that starts from released, stock or own checkpoints: commands, and a comparison with random weights."""
