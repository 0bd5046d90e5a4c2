"""DAFT: pictures of the position biases and keys of a trained model."""
