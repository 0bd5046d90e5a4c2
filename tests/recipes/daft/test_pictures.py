"""Pictures of DAFT: reading checkpoints of both hosts, computing maps, and drawing them."""

import argparse
from collections import OrderedDict

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from omegaconf import OmegaConf
from PIL import Image
from timm.data import create_transform, resolve_data_config
from timm.utils import CheckpointSaver

import timm_plugin  # noqa: F401  (registers the models)
from common.attention import DaftConvAttention, DaftFullAttention
from common.files.output_files import MARK
from recipes.daft import drawing, pictures
from recipes.daft.maps import Bias, KeyMaps, key_maps, position_biases
from recipes.shared.trained_models import load_model
from tests.fairseq_plugin.helpers.language_models import SMALL
from tests.processes import CHECKOUT, run_program

CONV = dict(num_classes=10, patch_size=4, window=(5, 3))
FULL = dict(img_size=16, patch_size=4, embed_dim=8, depth=2, num_heads=2)


def awake(model, seed=0):
    """``model`` with random biases and filters, which are 0 in a new model."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, (DaftConvAttention, DaftFullAttention)):
            for parameter in module.parameters():
                parameter.data = torch.randn(parameter.shape, generator=generator)
    return model.eval()


def vision(name="daft_conv_test", **kwargs):
    torch.manual_seed(0)
    return awake(timm.create_model(name, **(kwargs or CONV)))


def same_weights(one, other):
    first, second = one.state_dict(), other.state_dict()
    return list(first) == list(second) and all(torch.equal(first[key], second[key]) for key in first)


def train_arguments(model, **more):
    """The arguments as timm's train.py stores them in checkpoints."""
    return argparse.Namespace(**{"model": model, "num_classes": None, "in_chans": None, "gp": None, **more})


def save_as_train_does(folder, model, arguments, ema=None):
    """Save a file with timm's own CheckpointSaver."""
    optimizer = torch.optim.AdamW(model.parameters())
    saver = CheckpointSaver(
        model, optimizer, args=arguments, model_ema=ema, checkpoint_dir=str(folder), recovery_dir=str(folder)
    )
    saver.save_checkpoint(0, metric=1.0)
    return folder / "model_best.pth.tar"


def language_checkpoint(path, arch, task="language_modeling", words=256, tokens=48, **options):
    """A file as fairseq-train writes it, and its model."""
    from fairseq import options as host_options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.models import build_model

    import fairseq_plugin  # noqa: F401
    from fairseq_plugin.data.pixels import pixel_dictionary

    command = ["data", "--task", task, "--arch", arch, *SMALL, "--tokens-per-sample", str(tokens)]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    config = convert_namespace_to_omegaconf(
        host_options.parse_args_and_arch(host_options.get_training_parser(), command)
    )
    symbols = pixel_dictionary()
    assert words == 256
    torch.manual_seed(0)
    model = awake(build_model(config.model, argparse.Namespace(source_dictionary=symbols, target_dictionary=symbols)))
    state = {
        "args": None,
        "cfg": OmegaConf.to_container(config, resolve=True, enum_to_str=True),
        "model": model.state_dict(),
        "optimizer_history": [{"optimizer_name": "FairseqAdam", "lr_scheduler_state": {}, "num_updates": 1}],
        "extra_state": {"train_iterator": {"epoch": 1}},
        "task_state": {},
        "last_optimizer_state": {},
    }
    torch.save(state, path)
    return model


@pytest.fixture
def image(tmp_path):
    """An image file, neither square nor grey."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    return tmp_path / "image.png"


# Checkpoints


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (lambda: vision(), {"num_classes": 10, "model_kwargs": CONV, "img_size": 32, "mean": [0.0], "std": [1.0]}),
        (
            lambda: vision(num_classes=3, in_chans=1, global_pool="max"),
            {"num_classes": 3, "input_size": [1, 32, 32], "gp": "max"},
        ),
    ],
)
def test_train_py_says_its_model(model, arguments, image, tmp_path):
    """Averaged weights are preferred; images use the training's size and settings."""
    model, ema = model(), argparse.Namespace(module=awake(model(), seed=1))
    arguments = train_arguments("daft_conv_test", **{"model_kwargs": {}, **arguments})
    loaded = load_model(save_as_train_does(tmp_path, model, arguments, ema))
    assert loaded.reads == "images" and not loaded.model.training
    assert same_weights(loaded.model, ema.module) and not same_weights(loaded.model, model)
    assert (loaded.model.global_pool, loaded.model.in_chans) == (model.global_pool, model.in_chans)
    maps = key_maps(loaded, image)
    assert maps.image.shape[:2] == (32, 32) and (maps.image.ndim == 3) == (model.in_chans == 3)


