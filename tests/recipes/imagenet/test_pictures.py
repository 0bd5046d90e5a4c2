"""Pictures of image models' weights of patches, from checkpoints of timm's train.py."""

import argparse
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.utils import CheckpointSaver

import timm_plugin
from common.attention import record_attention
from recipes.imagenet import pictures
from recipes.shared.trained_models import load_image_model

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


def save(
    folder: Path,
    attention: str | None,
    model: str = "vit_tiny_patch16_224",
    size: tuple[int, int] = (32, 32),
    **arguments,
) -> Path:
    """Save with timm's CheckpointSaver, for training images (H, W); ``attention`` None is timm's own."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    if attention is None:
        built = timm.create_model(model, num_classes=10, **arguments)
    else:
        arguments = {**arguments, "attn_layer": attention}
        built = timm_plugin.create_model(model, num_classes=10, **arguments)
    saved = argparse.Namespace(model=model, num_classes=10, gp=None, input_size=[3, *size], model_kwargs=arguments)
    optimizer = torch.optim.AdamW(built.parameters())
    saver = CheckpointSaver(built, optimizer, args=saved, checkpoint_dir=str(folder), recovery_dir=str(folder))
    saver.save_checkpoint(0, metric=1.0)
    return folder / "model_best.pth.tar"


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    """Two image files, one of them not square."""
    generator = np.random.default_rng(0)
    for number, size in enumerate([(40, 40), (30, 50)]):
        Image.fromarray(generator.integers(0, 256, (*size, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
    return [tmp_path / "0.png", tmp_path / "1.png"]


def test_models_side_by_side(tmp_path: Path, images: list[Path], capsys: pytest.CaptureFixture) -> None:
    """Our models, timm's softmax attention, and a mechanism that depends on the number of tokens."""
    files = [save(tmp_path / str(name), name, **SMALL) for name in ("flow", "linear", "cosformer", None)]
    target = tmp_path / "pictures"
    command = ["--image", *map(str, images), "--output", str(target), "--checkpoint", *map(str, files)]
    assert pictures.main(command) == 0
    assert "allocation.png" in capsys.readouterr().out
    for name in ("attention.png", "allocation.png"):
        with Image.open(target / name) as image:
            colours = np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)
            assert image.width > 300 and len(colours) > 50
    # The command overwrites its own folder; without Flow-Attention there is one picture.
    assert pictures.main([*command[:-4], str(files[1]), "--layer", "1", "--names", "linear"]) == 0
    assert "allocation.png" not in capsys.readouterr().out


def test_the_weights_are_those_of_the_last_layer(tmp_path: Path, images: list[Path]) -> None:
    """Weights of patches without the class token, in the shape of the grid; 1 is an even share."""
    loaded = load_image_model(save(tmp_path / "linear", "linear", **SMALL))
    modules = pictures.attentions(loaded)
    assert len(modules) == 2
    image, weights = pictures.weights_seen(loaded, modules[-1], pictures.read_image(images[0]))
    assert image.shape == (32, 32, 3) and weights.weights.shape == (4, 4) and weights.allocation is None
    assert not weights.competition
    from timm.data import create_transform

    pixels = create_transform(**loaded.data, is_training=False)(pictures.read_image(images[0]))
    with torch.no_grad(), record_attention(loaded.model, maps=True) as records:
        loaded.model(pixels[None])
    expected = records[-1].map[0].sum((0, 1))[1:].view(4, 4).numpy()
    assert np.allclose(weights.weights, expected / expected.mean(), atol=1e-5)


def test_a_grid_has_the_shape_of_the_image(tmp_path: Path, images: list[Path]) -> None:
    loaded = load_image_model(save(tmp_path / "flow", "flow", size=(16, 64), **{**SMALL, "img_size": (16, 64)}))
    image, weights = pictures.weights_seen(loaded, pictures.attentions(loaded)[-1], pictures.read_image(images[1]))
    assert image.shape == (16, 64, 3) and weights.weights.shape == weights.allocation.shape == (2, 8)


def test_a_hierarchical_flowformer(tmp_path: Path, images: list[Path]) -> None:
    """Competition and allocation (a gate) of a hierarchical Flowformer; the first stage has most tokens."""
    model = "flowformer_hier_test"
    folder = tmp_path / "hier"
    folder.mkdir()
    built = timm.create_model(model, num_classes=10, img_size=32)
    torch.save(
        {
            "state_dict": built.state_dict(),
            "args": argparse.Namespace(
                model=model, num_classes=10, in_chans=None, gp=None, img_size=32, model_kwargs={"img_size": 32}
            ),
        },
        folder / "last.pth.tar",
    )
    loaded = load_image_model(folder / "last.pth.tar")
    modules = pictures.attentions(loaded)
    _, first = pictures.weights_seen(loaded, modules[0], pictures.read_image(images[1]))
    _, last = pictures.weights_seen(loaded, modules[-1], pictures.read_image(images[1]))
    assert first.competition and first.weights.size > last.weights.size
    assert first.weights.shape[0] == first.weights.shape[1] and (0 < first.allocation).all()
    assert (first.allocation < 1).all() and np.isclose(first.weights.mean(), 1, atol=1e-5)


def test_what_cannot_be_drawn(
    tmp_path: Path, images: list[Path], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line on stderr, and no folder."""
    file = str(save(tmp_path / "linear", "linear", **SMALL))
    torch.save({"cfg": {}, "model": {}}, tmp_path / "text.pt")
    (tmp_path / "not.png").write_text("no image")
    image = str(images[0])
    for command, named in (
        (["--checkpoint", file, "--image", str(tmp_path / "not.png")], "not.png, which cannot be read"),
        (["--checkpoint", file, "--image", image, "--layer", "3"], "--layer is 3; allowed for"),
        (["--checkpoint", file, "--image", image, "--layer", "0"], "--layer is 0; allowed for"),
        (["--checkpoint", file, file, "--image", image, "--names", "a"], "--names has 1 names; allowed: 2"),
        (["--checkpoint", str(tmp_path / "text.pt"), "--image", image], "is of fairseq-train; allowed"),
        (["--checkpoint", str(tmp_path / "none.pth.tar"), "--image", image], "none.pth.tar, which does not exist"),
    ):
        assert pictures.main([*command, "--output", str(tmp_path / "out")]) == 1
        assert named in capsys.readouterr().err
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1)
    assert pictures.main(["--checkpoint", file, "--image", image, "--output", str(tmp_path / "out")]) == 1
    assert "which cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
