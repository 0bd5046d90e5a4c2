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
from tests.timm_plugin.helpers.models import draw_filters

#: A quarter of the work of the registered model.
SMALL = dict(embed_dims=(24, 48, 96))
#: Arguments that adapt a model of vision transformers' shape to 32 x 32 images of ten classes.
DAFT = dict(img_size=32, patch_size=8, depth=2, num_classes=10, pretrained_cfg_overlay=dict(input_size=(3, 32, 32)))


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
    """Train with timm's parts; returns the optimizer, the averaged weights and the mean loss of every epoch.

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


def test_digits_are_learned_saved_and_loaded(digits, tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("flowformer_hier_digits", drop_path_rate=0.05, **SMALL)
    optimizer, ema, losses = _train(model, _loader(digits, "train", model), epochs=8)
    validation = _loader(digits, "validation", model)
    assert losses[-1] < 0.3 * losses[0], losses
    assert _accuracy(model, validation) >= 80.0
    assert _accuracy(ema.module, validation) >= 80.0

    CheckpointSaver(model, optimizer, checkpoint_dir=str(tmp_path), recovery_dir=str(tmp_path)).save_checkpoint(0, 1.0)
    other = timm.create_model("flowformer_hier_digits", checkpoint_path=str(tmp_path / "last.pth.tar"), **SMALL)
    batch, _ = next(iter(validation))
    with torch.no_grad():
        assert_close("logits of another model", other.eval()(batch), model(batch))


@pytest.mark.parametrize(
    ("name", "args", "epochs"),
    [
        ("flowformer_hier_digits", SMALL, 3),
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
    """Filters move away from 0, whose entropy is the uniform one, and the same weights work on larger images."""
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
images, labels, models = torch.load(sys.argv[1], weights_only=True)
found = []
for name, arguments, weights in models:
    model = timm.create_model(name, **arguments)
    model.load_state_dict(weights)
    task = ClassificationTask(model.double(), nn.CrossEntropyLoss(), device=device)
    task.prepare_distributed(device_ids=[device])  # as train.py calls it
    optimizer = create_optimizer_v2(model, "sgd", lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        task(images[rank::2], labels[rank::2])["loss"].backward()
        optimizer.step()
    found.append({name: parameter.grad for name, parameter in model.named_parameters()})
torch.save(found, sys.argv[2] + str(rank))
torch.distributed.destroy_process_group()
"""


def test_two_processes_have_the_gradients_of_one_with_both_batches(tmp_path):
    """Compares the second update, with the launcher under torchrun; the regulariser of DAFT-conv counts once."""
    cases = [("flowformer_hier_test", {"num_classes": 10})]
    cases.append(("daft_conv_test", {"num_classes": 10, "depth": 2, "entropy_weight": 0.5}))
    models = [timm.create_model(name, **arguments) for name, arguments in cases]
    for model in models:
        draw_filters(model)
    images, labels = torch.randn(8, 3, 64, 64, dtype=torch.float64), torch.arange(8)
    stored = [(*case, model.state_dict()) for case, model in zip(cases, models)]
    torch.save((images, labels, stored), tmp_path / "batch.pt")
    (tmp_path / "script.py").write_text(PROCESSES)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    arguments = [str(tmp_path / name) for name in ("script.py", "batch.pt", "gradients")]
    subprocess.run([*launcher, "-m", "timm_plugin", *arguments], cwd=CHECKOUT, check=True)

    processes = [torch.load(tmp_path / f"gradients{rank}", weights_only=True) for rank in "01"]
    for i, model in enumerate(models):
        optimizer = create_optimizer_v2(model.double().train(), "sgd", lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        for name, parameter in model.named_parameters():
            for rank, gradients in enumerate(processes):
                # β of a filter does not change the softmax: its gradients may be only rounding errors.
                actual, expected = gradients[i][name] + 1e-3, parameter.grad + 1e-3
                assert_close(f"gradient of {name} in process {rank}", actual, expected, 1e-8)
