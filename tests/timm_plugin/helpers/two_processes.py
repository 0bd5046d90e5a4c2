"""Attention transfer of NaFlexViT on batches of patches, the second of which has padding."""

from pathlib import Path

import timm
import torch
from torch import Tensor

from timm_plugin.transfer import LOSSES, AttentionTransferTask

#: Number of patches of each image in each batch.
BATCHES = ((9, 9), (9, 4))


def gradients(number: int, loss: str, distributed: bool = False) -> dict[str, Tensor]:
    """Gradients of one pass of batch ``number``, by name; with ``distributed``, averaged over all processes."""
    torch.manual_seed(0)
    model = timm.create_model("naflexvit_base_patch16_gap", embed_dim=24, num_heads=2, depth=2, num_classes=3)
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.qkv.weight)
    task = AttentionTransferTask(model, "hedgehog", loss, verbose=False)
    named = {name: x for name, x in task.trainable_module.named_parameters() if x.requires_grad}
    if distributed:
        task.prepare_distributed()
    task(_batch(number))["loss"].backward()
    return {name: x.grad.clone() for name, x in named.items()}


def save_gradients(rank: int, folder: str) -> None:
    """In one of two processes, write the gradients of this process's batch for each loss."""
    for loss in LOSSES:
        torch.save(gradients(rank, loss, distributed=True), Path(folder, f"{loss}.{rank}.pt"))


def _batch(number: int) -> dict[str, Tensor]:
    """Patches (2, 9, 768) of a grid of 3 x 3, their coordinates, and a mask of the real ones."""
    generator = torch.Generator().manual_seed(number)
    valid = torch.arange(9) < torch.tensor(BATCHES[number])[:, None]
    grid = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij"), -1).flatten(0, 1)
    patches = torch.randn(2, 9, 768, generator=generator)
    coordinates = grid.expand(2, 9, 2).masked_fill(~valid[..., None], 0)
    return {"patches": patches, "patch_coord": coordinates, "patch_valid": valid}