@pytest.mark.parametrize("form", ["wrapped", "safetensors"])
def test_state_dicts_need_a_name(form, tmp_path):
    model, path = vision("daft_full_s", **FULL), tmp_path / f"weights.{form}"
    state = model.state_dict()
    if form == "safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save({"state_dict": state}, path)
    assert same_weights(load_model(path, "daft_full_s", FULL).model, model)
    with pytest.raises(ValueError, match=rf"{path.name} .*allowed.*--model"):
        load_model(path)
    with pytest.raises(ValueError, match="cannot be daft_full_s") as refusal:
        load_model(path, "daft_full_s")
    assert len(str(refusal.value)) < 600, "not every parameter of the model is named"


def test_folders_of_timms_hub(tmp_path):
    from timm.models import save_for_hf

    model = vision("daft_conv_test", num_classes=10, patch_size=4)
    save_for_hf(model, tmp_path, model_args={"patch_size": 4}, safe_serialization="both")
    assert same_weights(load_model(tmp_path).model, model)


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("daft_conv_lm_enwik8", {"daft_window": 9, "daft_gumbel_temperature": 0.5}),
        ("daft_full_lm", {"daft_bias_dim": 3, "daft_no_query": True}),
    ],
)
def test_fairseqs_checkpoints_need_no_data(arch, options, tmp_path):
    model = language_checkpoint(tmp_path / "x.pt", arch, **options)
    loaded = load_model(tmp_path / "x.pt")
    assert loaded.reads == "text" and type(loaded.model) is type(model) and same_weights(loaded.model, model)
    tokens = torch.randint(4, 260, (2, 11))
    assert torch.equal(loaded.model(tokens)[0], model(tokens)[0])


def test_fairseqs_checkpoints_with_configuration_objects(tmp_path):
    """Checkpoints of a model without a dataclass hold omegaconf's classes, which the plugin lets torch read.

    In a separate process that has not imported the plugin before.
    """
    language_checkpoint(tmp_path / "x.pt", "daft_conv_lm", daft_window=9)
    state = torch.load(tmp_path / "x.pt", weights_only=True)
    torch.save({**state, "cfg": OmegaConf.create(state["cfg"])}, tmp_path / "objects.pt")
    arguments = ["--checkpoint", str(tmp_path / "objects.pt"), "--output", str(tmp_path / "out")]
    run_program(["-m", "recipes.daft.pictures", *arguments], cwd=str(CHECKOUT))
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [MARK, "position_biases.png"]


class Stranger:
    """A class that no checkpoint should hold."""


def test_files_that_are_no_checkpoint_of_ours_are_refused(tmp_path):
    (tmp_path / "text.pt").write_text("no checkpoint")
    torch.save({"state_dict": OrderedDict(), "args": Stranger()}, tmp_path / "stranger.pt")
    language_checkpoint(tmp_path / "flow.pt", "flowformer_lm")
    language_checkpoint(tmp_path / "daft.pt", "daft_conv_lm", daft_window=9)
    adaptive = {"adaptive_input": True, "adaptive_input_cutoff": "50,100", "daft_window": 9}
    language_checkpoint(tmp_path / "adaptive.pt", "daft_conv_lm", **adaptive)
    flow = timm.create_model("flowformer_deit_ti", img_size=32, depth=1)
    save_as_train_does(tmp_path, flow, train_arguments("flowformer_deit_ti", model_kwargs=dict(img_size=32, depth=1)))
    expected = {
        ("missing.pt",): "--checkpoint is .*missing.pt.*allowed",
        ("text.pt",): "text.pt .*torch.save.*allowed",
        ("stranger.pt",): "stranger.pt .*Stranger; allowed",
        ("flow.pt",): "flow.pt .*flowformer_lm.*DAFT",
        ("adaptive.pt",): "adaptive .*; allowed",
        ("daft.pt", "daft_conv_s"): "--model or --model-kwargs .*daft.pt",
        ("model_best.pth.tar", "no_such_model"): "no_such_model.*Unknown model",
    }
    for (name, *model), message in expected.items():
        with pytest.raises(ValueError, match=message):
            load_model(tmp_path / name, *model)
    loaded = load_model(tmp_path / "model_best.pth.tar")
    with pytest.raises(ValueError, match="VisionTransformer.*DAFT; allowed"):
        position_biases(loaded.model)


