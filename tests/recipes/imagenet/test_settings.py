"""The settings for timm's train.py, and the models that the README names."""

import argparse
import re
import shlex

import pytest
import timm
import yaml
from timm.utils import ParseKwargs

import timm_plugin
from recipes.runs import ROOT

FOLDER = ROOT / "recipes" / "imagenet"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
#: Settings that may differ between DeiT's and DAFT's files; the paper trains DAFT with DeiT's.
OF_DAFT = {"model", "amp", "amp_dtype"}


def settings(name):
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_settings(name):
    values = settings(name)
    assert values["model"] == name and timm.is_model(name)
    numbers = ("lr_base", "weight_decay", "warmup_lr", "min_lr", "opt_eps")
    assert all(isinstance(values[key], float) for key in numbers)  # YAML reads 1e-8 as text


@pytest.mark.parametrize(
    ("name", "gpus", "images"),
    [
        ("flowformer_hier_s", 6, 768),
        ("flowformer_deit_s", 8, 1024),
        ("daft_conv_s", 8, 1024),
        ("daft_conv_b_384", 8, 64),
    ],
)
def test_learning_rate(name, gpus, images):
    values = settings(name)
    assert gpus * values["batch_size"] == images
    assert values["lr_base_scale"] == "linear"
    assert values["lr_base"] * images / values["lr_base_size"] == pytest.approx(5e-4 * images / 512)


def test_daft_is_trained_as_deit():
    deit, small, base = (settings(name) for name in ("flowformer_deit_s", "daft_conv_s", "daft_conv_b_384"))
    assert {key for key in deit if deit[key] != small.get(key)} == OF_DAFT
    assert {key for key in deit if deit[key] != base.get(key)} == OF_DAFT | {"batch_size", "epochs", "crop_pct"}
    assert (small["epochs"], base["epochs"]) == (300, 100)


def commands():
    """The words of each train.py, validate.py and "..." line of the README with a model or its arguments."""
    blocks = re.findall(r"```shell\n(.*?)```", (FOLDER / "README.md").read_text(), flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line for line in words if "--model" in line or "--model-kwargs" in line]


def test_models_of_the_readme_are_built():
    """Each model is built with the README's arguments, parsed as in train.py."""
    readme_commands = commands()
    assert len(readme_commands) > 10
    for words in readme_commands:
        assert "--model" in words or "--config" in words, words
        name = words[words.index("--model") + 1] if "--model" in words else None
        name = name or settings((ROOT / words[words.index("--config") + 1]).stem)["model"]
        arguments = {}
        if "--model-kwargs" in words:
            pairs = words[words.index("--model-kwargs") + 1 :]
            pairs = pairs[: next((i for i, x in enumerate(pairs) if x[0] == "-"), None)]
            assert all("=" in pair for pair in pairs), words
            arguments = read_as_train_does(pairs)
        if "--gp" in words:
            arguments["global_pool"] = words[words.index("--gp") + 1]
        if "--img-size" in words:
            arguments.setdefault("img_size", int(words[words.index("--img-size") + 1]))
        create = timm_plugin.create_model if "attn_layer" in arguments else timm.create_model
        create(name, device="meta", **arguments)


def read_as_train_does(pairs):
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-kwargs", nargs="*", default={}, action=ParseKwargs)
    return parser.parse_args(["--model-kwargs", *pairs]).model_kwargs
