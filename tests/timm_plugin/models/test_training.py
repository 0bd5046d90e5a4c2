"""A short, real training on handwritten digits with timm's own loader, optimizer, scheduler and saver."""

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
from timm.task import ClassificationTask, TokenDistillationTask
from timm.utils import CheckpointSaver, ModelEmaV3
from torch import nn
from torch.nn import functional as F

from common.attention import position_entropy
from tests.common.parallel.processes import in_processes
from tests.compare import assert_close
from tests.timm_plugin.helpers import build, draw_filters, images
from timm_plugin.__main__ import main

#: A model of vision transformers' shape for 32 x 32 images of ten classes.
_CONV = dict(img_size=32, patch_size=8, depth=2, num_classes=10, window=3, num_heads=48, entropy_weight=0.001)
DAFT = dict(_CONV, pretrained_cfg_overlay=dict(input_size=(3, 32, 32)))


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
    names = ("input_size", "mean", "std", "crop_pct", "interpolation")
    return create_loader(
        create_dataset("", root=str(digits), split=split),
        batch_size=25,
        is_training=split == "train",
        no_aug=True,
        use_prefetcher=False,
        num_workers=0,
        persistent_workers=False,
        **{name: config[name] for name in names},
    )


def _accuracy(model, loader) -> float:
    model.eval()
    with torch.no_grad():
        correct = [(model(batch).argmax(1) == labels).float() for batch, labels in loader]
    return 100.0 * torch.cat(correct).mean().item()


def _train(model, loader, epochs: int):
    """Train as train.py with --amp, --grad-checkpointing and --layer-decay; optimizer, averaged model and losses."""
    model.set_grad_checkpointing()
    optimizer = create_optimizer_v2(model, "adamw", lr=4e-3, weight_decay=0.05, layer_decay=0.9)
    scheduler, _ = create_scheduler_v2(optimizer, "cosine", num_epochs=epochs, warmup_epochs=1, warmup_lr=1e-3)
    ema = ModelEmaV3(model, decay=0.8)
    task, losses = ClassificationTask(model, LabelSmoothingCrossEntropy(0.0), verbose=False), []
    for epoch in range(epochs):
        task.train()
        total = 0.0
        for batch, labels in loader:
            with torch.autocast("cpu", torch.bfloat16):
                value = task(batch, labels)["loss"]
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            ema.update(model)
            total += value.item()
        scheduler.step(epoch + 1)
        losses.append(total / len(loader))
    return optimizer, ema.module, losses


@pytest.mark.parametrize(
    ("name", "arguments", "epochs", "accuracy"),
    [
        ("flowformer_hier_digits", dict(embed_dims=(24, 48, 96), drop_path_rate=0.05), 4, 70.0),
        ("daft_conv_test", DAFT, 7, 20.0),
    ],
)
def test_digits_with_amp_checkpointing_and_layer_decay(digits, name, arguments, epochs, accuracy, tmp_path):
    """Learned, averaged, saved, and loaded into another model; a second or two each."""
    model = timm.create_model(name, **arguments)
    optimizer, averaged, losses = _train(model, _loader(digits, "train", model), epochs)
    validation = _loader(digits, "validation", model)
    assert losses[-1] < 0.9 * losses[0], losses
    assert _accuracy(model, validation) >= accuracy and _accuracy(averaged, validation) >= accuracy
    CheckpointSaver(model, optimizer, checkpoint_dir=str(tmp_path), recovery_dir=str(tmp_path)).save_checkpoint(0, 1.0)
    other = timm.create_model(name, checkpoint_path=str(tmp_path / "last.pth.tar"), **arguments)
    batch, _ = next(iter(validation))
    with torch.no_grad():
        assert_close("logits of another model", other.eval()(batch), model(batch))
    if name == "daft_conv_test":
        # Filters move away from 0, whose entropy is the uniform one.
        assert position_entropy(model) < 0.998 * 96 * torch.log(torch.tensor(9.0))


def test_a_distilled_model_trains_by_timms_token_distillation():
    """The task of train.py's ``--kd-distill-type token``: the second classifier learns from the teacher alone."""
    model = build("deit_distilled", num_classes=5).train()
    teacher = timm.create_model("flowformer_deit_ti", img_size=64, depth=1, num_classes=5)
    task = TokenDistillationTask(
        model, teacher, nn.CrossEntropyLoss(), distill_type="hard", task_loss_weight=0.5, device=torch.device("cpu")
    )
    task.train()(images(model), torch.tensor([1, 2]))["loss"].backward()
    assert model.head_dist.weight.grad.abs().sum() > 0
    assert model.head.weight.grad.abs().sum() > 0


#: A script that trains as timm's train.py does, in one of two processes.
PROCESS = """
import sys, torch, timm
from torch import nn
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask
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
torch.save(found, f"{sys.argv[1]}.{rank}")
"""


def launch(rank: int, *arguments: str) -> None:
    """``torchrun -m timm_plugin ARGUMENTS`` in one of its processes."""
    main(list(arguments))


def test_two_processes_have_the_gradients_of_one_with_both_batches(tmp_path):
    """Compares the second update; the regulariser of DAFT-conv counts once."""
    cases = [("flowformer_hier_test", {"num_classes": 10})]
    cases.append(("daft_conv_test", {"num_classes": 10, "depth": 2, "entropy_weight": 0.5}))
    models = [timm.create_model(name, **arguments) for name, arguments in cases]
    for model in models:
        draw_filters(model)
    images, labels = torch.randn(8, 3, 64, 64, dtype=torch.float64), torch.arange(8)
    stored = [(*case, model.state_dict()) for case, model in zip(cases, models)]
    torch.save((images, labels, stored), tmp_path / "batch.pt")
    (tmp_path / "script.py").write_text(PROCESS)
    in_processes(2, tmp_path, launch, str(tmp_path / "script.py"), str(tmp_path / "batch.pt"))

    processes = [torch.load(tmp_path / f"batch.pt.{rank}", weights_only=True) for rank in "01"]
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
