"""The trained weights that are part of the package: they classify digits, and load as timm's own pretrained weights."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from torch import nn

from recipes.images import loaders, validate, write_digits
from tests.compare import assert_close

NAME, TAG = "flowformer_hier_digits", "uci_digits"
MOST_BYTES = 2_000_000
#: In per cent of 360 held-out digits.
LEAST_ACCURACY = 97.0


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    return timm.create_model(NAME, pretrained=True).eval()


@pytest.fixture(scope="module")
def file() -> Path:
    return Path(timm.get_pretrained_cfg(NAME).file)


def test_timm_lists_it() -> None:
    """The tag without weights remains, and other models have none."""
    assert timm.list_pretrained("flowformer*") == [f"{NAME}.{TAG}"]
    assert timm.get_pretrained_cfg(NAME).tag == TAG
    with pytest.raises(RuntimeError, match="No pretrained weights"):
        timm.create_model(f"{NAME}.untrained", pretrained=True)


def test_the_file_is_small_and_in_half_precision(file: Path) -> None:
    assert file.stat().st_size <= MOST_BYTES
    assert {x.dtype for x in load_file(file).values() if x.is_floating_point()} == {torch.float16}


def test_it_classifies_digits_that_it_has_not_seen(trained: nn.Module, tmp_path: Path) -> None:
    write_digits(tmp_path)
    assert validate(trained, loaders(tmp_path, trained)[1])["top1"] >= LEAST_ACCURACY


def _images(channels: int = 3, side: int = 32) -> torch.Tensor:
    return torch.rand(2, channels, side, side, generator=torch.Generator().manual_seed(0))


def test_another_classifier_keeps_the_rest(trained: nn.Module) -> None:
    """Three classes, or none."""
    expected = trained.forward_features(_images())
    for classes in (3, 0):
        model = timm.create_model(NAME, pretrained=True, num_classes=classes).eval()
        assert_close("features", model.forward_features(_images()), expected)
        assert model.num_classes == classes


def test_grey_images_are_those_of_three_equal_channels(trained: nn.Module) -> None:
    """timm adds up the weights of the three channels."""
    grey = timm.create_model(NAME, pretrained=True, in_chans=1).eval()
    assert_close("logits", grey(_images(1)), trained(_images(1).expand(-1, 3, -1, -1)), 1e-2)


def test_features_are_the_maps_of_its_stages(trained: nn.Module) -> None:
    features = timm.create_model(NAME, pretrained=True, features_only=True).eval()(_images())
    for ours, expected in zip(features, trained.forward_intermediates(_images(), intermediates_only=True), strict=True):
        assert_close("features", ours, expected)


def test_larger_images_get_resampled_positions(trained: nn.Module) -> None:
    model = timm.create_model(NAME, pretrained=True, img_size=64).eval()
    assert model(_images(side=64)).shape == (2, 10)
    assert model.pos_embed.weight.shape[1] == 4 * trained.pos_embed.weight.shape[1]
    assert_close("classifier", model.head.fc.weight, trained.head.fc.weight)


def test_a_file_of_the_user_replaces_it(trained: nn.Module, tmp_path: Path) -> None:
    weights = {**trained.state_dict(), "head.fc.bias": torch.arange(10.0)}
    save_file(weights, tmp_path / "mine.safetensors")
    overlay = {"file": str(tmp_path / "mine.safetensors")}
    model = timm.create_model(NAME, pretrained=True, pretrained_cfg_overlay=overlay)
    assert model.head.fc.bias.tolist() == list(range(10))


def test_a_folder_of_it_does_not_name_the_package(trained: nn.Module, file: Path, tmp_path: Path) -> None:
    save_for_hf(trained, tmp_path, safe_serialization=True)
    assert str(file.parent) not in (tmp_path / "config.json").read_text()
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert_close("logits", again(_images()), trained(_images()))


def test_another_attention_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="attention='flow'"):
        timm.create_model(NAME, pretrained=True, attn_layer="linear")
