"""Pictures of image models' weights of patches, from files of timm's train.py."""

import argparse
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform

import timm_plugin
from common.attention import record_attention
from recipes.imagenet import pictures
from recipes.trained import load

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


def save(folder: Path, name: str = "vit_tiny_patch16_224", **kwargs: object) -> Path:
    """A model, saved as timm's train.py does."""
    create = timm_plugin.create_model if "attn_layer" in kwargs else timm.create_model
    model = create(name, num_classes=10, **kwargs)
    height, width = np.broadcast_to(kwargs["img_size"], 2).tolist()
    saved = argparse.Namespace(model=name, num_classes=10, gp=None, input_size=[3, height, width], model_kwargs=kwargs)
    path = folder / f"{name}.{kwargs.get('attn_layer')}.{height}"
    torch.save({"state_dict": model.state_dict(), "args": saved}, path)
    return path


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{i}.png" for i in range(2)]
    for seed, path in enumerate(paths):
        pixels = np.random.default_rng(seed).integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return paths


def test_softmax_weights_are_column_sums_of_timms_own_attention(images: list[Path], tmp_path: Path) -> None:
    path = save(tmp_path, **SMALL)
    loaded = load(path)
    x = create_transform(**loaded.data, is_training=False)(Image.open(images[0]))[None]
    with torch.no_grad():
        expected_scores = loaded.model(x)
        seen = pictures.look(loaded, pictures.attentions(loaded.model)[-1], images[0])
        with record_attention(loaded.model, maps=True) as records:
            assert torch.allclose(loaded.model(x), expected_scores, atol=1e-5)
    sums = records[-1].map[0].sum((0, 1))[1:].view(4, 4).numpy()  # without the class token
    assert np.allclose(seen.weights, sums / sums.mean(), atol=1e-5) and seen.allocation is None
    assert seen.predicted == expected_scores.argmax()


def test_flow_attention_has_competition_and_a_gate_on_a_grid_of_any_shape(images: list[Path], tmp_path: Path) -> None:
    oblong = load(save(tmp_path, **{**SMALL, "img_size": (16, 64)}, attn_layer="flow"))
    seen = pictures.look(oblong, pictures.attentions(oblong.model)[0], images[1])
    assert seen.image.shape == (16, 64, 3) and seen.weights.shape == seen.allocation.shape == (2, 8)
    staged = load(save(tmp_path, "flowformer_hier_test", img_size=32))
    first, *_, last = pictures.attentions(staged.model)
    assert pictures.look(staged, first, images[0]).weights.size > pictures.look(staged, last, images[0]).weights.size
    assert np.isclose(seen.weights.mean(), 1, atol=1e-5) and 0 < seen.allocation.min() < seen.allocation.max() < 1


def test_the_command_draws_models_side_by_side(images: list[Path], tmp_path: Path, capsys) -> None:
    files = [str(save(tmp_path, **SMALL)), str(save(tmp_path, **SMALL, attn_layer="flow"))]
    command = ["--checkpoint", *files, "--image", *map(str, images), "--names", "softmax", "flow"]
    pictures.main([*command, "--output", str(tmp_path / "both")])
    assert {path.name for path in (tmp_path / "both").iterdir()} == {"attention.png", "allocation.png"}
    pictures.main(["--checkpoint", files[0], "--image", str(images[0]), "--output", str(tmp_path / "one")])
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["attention.png"]
    for wrong in (["--layer", "3"], ["--names", "a"], ["--output", str(tmp_path / "one")]):
        with pytest.raises(SystemExit):
            pictures.main([*command, "--output", str(tmp_path / "new"), *wrong])
        assert f"{wrong[0]} " in capsys.readouterr().err.replace("is", "") and not (tmp_path / "new").exists()
