"""Pictures of DAFT models: checkpoints of both hosts, values worked out by hand, files that are refused, curves."""

import argparse
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import timm
import torch
import yaml
from fairseq import options as fairseq_options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import build_model
from omegaconf import OmegaConf
from PIL import Image
from timm.data import create_transform, resolve_data_config
from timm.models import save_for_hf

import timm_plugin  # noqa: F401  (registers the models)
from common.attention import DaftConvAttention, DaftFullAttention
from fairseq_plugin.data.pixels import pixel_dictionary
from recipes.daft import curves, pictures
from recipes.trained import load
from tests.fairseq_plugin.helpers.language_models import SMALL

CONV = dict(num_classes=10, patch_size=4, window=(5, 3))
FULL = dict(img_size=16, patch_size=4, embed_dim=8, depth=2, num_heads=2)
#: Architecture -> its options in small.
TEXT = {"daft_conv_lm": ("--daft-window", "9"), "daft_full_lm": ("--daft-bias-dim", "3")}


def awake(model: torch.nn.Module) -> torch.nn.Module:
    """``model`` with random biases and filters, which are 0 in a new model."""
    for module in model.modules():
        if isinstance(module, DaftConvAttention | DaftFullAttention):
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter)
    return model.eval()


def of_timm(path: Path, name: str, kwargs: dict) -> torch.nn.Module:
    """A model, saved as timm's train.py does."""
    model = awake(timm.create_model(name, **kwargs))
    saved = argparse.Namespace(model=name, num_classes=None, in_chans=None, gp=None, model_kwargs=kwargs)
    torch.save({"state_dict": model.state_dict(), "args": saved}, path)
    return model


def of_fairseq(path: Path, arch: str, task: str, tokens: int) -> torch.nn.Module:
    """A model, saved as fairseq-train does, with fairseq's configuration objects."""
    command = ["data", "--task", task, "--arch", arch, *SMALL, *TEXT[arch], "--tokens-per-sample", str(tokens)]
    parsed = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), command)
    config, symbols = convert_namespace_to_omegaconf(parsed), pixel_dictionary()
    model = awake(build_model(config.model, argparse.Namespace(source_dictionary=symbols, target_dictionary=symbols)))
    history = [{"optimizer_name": "FairseqAdam", "lr_scheduler_state": {}, "num_updates": 1}]
    content = {"cfg": OmegaConf.create(config), "model": model.state_dict(), "optimizer_history": history}
    torch.save({"args": None, "extra_state": {}, "task_state": {}, "last_optimizer_state": {}, **content}, path)
    return model


@pytest.fixture
def image(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    return tmp_path / "image.png"


def panels(rows: list) -> list[np.ndarray]:
    """The drawn logarithms, in order."""
    return [panel for row in rows for _, panel in row if panel is not None and panel.ndim == 2]


@pytest.mark.parametrize(("name", "kwargs"), [("daft_conv_test", CONV), ("daft_full_s", FULL)])
@torch.no_grad()
def test_an_image_model(name: str, kwargs: dict, image: Path, tmp_path: Path) -> None:
    """Biases are the model's, and keys are those of its weights for the image as timm reads it."""
    model = of_timm(tmp_path / "x.pth", name, kwargs)
    loaded = load(tmp_path / "x.pth")
    attention = [block.attn.attention for block in model.blocks]
    full = isinstance(attention[0], DaftFullAttention)
    expected = [x.pe0 @ x.pe1.T if full else x.position_bias() for x in attention]
    drawn = panels(pictures.biases(loaded.model, 8)[0])
    assert np.allclose(np.stack(drawn), torch.stack(expected).reshape(-1, *drawn[0].shape), atol=1e-5)
    config = resolve_data_config({"input_size": (3, *model.patch_embed.img_size)}, model=model)
    x = create_transform(**config, is_training=False)(Image.open(image))[None]
    block, normalised = model.blocks[0], []
    with block.norm1.register_forward_hook(lambda module, inputs, out: normalised.append(out)):
        model(x)
    start, width = block.attn.widths[0], block.attn.widths[1]
    keys = normalised[0] @ block.attn.qkv.weight.T + block.attn.qkv.bias
    keys = keys[0].flatten(0, -2)[model.num_prefix_tokens :, start : start + width]
    weights = keys.exp().T  # (heads or channels, tokens)
    shares = (weights / weights.mean(1, keepdim=True)).unflatten(1, model.patch_embed.grid_size)
    found = np.exp(np.stack(panels(pictures.keys(loaded, image, 99))[: len(shares)]))
    assert np.allclose(found, shares, rtol=1e-3)


@pytest.mark.parametrize(("arch", "channels"), [("daft_conv_lm", 1), ("daft_full_lm", 3)])
@torch.no_grad()
def test_a_pixel_model(arch: str, channels: int, image: Path, tmp_path: Path) -> None:
    """It reads an image after </s> and without its last subpixel; a pixel has the mean share of its subpixels."""
    of_fairseq(tmp_path / "x.pt", arch, "pixel_modeling", 16 * channels)
    loaded, inner = load(tmp_path / "x.pt"), []
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4, channels), dtype=np.uint8)
    Image.fromarray(pixels[..., 0] if channels == 1 else pixels).save(image)
    tokens = torch.from_numpy(pixels.reshape(1, -1).astype(int)) + 4
    with loaded.model.decoder.layers[0].self_attn.k_proj.register_forward_hook(lambda *seen: inner.append(seen[-1])):
        loaded.model(torch.cat([torch.tensor([[2]]), tokens[:, :-1]], dim=1))
    weights = inner[0][1:, 0].exp()
    shares = torch.cat([weights / weights.mean(0), torch.full_like(weights[:1], torch.nan)])
    expected = shares.view(4, 4, channels, -1).nanmean(2).permute(2, 0, 1)
    rows = pictures.keys(loaded, image, 99)
    found = np.exp(np.stack(panels(rows)[: len(expected)]))
    assert np.allclose(found, expected, rtol=1e-3, equal_nan=True)
    assert np.array_equal((rows[0][0][1] * 255).round()[..., :channels], pixels)
    biases = panels(pictures.biases(loaded.model, 8)[0])[0]
    assert arch == "daft_conv_lm" or np.array_equal(np.isnan(biases), np.triu(np.ones(biases.shape, bool), 1))


