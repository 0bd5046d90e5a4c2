"""Kimi Delta Attention: options that only matter together."""

_BARE = {"output_norm": "none", "output_gate": "none"}
VARIANTS = {
    "bare": _BARE,
    "the rule alone": {"qk_activation": "none", "qk_norm": "none", "v_activation": "none", **_BARE},
}
