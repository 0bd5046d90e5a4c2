"""A short, real training on handwritten digits with timm's own loader, optimizer, scheduler and saver."""

import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits
from timm.data import create_dataset, create_loader, resolve_model_data_config
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.task import ClassificationTask
from timm.utils import CheckpointSaver, ModelEmaV3
from torch.nn import functional as F

import timm_plugin  # noqa: F401  (registers the models)
from common.attention import position_entropy
from tests.compare import assert_close
from tests.processes import CHECKOUT

#: A quarter of the work of the registered model.
SMALL = dict(embed_dims=(24, 48, 96))
#: What makes a model of vision transformers' shape one for 32 x 32 images of ten classes.
DAFT = dict(img_size=32, patch_size=8, depth=2, num_classes=10, pretrained_cfg_overlay=dict(input_size=(3, 32, 32)))

EVALUATE = """
import sys, torch, timm
model = timm.create_model("flowformer_hier_digits", checkpoint_path=sys.argv[1], embed_dims=(24, 48, 96)).eval()
batch = torch.load(sys.argv[2], weights_only=True)
with torch.no_grad():
    torch.save(model(batch), sys.argv[3])
"""


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """An image folder of 400 handwritten digits, 32 x 32, to train on, and 100 others."""
    folder = tmp_path_factory.mktemp("digits")
    data = load_digits()
    for i in range(500):
        target = folder / ("validation" if i % 5 == 0 else "train") / str(data.target[i])
        target.mkdir(parents=True, exist_ok=True)
        pixels = (data.images[i] * 15.9).astype("uint8")
        Image.fromarray(pixels).resize((32, 32), Image.BICUBIC).convert("RGB").save(target / f"{i}.png")
    return folder


def _loader(digits: Path, split: str, model):
    config = resolve_model_data_config(model)
    assert config["input_size"] == (3, 32, 32)
    return create_loader(
        create_dataset("", root=str(digits), split=split),
        input_size=config["input_size"],
        batch_size=25,
        is_training=split == "train",
        no_aug=True,
        use_prefetcher=False,
        mean=config["mean"],
        std=config["std"],
        crop_pct=config["crop_pct"],
        interpolation=config["interpolation"],
        num_workers=0,
        persistent_workers=False,
    )


def _accuracy(model, loader) -> float:
    model.eval()
    with torch.no_grad():
        correct = [(model(batch).argmax(1) == labels).float() for batch, labels in loader]
    return 100.0 * torch.cat(correct).mean().item()


def _train(model, loader, epochs: int, layer_decay=None, amp: bool = False, loss=None):
    """Train with timm's parts; the optimizer, the averaged weights and the mean loss of every epoch.

    ``loss`` is one of timm's tasks, None for the cross entropy alone.
    """
    optimizer = create_optimizer_v2(model, "adamw", lr=4e-3, weight_decay=0.05, layer_decay=layer_decay)
    scheduler, _ = create_scheduler_v2(optimizer, "cosine", num_epochs=epochs, warmup_epochs=1, warmup_lr=1e-3)
    ema = ModelEmaV3(model, decay=0.8)
    criterion, losses = LabelSmoothingCrossEntropy(0.0), []
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for batch, labels in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                value = criterion(model(batch).float(), labels) if loss is None else loss(batch, labels)["loss"]
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            ema.update(model)
            total += value.item()
        scheduler.step(epoch + 1)
        losses.append(total / len(loader))
    return optimizer, ema, losses


