"""Retention: options that only matter together."""

VARIANTS = {
    "bare": {"output_norm": "none", "output_gate": "none"},
    "bare, scores as they are": {"output_norm": "none", "output_gate": "none", "score_norm": False},
    "bare, log space": {"output_norm": "none", "output_gate": "none", "decays": "log_space"},
}
