"""``python -m timm_plugin SCRIPT ARGUMENTS...`` runs a script as Python would, with the models registered."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import timm.task
import torch
import yaml

from tests.processes import CHECKOUT
from tests.readmes import blocks, readmes
from timm_plugin.__main__ import USAGE, main

SCRIPT = """
import json, multiprocessing, os, sys
import sibling

def work(number):
    import timm_plugin
    return sys.path

if __name__ == "__main__":
    import timm
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        worked = pool.apply(work, (1,))
    json.dump(dict(
        argv=sys.argv, path=sys.path[0], file=__file__, models=timm.list_models("flowformer_hier_t*"),
        sibling=sibling.VALUE, worked=worked, fairseq="fairseq" in sys.modules,
    ), open(os.environ["ANSWER"], "w"))
    sys.exit(3)
"""


def test_script_runs_as_python_would_run_it(tmp_path):
    """In a checkout that is not installed, with workers that are new interpreters."""
    for package in ("common", "timm_plugin"):
        shutil.copytree(CHECKOUT / package, tmp_path / "checkout" / package, ignore=shutil.ignore_patterns("*.md"))
    folder = tmp_path / "scripts"
    folder.mkdir()
    script = folder / "script.py"
    (folder / "sibling.py").write_text("VALUE = 7\n")
    script.write_text(SCRIPT)
    arguments = ["--model-kwargs", "clamp=5.0", "-h", "--", "a b", ""]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-m", "timm_plugin", str(script), *arguments],
        cwd=tmp_path / "checkout",
        env={**inherited, "ANSWER": str(folder / "answer"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 3, result.stderr
    answer = json.loads((folder / "answer").read_text())
    assert str(tmp_path / "checkout") in answer.pop("worked")
    assert answer == dict(
        argv=[str(script), *arguments],
        path=str(folder),
        file=str(script),
        models=["flowformer_hier_test", "flowformer_hier_ti"],
        sibling=7,
        fairseq=False,
    )


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ([], 2, USAGE),
        (["--help"], 0, USAGE),
        (["-h"], 0, USAGE),
        (["nowhere/validate.py", "--model", "x"], 2, "timm_plugin: no such file: 'nowhere/validate.py'"),
        (["."], 2, "timm_plugin: no such file: '.'"),
    ],
)
def test_usage_and_no_such_script(arguments, status, said, capsys):
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == status
    captured = capsys.readouterr()
    assert said in (captured.err if status else captured.out)


#: Like timm's scripts: their own parser, with abbreviations and a YAML file of defaults, then one model.
CREATES = """
import argparse, pathlib, sys
import yaml
from timm.models import create_model
from timm.utils import ParseKwargs

config_parser = argparse.ArgumentParser(add_help=False)
config_parser.add_argument("-c", "--config", default="")
parser = argparse.ArgumentParser()
parser.add_argument("--model", "-m", default="resnet18")
parser.add_argument("--gp", default=None)
parser.add_argument("--model-kwargs", nargs="*", default={}, action=ParseKwargs)
config, arguments = config_parser.parse_known_args()
if config.config:
    with open(config.config) as file:
        parser.set_defaults(**yaml.safe_load(file))
args = parser.parse_args(arguments)
pathlib.Path(sys.argv[0] + ".began").touch()
model = create_model(args.model, False, num_classes=3, global_pool=args.gp, **args.model_kwargs)
layers = [type(module).__name__ for module in model.modules()]
pathlib.Path(sys.argv[0] + ".layers").write_text(" ".join(layers))
"""


@pytest.fixture
def creating(tmp_path, monkeypatch):
    """A script that creates a model; the launcher's changes are undone."""
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(timm, "create_model", timm.create_model)
    monkeypatch.setattr(timm.models, "create_model", timm.models.create_model)
    for task in [value for value in vars(timm.task).values() if isinstance(value, type)]:
        if "prepare_distributed" in vars(task):
            monkeypatch.setattr(task, "prepare_distributed", task.prepare_distributed)
    script = tmp_path / "creating.py"
    script.write_text(CREATES)
    return script


