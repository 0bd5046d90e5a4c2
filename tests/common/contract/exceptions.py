"""Exceptions from the contract for single mechanisms, with the reasons; ``mechanisms.py`` explains the words."""

from typing import Any

_BARE = {"output_norm": "none", "output_gate": "none"}
_NO_ACTIVATIONS = {"qk_activation": "none", "qk_norm": "none", "v_activation": "none", **_BARE}
_CHUNKS = "torch.export cannot prove that padding up to whole chunks is right for any length"

#: Mechanism -> word -> value.
EXCEPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "bigbird": {  # if a chunk had as many random chunks as tokens, nearly all tokens would be seen
        "SMALL": {"random_chunks": 2},
        "LONG": {"random_chunks": 2},
    },
    "combiner": {
        "WITHOUT": {"query_padding": "the queries of all real keys make the summaries of their rows"},
    },
    "cosformer": {
        "WITHOUT": {"one_mask": "positions of queries count those that are real"},
    },
    "daft_conv": {
        "VARIANTS": {
            "ungated, local": {"query": False, "local_only": True},
            "local, free filters": {"local_only": True, "reparameterize": False},
            "selection, ungated": {"gumbel_temperature": 0.5, "query": False},
            "selection, free filters": {"gumbel_temperature": 0.5, "reparameterize": False},
        },
    },
    "daft_full": {
        "WITHOUT": {"padding_beyond_the_longest": "its biases are for as many places as the batch is long"},
        "VARIANTS": {"ungated, free bias": {"query": False, "bias_dim": None}},
    },
    "flow": {
        "WITHOUT": {"one_mask": "every query takes a part of the flow of every key"},
        "VARIANTS": {
            "paper, softmax allocation": {"form": "paper", "allocation": "softmax", "phi": "elu+1", "chunk_size": 7},
            "vision, without clamp": {"form": "released_vision", "clamp": None, "competition": "sigmoid"},
            "both ablations": {"competition": "none", "allocation": "none"},
            "released long-range arena": {"competition": "softmax_heads", "clamp": None, "phi": "relu"},
            "paper, over heads": {"form": "paper", "competition": "softmax_heads"},
        },
        "NOT_CAUSAL": {
            "competition=softmax_heads": "the authors have it in attention that is not causal alone",
            "released long-range arena": "the same",
            "paper, over heads": "the same",
        },
    },
    "gated_delta": {
        "VARIANTS": {
            "DeltaNet, bare": {"gate": "none", **_BARE},
            "reflections": {"gate": "none", "negative_eigenvalues": True},
            "the rule alone": _NO_ACTIVATIONS,
        },
    },
    "gla": {
        "VARIANTS": {"bare": {**_BARE, "temperature": 0.5}},
    },
    "kimi_delta": {
        "VARIANTS": {"bare": _BARE, "the rule alone": _NO_ACTIVATIONS},
    },
    "lolcats": {
        "WITHOUT": {"export_of_any_length": _CHUNKS},
    },
    "mixed_chunk": {
        "WITHOUT": {"export_of_any_length": _CHUNKS},
    },
    "reformer": {
        "WITHOUT": {"query_padding": "the queries of real keys are these keys"},
        "SMALL": {"rounds": 3},  # every pair of hash rounds is compared
        "LONG": {"rounds": 2},
    },
    "retention": {
        "VARIANTS": {
            "bare": _BARE,
            "bare, scores as they are": {**_BARE, "score_norm": False},
            "bare, log space": {**_BARE, "decays": "log_space"},
        },
    },
    "sinkhorn": {
        "WITHOUT": {"export_of_any_length": _CHUNKS},
    },
    "soft": {
        "WITHOUT": {"query_padding": "the queries are the keys as well"},
    },
    "softmax": {
        "WITHOUT": {
            "dropout_of_sources": "torch drops entries of the map",
            "second_order": "torch's fused kernel for the CPU has no second derivative, its plain one has",
        },
    },
    "sparse": {
        "SMALL": {"columns": 2},  # as many columns as tokens in a chunk would cover all tokens in the fixed pattern
        "VARIANTS": {
            "strided, three": {"pattern": "strided", "stride": 3},
            "fixed, one of three": {"stride": 3, "columns": 1},
        },
    },
    "yoso": {
        "WITHOUT": {"differences": "the gradient of the paper is a bound of the derivative, by default"},
    },
}