# Computed maps


def test_biases_of_every_layer():
    for model in (vision(), vision("daft_full_s", **FULL), vision("daft_conv_test", window=3, reparameterize=False)):
        biases = position_biases(model)
        assert len(biases) == len(model.blocks)
        for bias, block in zip(biases, model.blocks):
            module = block.attn.attention
            w = module.pe0 @ module.pe1.T if bias.full else module.position_bias()
            assert np.allclose(bias.values, (w.exp() - 1).detach().numpy(), rtol=1e-4, atol=1e-5)
            assert bias.full == isinstance(module, DaftFullAttention) and not bias.causal
    assert position_biases(vision())[0].values.shape == (4, 5, 3)


def test_a_causal_matrix_has_nothing_where_nothing_is_seen(tmp_path):
    model = language_checkpoint(tmp_path / "x.pt", "daft_full_lm", daft_bias_dim=3, tokens=7)
    for bias in position_biases(model):
        assert bias.values.shape == (7, 7) and bias.causal
        assert np.array_equal(np.isnan(bias.values), np.triu(np.ones((7, 7), bool), 1))


def keys_by_hand(model, x, layer):
    """Keys (1, heads or channels, tokens) of a layer of a timm model, from its weights."""
    block, normalised = model.blocks[layer], []
    with block.norm1.register_forward_hook(lambda module, inputs, out: normalised.append(out)):
        model(x)
    start, width = block.attn.widths[0], block.attn.widths[1]
    keys = (normalised[0] @ block.attn.qkv.weight.T + block.attn.qkv.bias)[..., start : start + width]
    return keys.flatten(1, -2).transpose(1, 2)


@pytest.mark.parametrize("name", ["daft_conv_test", "daft_full_s"])
@torch.no_grad()
def test_key_maps_of_vision_models(name, image, tmp_path):
    model = vision(name, **(CONV if name == "daft_conv_test" else FULL))
    torch.save(model.state_dict(), tmp_path / "x.pt")
    maps = key_maps(load_model(tmp_path / "x.pt", name, CONV if name == "daft_conv_test" else FULL), image)
    size = (3, *model.patch_embed.img_size)
    config = resolve_data_config({"input_size": size}, model=model)
    x = create_transform(**config, is_training=False)(Image.open(image))[None]
    grid = model.patch_embed.grid_size
    assert len(maps.layers) == len(model.blocks)
    for layer, layer_keys in enumerate(maps.layers):
        keys = keys_by_hand(model, x, layer)[0, :, model.num_prefix_tokens :]  # without the class token
        weights = keys.exp()
        expected = (weights / weights.mean(1, keepdim=True)).unflatten(1, grid)
        assert layer_keys.shape == expected.shape and np.allclose(layer_keys, expected.numpy(), rtol=1e-3)
        assert np.allclose(layer_keys.mean((1, 2)), 1.0, atol=1e-4)
    assert maps.heads_are == ("head" if name == "daft_conv_test" else "channel")
    assert maps.layers[0].shape[0] == (4 if name == "daft_conv_test" else 8)
    assert maps.image.shape == (*x.shape[2:], 3) and 0 <= maps.image.min() < maps.image.max() <= 1


