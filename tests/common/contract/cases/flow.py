"""Flow-Attention: options that matter together."""

VARIANTS = {
    "paper, softmax allocation": {"form": "paper", "allocation": "softmax", "phi": "elu+1", "chunk_size": 7},
    "vision, without clamp": {"form": "released_vision", "clamp": None, "competition": "sigmoid"},
    "both ablations": {"competition": "none", "allocation": "none"},
}
