"""``python -m timm_plugin SCRIPT ARGUMENTS...`` runs a script as Python would, with the models registered."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import timm.task
import torch
import yaml

from tests.processes import CHECKOUT
from timm_plugin.__main__ import USAGE, main

SCRIPT = """
import json, multiprocessing, os, sys
import sibling

def work(number):
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
    """In a checkout that is not installed; workers, which are new interpreters, find it as well."""
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


def test_usage_and_no_such_script(capsys):
    missing = "timm_plugin: no such file: 'nowhere/validate.py'"
    for arguments, status, said in (([], 2, USAGE), (["-h"], 0, USAGE), (["nowhere/validate.py", "--x"], 2, missing)):
        with pytest.raises(SystemExit) as exited:
            main(arguments)
        captured = capsys.readouterr()
        assert exited.value.code == status and said in (captured.err if status else captured.out)


#: Like timm's scripts: their own parser, with abbreviations and a YAML file of defaults, then one model.
CREATES = """
import argparse, pathlib, sys
import torch, timm, yaml
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
model = create_model(args.model, False, num_classes=3, global_pool=args.gp, **args.model_kwargs)
layers = [type(module).__name__ for module in model.modules()]
pathlib.Path(sys.argv[0] + ".layers").write_text(" ".join(layers))
"""


@pytest.fixture
def launch(tmp_path, monkeypatch) -> Callable[..., Path]:
    """Runs a script of the given code; a text of several lines among its arguments becomes a file of settings.

    There is no CUDA, and the launcher's changes are undone. Returns the file to which the script writes.
    """
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for module in (timm, timm.models):
        monkeypatch.setattr(module, "create_model", module.create_model)
    for task in [value for value in vars(timm.task).values() if isinstance(value, type)]:
        if "prepare_distributed" in vars(task):
            monkeypatch.setattr(task, "prepare_distributed", task.prepare_distributed)

    def run(code: str, *arguments: str, name: str = "validate.py") -> Path:
        (tmp_path / name).write_text(code)
        (tmp_path / "settings.yaml").write_text("\n".join(x for x in arguments if "\n" in x))
        main([str(tmp_path / name), *(str(tmp_path / "settings.yaml") if "\n" in x else x for x in arguments)])
        return tmp_path / f"{name}.layers"

    return run


def refusal(run: Callable[[], object], capsys: pytest.CaptureFixture) -> str:
    """The one-line error that ends a refused script, without the plugin's name."""
    with pytest.raises(SystemExit) as exited:
        run()
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
def test_a_mistake_of_the_user_is_one_line(launch, arguments, after, said, capsys):
    line = refusal(lambda: launch(f"{CREATES}{after}\n", *arguments), capsys)
    assert re.search(said, line), line


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
        (["-m", "nf_regnet_b0", "--model-kwargs", "attn_layer=eca"], "EcaModule"),  # timm's name in such networks
    ],
)
def test_a_model_that_can_be_made_is_made(launch, arguments, kind):
    forward = "model(torch.randn(2, 3, 32, 32))\n" if "img_size=32" in arguments else ""
    assert kind in launch(CREATES + forward, *arguments).read_text().split()


@pytest.mark.parametrize(
    "code, arguments, error",
    [
        *((f"raise {error.__name__}('of the script')", [], error) for error in (ValueError, RuntimeError)),
        (CREATES, ["-c", "model: [\n"], yaml.YAMLError),
        (CREATES, ["-c", "missing.yaml"], FileNotFoundError),
        (CREATES, ["-c", "model_kwargs: [attn_layer]\n"], TypeError),
        (CREATES, ["-m", "no_such_model", "--model-kwargs", "attn_layer=flow"], RuntimeError),
        (CREATES, [*VIT, "attn_layer=flow", "attn_dorp=1"], TypeError),
    ],
)
def test_what_a_script_or_timm_refuses_is_left_to_them(launch, code, arguments, error):
    with pytest.raises(error):
        launch(code, *arguments)


# ---- a missing GPU

#: A script that declares its device as timm's do, and writes it into a file.
COMPUTES = """
import argparse, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("-c", "--config")
parser.add_argument('--device', default='cuda', type=str)
if sys.argv[0].endswith("train.py"):
    parser.add_argument("--device-modules", nargs="+")
parser.add_argument("--data-dir")
pathlib.Path(sys.argv[0] + ".layers").write_text(str(parser.parse_args().device))
"""


@pytest.mark.parametrize(
    "words", ["", "--data-dir x", "--device cuda", "--device=cuda:1", "--dev cuda", "--device-modules cpu"]
)
def test_a_missing_gpu_is_one_line_before_the_script_begins(launch, words, tmp_path, capsys, monkeypatch):
    name = "train.py" if "modules" in words else "validate.py"
    line = refusal(lambda: launch(COMPUTES, *words.split(), name=name), capsys)
    assert "CUDA" in line and "--device cpu" in line and not list(tmp_path.glob("*.layers"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert launch(COMPUTES, *words.split(), name=name).read_text().startswith("cuda")


@pytest.mark.parametrize(
    ("words", "device"),
    [
        ("--device cpu", "cpu"),
        ("--device=cpu", "cpu"),
        ("--dev cpu", "cpu"),
        ("-c settings.yaml --device mps", "mps"),
        ("-c settings.yaml", "cuda"),  # the file may name another
    ],
)
def test_another_device_and_a_file_of_settings_are_left_to_the_script(launch, words, device):
    assert launch(COMPUTES, *words.split()).read_text() == device


def test_help_is_left_to_the_script(launch, capsys):
    with pytest.raises(SystemExit, match="0"):
        launch(COMPUTES, "--help")
    assert "--device" in capsys.readouterr().out
