"""The gated delta rule: options that only matter together."""

_BARE = {"output_norm": "none", "output_gate": "none"}
VARIANTS = {
    "DeltaNet, bare": {"gate": "none", **_BARE},
    "reflections": {"gate": "none", "negative_eigenvalues": True},
    "the rule alone": {"qk_activation": "none", "qk_norm": "none", "v_activation": "none", **_BARE},
}
