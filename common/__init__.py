"""The attention core of lineartime: mechanisms as functions (``common.ops``), as modules (``common.attention``), and the
gated attention unit, which is a whole block (``common.gau``).

Needs torch alone; neither fairseq nor timm is imported anywhere below this package.
"""

#: How the host adapters tell this package from a foreign one of the same, very common, name.
DISTRIBUTION = "lineartime"
