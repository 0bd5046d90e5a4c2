"""The attention core of lineartime: functions (``common.ops``), modules (``common.attention``) and whole blocks.

The one block is the gated attention unit (``common.modules.GatedAttentionUnit``).

Needs torch alone; neither fairseq nor timm is imported anywhere below this package.
"""

#: How the host adapters tell this package from a foreign one of the same, very common, name.
DISTRIBUTION = "lineartime"

__version__ = "0.3.0"
