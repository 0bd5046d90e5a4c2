"""The attention core of lineartime: functions (``common.ops``), modules (``common.attention``) and whole blocks.

The only whole block is the gated attention unit (``common.modules.GatedAttentionUnit``).

It needs only torch; no file of this package imports fairseq or timm. ``common.huggingface``, which no other file here
imports, also needs transformers.
"""

#: By this constant the host adapters recognise this package, since its name `common` is very common.
DISTRIBUTION = "lineartime"

__version__ = "0.3.0"