@pytest.mark.parametrize(("arch", "channels"), [("daft_conv_lm", 1), ("daft_full_lm", 3)])
@torch.no_grad()
def test_key_maps_of_pixel_models(arch, channels, tmp_path):
    options = {"daft_window": 9} if arch == "daft_conv_lm" else {"daft_bias_dim": 3}
    language_checkpoint(tmp_path / "x.pt", arch, "pixel_modeling", tokens=16 * channels, **options)
    loaded = load_model(tmp_path / "x.pt")
    assert loaded.reads == "pixels"
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4, channels), dtype=np.uint8)
    Image.fromarray(pixels[..., 0] if channels == 1 else pixels).save(tmp_path / "image.png")
    maps = key_maps(loaded, tmp_path / "image.png")
    tokens = torch.from_numpy(pixels.reshape(1, -1).astype(int)) + 4
    source = torch.cat([torch.tensor([[2]]), tokens[:, :-1]], dim=1)
    inner = {}
    attention = loaded.model.decoder.layers[0].self_attn
    hook = attention.k_proj.register_forward_hook(lambda module, given, out: inner.update(keys=out))
    loaded.model(source)
    hook.remove()
    weights = inner["keys"][1:, 0].exp()  # (T - 1, heads or channels): the first is that of </s>
    shares = torch.cat([weights / weights.mean(0), torch.full_like(weights[:1], torch.nan)])
    expected = shares.view(4, 4, channels, -1).nanmean(2).permute(2, 0, 1)
    assert len(maps.layers) == 2 and np.allclose(maps.layers[0], expected.numpy(), rtol=1e-3, equal_nan=True)
    assert np.isnan(maps.layers[0]).any() == (channels == 1), "the last subpixel is read by nothing"
    assert np.array_equal((maps.image * 255).round().astype(int), pixels[..., 0] if channels == 1 else pixels)


def test_images_for_models_that_do_not_take_them_are_refused(image, tmp_path, monkeypatch):
    language_checkpoint(tmp_path / "text.pt", "daft_conv_lm", daft_window=9)
    with pytest.raises(ValueError, match="^--image is .*; allowed with .*text"):
        key_maps(load_model(tmp_path / "text.pt"), image)
    language_checkpoint(tmp_path / "oblong.pt", "daft_conv_lm", "pixel_modeling", tokens=60, daft_window=9)
    with pytest.raises(ValueError, match="60 subpixels; allowed.*--image"):
        key_maps(load_model(tmp_path / "oblong.pt"), image)
    with pytest.raises(ValueError, match="4 channels; allowed.*--image"):
        key_maps(argparse.Namespace(model=vision(in_chans=4), reads="images", data={}), image)
    (tmp_path / "text.png").write_text("no image")
    for wrong in ("text.png", "missing.png"):
        with pytest.raises(ValueError, match=f"^--image is .*{wrong}.*; allowed"):
            key_maps(argparse.Namespace(model=vision(), reads="images"), tmp_path / wrong)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1)
    with pytest.raises(ValueError, match="^--image is .*exceeds limit.*; allowed"):
        key_maps(argparse.Namespace(model=vision(), reads="images"), image)


# Drawings


@pytest.fixture
def figures(monkeypatch):
    """Figures, kept open after they are saved."""
    unclosed = []
    monkeypatch.setattr(drawing.plt, "close", unclosed.append)
    yield unclosed
    monkeypatch.undo()
    for figure in unclosed:
        drawing.plt.close(figure)


def panels(figure):
    """Axes that show an array, except the colour bar."""
    return [axes for axes in figure.axes if axes.images]


@pytest.mark.parametrize("causal", [True, False])
def test_biases_are_drawn_in_one_scale_of_colours(causal, figures, tmp_path):
    """Lines by distance of the token; a single large entry does not make the others pale."""
    values = np.linspace(-0.5, 0.5, 5 * 2 * 701).reshape(5, 2, 701)
    values[0, 0, 0] = 1e6
    drawing.draw_biases([Bias(layer, False, causal) for layer in values], 8, "Model", tmp_path / "x.png")
    images = [axes.images[0] for axes in panels(figures[0])]
    assert len(images) == 5 and all(np.array_equal(*pair) for pair in zip((x.get_array() for x in images), values))
    assert {id(x.norm) for x in images} == {id(images[0].norm)} and images[0].norm.vmax < 1
    assert images[0].norm(0.0) == pytest.approx(0.5)
    assert images[0].get_extent() == ([-700.5, 0.5, 2.5, 0.5] if causal else [-350.5, 350.5, 2.5, 0.5])
    with Image.open(tmp_path / "x.png") as picture:
        assert picture.width > 400 and len(picture.convert("RGB").getcolors(2**24)) > 50


