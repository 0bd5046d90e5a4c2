"""Attention transfer: linear attention learns, layer by layer, to give what a model's softmax attention gives.

``python -m timm_plugin.transfer`` is the command, and ``AttentionTransferTask`` the same for a training of your own.
"""

from .imitation import LOSSES, AttentionImitation
from .task import AttentionTransferTask

__all__ = ["LOSSES", "AttentionImitation", "AttentionTransferTask"]