def test_the_command_draws_files_of_both_hosts(image: Path, tmp_path: Path, capsys) -> None:
    """Averaged weights come first; a text model has biases alone; nothing is written over."""
    of_timm(tmp_path / "x.pth", "daft_conv_test", CONV)
    state = torch.load(tmp_path / "x.pth", weights_only=False)
    averaged = awake(timm.create_model("daft_conv_test", **CONV)).state_dict()
    torch.save({**state, "state_dict_ema": averaged}, tmp_path / "ema.pth")
    assert torch.equal(load(tmp_path / "ema.pth").model.state_dict()["head.weight"], averaged["head.weight"])
    save_for_hf(timm.create_model("daft_conv_test", patch_size=4), tmp_path / "hub", model_args={"patch_size": 4})
    of_fairseq(tmp_path / "text.pt", "daft_conv_lm", "language_modeling", 48)
    for name, more in {"x.pth": ["--image", str(image)], "hub": [], "text.pt": ["--heads", "2"]}.items():
        command = ["--checkpoint", str(tmp_path / name), "--output", str(tmp_path / f"out.{name}"), *more]
        pictures.main(command)
        written = sorted(path.name for path in (tmp_path / f"out.{name}").iterdir())
        assert written == ["key_maps.png"] * ("--image" in more) + ["position_biases.png"]
        for path in (tmp_path / f"out.{name}").iterdir():
            assert len(Image.open(path).convert("RGB").getcolors(2**24)) > 50
        with pytest.raises(SystemExit):
            pictures.main(command)
        assert "which exists; allowed: a new folder" in capsys.readouterr().err


class Stranger:
    """A class that no checkpoint should hold."""


def test_files_that_run_code_or_name_a_place_of_weights_are_refused(tmp_path: Path) -> None:
    place = {"pretrained_cfg": {"url": "http://localhost:1/x"}}
    files = {
        "stranger": Stranger(),
        "hub": argparse.Namespace(model="hf-hub:someone/model"),
        "url": argparse.Namespace(model="daft_conv_test", model_kwargs=place),
        "nameless": None,
    }
    for name, saved in files.items():
        torch.save({"args": saved, "state_dict": {}}, tmp_path / name)
        with pytest.raises(ValueError, match=f"{name}.*allowed"):
            load(tmp_path / name)
    of_timm(tmp_path / "flow", "flowformer_deit_ti", dict(img_size=32, depth=1))
    with pytest.raises(SystemExit, match="without DAFT"):
        pictures.main(["--checkpoint", str(tmp_path / "flow"), "--output", str(tmp_path / "out")])


def test_curves(tmp_path: Path) -> None:
    """By epoch, by window and by width; a window has a line of runs that see what is outside, and one of others."""
    runs = []
    for window, alone in ((3, False), (5, False), (3, True)):
        folder = tmp_path / f"{window}{alone}"
        folder.mkdir()
        kwargs = {"window": window, "local_only": alone}
        (folder / "args.yaml").write_text(yaml.safe_dump({"model": "daft_conv_test", "model_kwargs": kwargs}))
        pd.DataFrame({"epoch": [0, 1], "eval_top1": [50.0, 60.0 + window]}).to_csv(folder / "summary.csv")
        runs.append(str(folder))
    for across in curves.LABELS:
        path = tmp_path / "new" / f"{across}.png"
        curves.main(["--runs", *runs, "--across", across, "--output", str(path)])
        assert len(Image.open(path).convert("RGB").getcolors(2**24)) > 50
    assert curves.place(Path(runs[0]), "kernel_size") == ("daft_conv_test, with what is outside", 3)
    assert curves.place(Path(runs[2]), "kernel_size") == ("daft_conv_test, window alone", 3)
    assert math.isfinite(curves.place(Path(runs[1]), "width")[1])