def _config(script: Path, text: str) -> str:
    path = script.with_suffix(".yaml")
    path.write_text(text)
    return str(path)


def _refusal(arguments: list[str], capsys: pytest.CaptureFixture) -> str:
    """The one-line error that ends a refused script, without the plugin's name."""
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("timm_plugin: ")
    return line.removeprefix("timm_plugin: ")


IGNORES = "vit_pwee_patch16_reg1_gap_256"
SMALL = ["depth=1", "embed_dim=32", "num_heads=2", "img_size=32"]
VIT = ["-m", "vit_tiny_patch16_224", "--model-kwargs"]
HIER = ["-m", "flowformer_hier_test"]


#: Arguments of the script, what follows its model, and the one line.
REFUSED = [
    (["--model", IGNORES, "--model-kw", "attn_layer=flow", "depth=1"], "", f"attn_layer is 'flow', and {IGNORES}"),
    (["-c", f"model: {IGNORES}\nmodel_kwargs: {{attn_layer: flow, depth: 1}}\n"], "", f"'flow', and {IGNORES}"),
    ([*VIT, "attn_layer=flow*3,softmax", *SMALL], "", "a pattern of 4 layers; allowed: of at most 1"),
    ([*VIT, "attn_layer=flwo", *SMALL], "", "attn_layer is 'flwo'; allowed: attn, .*nearest: 'flow'"),
    ([*VIT, "attn_layer=3", *SMALL], "", "attn_layer is 3; allowed: the name of a mechanism"),
    ([*VIT, "attn_layer=daft_full", "dynamic_img_size=True", *SMALL], "", "dynamic_img_size is True, .*'daft_full'"),
    (HIER, "model(torch.zeros(1, 3, 40, 40))", "x has image size 40 x 40; allowed: 64 x 64"),
    (HIER, "timm.create_model('flowformer_hier_test', imgsize=64)", "no argument 'imgsize'.*nearest: 'img_size'"),
    (HIER, "raise AssertionError('CUDA is not available but cuda was specified.')", "no CUDA here, add --device cpu"),
    (HIER, "raise RuntimeError('Found no NVIDIA driver on your system.')", "no CUDA here, add --device cpu"),
]


