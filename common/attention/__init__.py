"""Attention modules by name: (q, k, v) -> out, the inner attention that both hosts' adapters wrap.

``build_attention("flow", causal=True, form="paper")``. Each mechanism is one file of this folder, and its class
can be imported from here: ``FlowAttention``, ``LinearAttention`` and so on. Files that begin with an underscore hold
the code that mechanisms share. The mechanisms of the files and modules that the environment variable
``LINEARTIME_MECHANISMS`` names are imported after these.
"""

import os

from ._base import FACTS, INPUTS, SUPPORTS, AttentionShape, InnerAttention, NoReference, OpAttention
from ._build import build_attention, options_of
from ._forget import ForgetAttention
from ._layer_kinds import layer_kinds, pattern_names
from ._options import About, AttentionOptions, Option, choice, count, default_of, flag, number
from ._output_gate import OutputGateAttention
from ._own import VARIABLE, how_to_import, import_own
from ._record import AttentionRecord, KeyRecord, MapRecord, record_attention, record_keys
from ._registry import ATTENTIONS, for_each_attention, import_mechanisms, register_attention, supporting
from ._rotary import RotaryAttention, build_rotary_attention
from ._short_conv import ShortConvAttention

import_mechanisms(__name__, __path__)

from .daft_conv import position_entropy  # noqa: E402  (mechanisms are imported in the order of their files)
from .lolcats import only_part  # noqa: E402

_CLASSES = {attention.__name__: attention for attention in ATTENTIONS.values()}
globals().update(_CLASSES)

__all__ = [
    "ATTENTIONS",
    "FACTS",
    "INPUTS",
    "SUPPORTS",
    "VARIABLE",
    "About",
    "AttentionOptions",
    "AttentionRecord",
    "AttentionShape",
    "ForgetAttention",
    "InnerAttention",
    "KeyRecord",
    "MapRecord",
    "NoReference",
    "OpAttention",
    "Option",
    "OutputGateAttention",
    "RotaryAttention",
    "ShortConvAttention",
    "build_attention",
    "build_rotary_attention",
    "choice",
    "count",
    "default_of",
    "flag",
    "for_each_attention",
    "how_to_import",
    "import_own",
    "layer_kinds",
    "number",
    "only_part",
    "options_of",
    "pattern_names",
    "position_entropy",
    "record_attention",
    "record_keys",
    "register_attention",
    "supporting",
    *_CLASSES,
]

import_own(os.environ.get(VARIABLE, ""))  # last, since they import this package