def test_biases_of_all_pairs_are_drawn_as_a_matrix(figures, tmp_path):
    values = np.where(np.triu(np.ones((7, 7), bool), 1), np.nan, 0.2)
    drawing.draw_biases([Bias(values, True, True)] * 2, 8, "Model", tmp_path / "x.png")
    for axes in panels(figures[0]):
        assert np.array_equal(np.ma.filled(axes.images[0].get_array(), np.nan), values, equal_nan=True)
        assert axes.get_xlabel() == "token seen"
    assert "7 x 7 tokens" in figures[0].get_suptitle()


@pytest.mark.parametrize("spread", [0.0, 0.05, 12.0])
def test_key_maps_their_image_and_ticks(spread, figures, tmp_path):
    generator = np.random.default_rng(0)
    layers = list(np.exp(spread * generator.uniform(-1, 1, size=(3, 6, 4, 5))))
    layers[0][:, 3, 4] = np.nan
    picture = generator.random((8, 10, 3))
    drawing.draw_key_maps(KeyMaps(picture, layers, "channel"), 2, "Model", tmp_path / "x.png")
    image, *key_panels = panels(figures[0])
    assert np.array_equal(image.images[0].get_array(), picture) and len(key_panels) == 3 * 2
    for axes, expected in zip(key_panels, (head for layer in layers for head in layer[:2])):
        assert np.array_equal(np.ma.filled(axes.images[0].get_array(), np.nan), expected, equal_nan=True)
    norm, ticks = key_panels[0].images[0].norm, np.log(key_panels[-1].images[0].colorbar.get_ticks())
    assert norm(1.0) == pytest.approx(0.5) and norm.vmin == pytest.approx(1 / norm.vmax)
    assert 0.0 in ticks and (len(ticks) == 1 or np.diff(ticks).min() > np.log(norm.vmax) / 7), "ticks have room"


# The command


def test_the_command_writes_both_pictures(image, tmp_path, capsys):
    arguments = train_arguments("daft_conv_test", num_classes=10, model_kwargs={"patch_size": 4, "window": (5, 3)})
    path = save_as_train_does(tmp_path, vision(), arguments)
    command = ["--checkpoint", str(path), "--output", str(tmp_path / "a" / "b"), "--heads", "2"]
    assert pictures.main(command) == 0
    assert sorted(file.name for file in (tmp_path / "a" / "b").iterdir()) == [MARK, "position_biases.png"]
    assert pictures.main([*command, "--image", str(image)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("Ready: ")
    for name in ("position_biases", "key_maps"):
        with Image.open(tmp_path / "a" / "b" / f"{name}.png") as picture:
            assert picture.width > 300
    command = ["--checkpoint", str(path), "--output", str(tmp_path / "all")]
    assert pictures.main(command) == 0
    two, four = (tmp_path / folder / "position_biases.png" for folder in ("a/b", "all"))
    assert two.read_bytes() != four.read_bytes(), "--heads is heeded"


def test_what_is_wrong_is_one_line_and_nothing_is_written(tmp_path, capsys):
    assert pictures.main(["--checkpoint", "missing.pt", "--output", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("pictures: --checkpoint is missing.pt") and "allowed" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "saved",
    [
        {"model": "hf-hub:someone/model"},
        {"model": "daft_conv_test", "model_kwargs": {"pretrained_cfg": {"url": "http://localhost:1/x"}}},
        {"model": 3.5, "model_kwargs": ["pretrained"]},
    ],
)
def test_a_file_names_no_place_of_weights(saved, tmp_path):
    """A location of weights in a file is ignored; timm would download or open it."""
    path = tmp_path / "c.pth"
    torch.save({"args": argparse.Namespace(**saved), "state_dict": {}}, path)
    with pytest.raises(ValueError, match="c.pth names the model .*allowed from a file.*--model"):
        load_model(path)
