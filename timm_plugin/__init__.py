"""The timm side of lineartime: importing this package registers the mechanisms of ``common`` and the models in timm.

After ``import timm_plugin``, ``timm.create_model("flowformer_hier_s")`` builds a hierarchical Flowformer, and any
stock vision transformer accepts ``attn_layer="flow"``. ``timm_plugin.transfer`` makes a trained model linear. Importing
twice, or reloading, changes nothing.

Raises ImportError, with the cause and the command that fixes it, if timm, torchvision or ``common`` is missing, too old
or not the right one. fairseq is not needed.
"""

from ._host import check_host

check_host()

from .create import create_model
from .layers.attention import attention_layer
from .layers.grid import tell_grid
from .models import daft, flash, flowformer, flowformer_deit, hierarchical_baselines, mixer
from .models._registry import register_attention_layers
from .replace import replace_attention
from .restored import lineartime
from .stored import store_attention

register_attention_layers()

__all__ = [
    "attention_layer",
    "create_model",
    "daft",
    "flash",
    "flowformer",
    "flowformer_deit",
    "hierarchical_baselines",
    "lineartime",
    "mixer",
    "replace_attention",
    "store_attention",
    "tell_grid",
]
