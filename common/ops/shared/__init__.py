"""Parts that several mechanisms use: checks, states, chunks, padding, precision, feature maps and score kernels."""
