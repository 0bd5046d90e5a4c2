"""The timm side of lineartime: importing this package teaches timm the mechanisms of ``common`` and the models.

After ``import timm_plugin``, ``timm.create_model("flowformer_hier_s")`` builds a hierarchical Flowformer, and any
stock vision transformer takes ``attn_layer="flow"``. Importing twice, or reloading, changes nothing.

Raises ImportError, naming the cause and the command that mends it, when timm, torchvision or ``common`` is missing,
too old or not the right one. fairseq is not needed.
"""

from .host import check_host

check_host()

from . import daft, flowformer, flowformer_deit  # noqa: E402
from .auxiliary_loss import add_auxiliary_losses  # noqa: E402
from .cpu_processes import allow_cpu_processes  # noqa: E402
from .registry import register_attention_layers  # noqa: E402

register_attention_layers()
allow_cpu_processes()
add_auxiliary_losses()

__all__ = ["daft", "flowformer", "flowformer_deit"]