def test_digits_are_learned_saved_and_loaded_elsewhere(digits, tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("flowformer_hier_digits", drop_path_rate=0.05, **SMALL)
    optimizer, ema, losses = _train(model, _loader(digits, "train", model), epochs=8)
    validation = _loader(digits, "validation", model)
    assert losses[-1] < 0.3 * losses[0], losses
    assert _accuracy(model, validation) >= 80.0
    assert _accuracy(ema.module, validation) >= 80.0

    CheckpointSaver(model, optimizer, checkpoint_dir=str(tmp_path), recovery_dir=str(tmp_path)).save_checkpoint(0, 1.0)
    (tmp_path / "evaluate.py").write_text(EVALUATE)
    batch, _ = next(iter(validation))
    torch.save(batch, tmp_path / "batch.pt")
    arguments = [str(tmp_path / name) for name in ("evaluate.py", "last.pth.tar", "batch.pt", "logits.pt")]
    subprocess.run([sys.executable, "-m", "timm_plugin", *arguments], cwd=CHECKOUT, check=True)
    with torch.no_grad():
        assert_close("logits in a new process", torch.load(tmp_path / "logits.pt"), model(batch))


@pytest.mark.parametrize(
    ("name", "args", "epochs"),
    [
        ("flowformer_hier_digits", SMALL, 3),
        ("daft_conv_test", DAFT, 8),
        ("daft_conv_test", dict(DAFT, gumbel_temperature=0.5), 8),
        ("daft_full_s", dict(DAFT, embed_dim=48, bias_dim=16), 8),
    ],
)
def test_digits_with_amp_checkpointing_and_layer_decay(digits, name, args, epochs):
    torch.manual_seed(0)
    model = timm.create_model(name, **args)
    model.set_grad_checkpointing()
    _, _, losses = _train(model, _loader(digits, "train", model), epochs=epochs, layer_decay=0.9, amp=True)
    assert losses[-1] < 0.9 * losses[0], losses


def test_digits_with_daft_at_two_sizes(digits):
    """Filters leave 0, their entropy that of a uniform one, and the same weights read larger images."""
    torch.manual_seed(0)
    model = timm.create_model("daft_conv_test", window=3, num_heads=48, entropy_weight=0.001, **DAFT)
    task = ClassificationTask(model, LabelSmoothingCrossEntropy(0.0))
    _, ema, losses = _train(model, _loader(digits, "train", model), epochs=12, loss=task)
    validation = _loader(digits, "validation", model)
    assert losses[-1] < 0.6 * losses[0], losses
    assert _accuracy(model, validation) >= 30.0  # of ten classes, after 192 updates
    assert _accuracy(ema.module, validation) >= 30.0
    assert position_entropy(model) < 0.99 * 96 * torch.log(torch.tensor(9.0))
    larger = [(F.interpolate(batch, scale_factor=1.5, mode="bicubic"), labels) for batch, labels in validation]
    assert larger[0][0].shape[2:] == (48, 48)
    assert _accuracy(model, larger) >= 20.0


PROCESSES = """
import sys, torch, timm
from torch import nn
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask
torch.distributed.init_process_group("gloo")
rank, device = torch.distributed.get_rank(), torch.device("cpu")
torch.manual_seed(0)
model = timm.create_model("flowformer_hier_test", num_classes=10)
task = ClassificationTask(model, nn.CrossEntropyLoss(), device=device)
task.prepare_distributed(device_ids=[device])  # as train.py calls it
images, labels = torch.load(sys.argv[1], weights_only=True)
optimizer = create_optimizer_v2(model, "sgd", lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    task(images[rank::2], labels[rank::2])["loss"].backward()
    optimizer.step()
torch.save(model.state_dict(), sys.argv[2] + str(rank))
torch.distributed.destroy_process_group()
"""


def test_two_processes_equal_one_with_both_batches(tmp_path):
    images, labels = torch.randn(8, 3, 64, 64), torch.arange(8)
    torch.save((images, labels), tmp_path / "batch.pt")
    (tmp_path / "script.py").write_text(PROCESSES)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    arguments = [str(tmp_path / name) for name in ("script.py", "batch.pt", "weights")]
    subprocess.run([*launcher, "-m", "timm_plugin", *arguments], cwd=CHECKOUT, check=True)

    torch.manual_seed(0)
    model = timm.create_model("flowformer_hier_test", num_classes=10)
    optimizer = create_optimizer_v2(model, "sgd", lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    for rank in "01":
        weights = torch.load(tmp_path / f"weights{rank}", weights_only=True)
        for name, expected in model.state_dict().items():
            assert_close(f"{name} of process {rank}", weights[name], expected)
