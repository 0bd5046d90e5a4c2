"""The loop of an attention transfer: its options have an effect, and random numbers differ between epochs."""

import pytest
import timm
import torch
from torch import Tensor

from timm_plugin.transfer import AttentionTransferTask
from timm_plugin.transfer.training import Settings, train

SMALL = dict(img_size=32, patch_size=8, depth=2, embed_dim=24, num_heads=2, num_classes=3)


class Images(list):
    """Batches of images that are drawn again in each epoch."""

    def __iter__(self):
        for size in super().__iter__():
            yield torch.randn(size, 3, 32, 32), torch.zeros(size)


def make_task() -> AttentionTransferTask:
    torch.manual_seed(0)
    teacher = timm.create_model("vit_tiny_patch16_224", **SMALL)
    for block in teacher.blocks:
        torch.nn.init.normal_(block.attn.qkv.weight, std=0.3)
    return AttentionTransferTask(teacher, "hedgehog")


def learned(**settings) -> list[Tensor]:
    """Parameters of a task after two updates with ``settings``."""
    task = make_task()
    train(task, Images([2, 2]), Settings(epochs=1, **{"opt": "sgd", "lr": 1e-3, **settings}))
    return list(task.own_state().values())


@pytest.mark.parametrize(
    "setting", [{"clip_grad": 1e-3}, {"weight_decay": 10.0}, {"lr": 1e-2}, {"opt": "adamw"}, {"seed": 1}]
)
def test_a_setting_does_something(setting: dict):
    same, other = learned(), learned(**setting)
    assert all(torch.equal(x, y) for x, y in zip(learned(), same))
    assert not all(torch.equal(x, y) for x, y in zip(other, same))


def test_a_warm_up_begins_lower():
    """The first of two epochs changes less than without it."""
    start = list(make_task().own_state().values())
    moved = []
    for warmup in (0, 1):
        task = make_task()
        train(task, Images([2, 2]), Settings(epochs=2, opt="sgd", lr=1e-3, warmup_epochs=warmup))
        moved.append(sum((x - y).abs().sum() for x, y in zip(task.own_state().values(), start)))
    assert moved[1] < moved[0]


def test_the_learning_rate_falls():
    """Steps with clipped gradients have the length of the learning rate."""
    task, seen = make_task(), []

    class Watched(Images):
        def __iter__(self):
            for batch in super().__iter__():
                seen.append([x.clone() for x in task.own_state().values()])
                yield batch

    train(task, Watched([2] * 12), Settings(epochs=1, opt="sgd", lr=1e-2, clip_grad=1e-3))
    moves = [float(sum((x - y).abs().sum() for x, y in zip(*pair))) for pair in zip(seen, seen[1:])]
    assert moves[-1] < 0.5 * max(moves)


def test_each_epoch_has_random_numbers_of_its_own(monkeypatch):
    """Augmentations then differ, and each epoch can be repeated."""
    seen, forward = [], AttentionTransferTask.forward

    def record(self, images, target=None):
        seen.append(images)
        return forward(self, images, target)

    monkeypatch.setattr(AttentionTransferTask, "forward", record)
    for _ in range(2):
        train(make_task(), Images([2]), Settings(epochs=2))
    first, second, again, after = seen
    assert torch.equal(first, again) and torch.equal(second, after) and not torch.equal(first, second)
