"""The names of the plugin's models, from fairseq's registry, and values that make them small."""

from fairseq.models import MODEL_REGISTRY

import fairseq_plugin  # noqa: F401  registers the models

_ALL = sorted(name for name, model in MODEL_REGISTRY.items() if model.__module__.startswith("fairseq_plugin."))
#: Models of audio, and from speech to text, which have tests of their own.
AUDIO = [name for name in _ALL if name.endswith(("_wav2vec2", "_hubert", "_data2vec_audio"))]
SPEECH = [name for name in _ALL if name.startswith("s2t_")]
#: All others.
OURS = [name for name in _ALL if name not in (*AUDIO, *SPEECH)]
CAUSAL = [name for name in OURS if name.endswith("_lm")]
MASKED = [name for name in OURS if name.endswith("_mlm")]
#: Values of options by the ends of their names, with which toy sequences cross several chunks, rows and windows.
SHORT = {"chunk-size": "8", "row-length": "4", "daft-window": "5", "bias-dim": "4", "flash-query-dim": "8"}