@pytest.mark.parametrize(("arguments", "after", "said"), REFUSED)
def test_a_mistake_of_the_user_is_one_line(creating, arguments, after, said, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = [_config(creating, x) if "\n" in x else x for x in arguments]
    creating.write_text(f"{CREATES}import torch, timm\n{after}\n")
    line = _refusal([str(creating), *arguments], capsys)
    assert re.search(said, line), line
    assert Path(f"{creating}.layers").exists() == bool(after)


#: A script that declares its device as timm's do, and writes a file when it begins.
COMPUTES = """
import argparse, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("-c", "--config")
parser.add_argument('--device', default='cuda', type=str)
if sys.argv[0].endswith("train.py"):
    parser.add_argument("--device-modules", nargs="+")
parser.add_argument("--data-dir")
pathlib.Path(sys.argv[0] + ".began").write_text(str(parser.parse_args().device))
"""


@pytest.fixture
def computing(creating, monkeypatch):
    """Runs ``COMPUTES`` with the given words, where there is no CUDA; returns the device that it would compute with."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(words: str, name: str = "validate.py") -> str:
        script = creating.parent / name
        script.write_text(COMPUTES)
        main([str(script), *words.split()])
        return Path(f"{script}.began").read_text()

    return run


@pytest.mark.parametrize("words", ["", "--data-dir x", "--device cuda", "--device=cuda:1", "--dev cuda"])
def test_a_missing_gpu_is_one_line_before_the_script_begins(computing, words, tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit) as exited:
        computing(words)
    assert exited.value.code == 2 and not list(tmp_path.glob("*.began"))
    (line,) = capsys.readouterr().err.splitlines()
    assert "CUDA" in line and "--device cpu" in line
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert computing(words).startswith("cuda")


@pytest.mark.parametrize(
    ("words", "device"),
    [
        ("--device cpu", "cpu"),
        ("--device=cpu", "cpu"),
        ("--dev cpu", "cpu"),
        ("-c settings.yaml --device mps", "mps"),
        ("-c settings.yaml", "cuda"),  # the file may name another
        ("--help", None),
    ],
)
def test_another_device_a_file_of_settings_and_help_are_left_to_the_script(computing, words, device, capsys):
    if device is not None:
        assert computing(words) == device
        return
    with pytest.raises(SystemExit) as exited:
        computing(words)
    assert exited.value.code == 0 and "--device" in capsys.readouterr().out


def test_device_modules_are_no_device(computing):
    with pytest.raises(SystemExit):
        computing("--device-modules cpu", "train.py")
    assert computing("--device-modules timm_plugin --device cpu", "train.py") == "cpu"


def test_errors_of_a_script_stay_what_they_are(creating):
    for error in (ValueError, RuntimeError, AssertionError):
        creating.write_text(f"raise {error.__name__}('of the script')\n")
        with pytest.raises(error):
            main([str(creating)])


@pytest.mark.parametrize(
    "arguments, kind",
    [
        ([*VIT, "attn_layer=flow", *SMALL], "FlowSelfAttention"),
        # Arguments that the script adds also count: a model without class token needs --gp.
        (["--gp", "avg", *VIT, "attn_layer=flow", "class_token=False", *SMALL], "FlowSelfAttention"),
        ([*VIT, "attn_layer=cosformer", *SMALL], "CosformerSelfAttention"),
        ([*VIT, "attn_layer=flow,hedgehog*2", *SMALL, "depth=3"], "HedgehogSelfAttention"),
        (["-m", IGNORES, "--model-kwargs", "attn_layer=diff", "depth=1"], "ParallelScalingBlock"),  # not ours to judge
        # Without a grid, it would refuse images.
        (["--gp", "avg", *VIT, "attn_layer=daft_conv", "class_token=False", *SMALL], "DaftConvSelfAttention"),
        (HIER, "FlowSelfAttention"),
        (["-m", "test_vit"], "Attention"),
        (["-m", "nf_regnet_b0", "--model-kwargs", "attn_layer=eca"], "EcaModule"),  # timm's name in such networks
    ],
)
def test_a_model_that_can_be_made_is_made(creating, arguments, kind):
    if "img_size=32" in arguments:
        creating.write_text(f"{CREATES}import torch\nmodel(torch.randn(2, 3, 32, 32))\n")
    main([str(creating), *arguments])
    assert kind in Path(f"{creating}.layers").read_text().split()


@pytest.mark.parametrize(
    "arguments, error",
    [
        (["-c", "model: [\n"], yaml.YAMLError),
        (["-c", "missing.yaml"], FileNotFoundError),
        (["-c", "model_kwargs: [attn_layer]\n"], TypeError),
        (["-m", "no_such_model", "--model-kwargs", "attn_layer=flow"], RuntimeError),
        ([*VIT, "attn_layer=flow", "depht=1"], TypeError),
        ([*VIT, "attn_layer=flow", "attn_dorp=1"], TypeError),
    ],
)
def test_what_a_script_or_timm_refuses_is_left_to_them(creating, arguments, error):
    """Nothing is read or refused before the script runs, and its errors are passed on unchanged."""
    arguments = [_config(creating, x) if "\n" in x else x for x in arguments]
    with pytest.raises(error) as raised:
        main([str(creating), *arguments])
    assert not isinstance(raised.value, ValueError)


#: timm's scripts that use a GPU by default.
SCRIPTS = re.compile(r"\b(train|validate|inference|benchmark|bulk_runner)\.py\b.* --")


@pytest.mark.parametrize("path", readmes(), ids=lambda path: path.relative_to(CHECKOUT).as_posix())
def test_readmes_say_what_timms_scripts_need_without_a_gpu(path):
    for block in blocks(path):
        if block.language == "shell" and SCRIPTS.search(block.code):
            assert "--device cpu" in block.code or "needs a GPU" in block.code, block.place
