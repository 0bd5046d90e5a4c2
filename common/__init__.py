"""The attention core of lineartime: mechanisms as functions (``common.ops``) and as modules (``common.attention``).

Needs torch alone; neither fairseq nor timm is imported anywhere below this package.
"""

#: How the host adapters tell this package from a foreign one of the same, very common, name.
DISTRIBUTION = "lineartime"
