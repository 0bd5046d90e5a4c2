"""Flow-Attention: options that only matter together."""

#: Promises that it cannot keep.
WITHOUT = {"one_mask": "every query takes a part of the flow of every key"}

VARIANTS = {
    "paper, softmax allocation": {"form": "paper", "allocation": "softmax", "phi": "elu+1", "chunk_size": 7},
    "vision, without clamp": {"form": "released_vision", "clamp": None, "competition": "sigmoid"},
    "both ablations": {"competition": "none", "allocation": "none"},
    "released long-range arena": {"competition": "softmax_heads", "clamp": None, "phi": "relu"},
    "paper, over heads": {"form": "paper", "competition": "softmax_heads"},
}
NOT_CAUSAL = {
    "competition=softmax_heads": "the authors have it in attention that is not causal alone",
    "released long-range arena": "the same",
    "paper, over heads": "the same",
}
