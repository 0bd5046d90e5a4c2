"""DAFT: pictures of what a trained model has learned to look at."""
