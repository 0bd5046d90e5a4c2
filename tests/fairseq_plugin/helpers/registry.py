"""The names of the plugin's models, from fairseq's registry, and values that make them small."""

from fairseq.models import MODEL_REGISTRY

import fairseq_plugin  # noqa: F401  registers the models

OURS = sorted(name for name, model in MODEL_REGISTRY.items() if model.__module__.startswith("fairseq_plugin."))
CAUSAL = [name for name in OURS if name.endswith("_lm")]
MASKED = [name for name in OURS if name.endswith("_mlm")]
#: Values of options by the ends of their names, with which toy sequences cross several chunks, rows and windows.
SHORT = {"chunk-size": "8", "row-length": "4", "daft-window": "5", "bias-dim": "4", "flash-query-dim": "8"}
