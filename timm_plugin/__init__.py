"""The timm side of lineartime: importing this package registers the mechanisms of ``common`` and the models in timm.

After ``import timm_plugin``, ``timm.create_model("flowformer_hier_s")`` builds a hierarchical Flowformer, and timm's
vision transformers take ``attn_layer="flow"``; five ignore it, and ``timm_plugin.create_model`` refuses those.
``timm_plugin.transfer`` makes a trained model linear. Importing twice, or reloading, changes nothing.

Raises ImportError, with the cause and the command that fixes it, if timm, torchvision or ``common`` is missing, too old
or not the right one. fairseq is not needed.
"""

from ._host import check_host

check_host()

from .create import create_model
from .from_folder import lineartime
from .layers.attention import attention_layer
from .layers.grid import tell_grid
from .models import daft, flash, flowformer, flowformer_deit, hierarchical_baselines, mixer
from .models._registry import register_attention_layers
from .replace import replace_attention
from .to_folder import store_attention

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
