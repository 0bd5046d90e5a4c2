"""``python -m timm_plugin SCRIPT ARGUMENTS...`` runs a script as Python would, with the models registered."""

import json
import os
import re
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
    return number + 1

if __name__ == "__main__":
    import timm
    worked = None
    if "--workers" in sys.argv:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            worked = pool.apply(work, (1,))
    json.dump(dict(
        argv=sys.argv, path=sys.path[0], file=__file__, models=timm.list_models("flowformer_hier_t*"),
        sibling=sibling.VALUE, worked=worked, fairseq="fairseq" in sys.modules,
    ), open(os.environ["ANSWER"], "w"))
    sys.exit(3)
"""


@pytest.fixture
def script(tmp_path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "sibling.py").write_text("VALUE = 7\n")
    (folder / "script.py").write_text(SCRIPT)
    (tmp_path / "elsewhere").mkdir()
    return folder / "script.py"


def _launch(script: Path, *arguments: str, folder: Path, **environment: str) -> dict:
    """The output of the script, run by the launcher in ``folder``."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    answer = script.parent / "answer"
    result = subprocess.run(
        [sys.executable, "-m", "timm_plugin", str(script), *arguments],
        cwd=folder,
        env={**inherited, "ANSWER": str(answer), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 3, result.stderr
    return json.loads(answer.read_text())


def test_script_runs_as_python_would_run_it(script):
    """Started from another folder than the script's and the checkout's."""
    arguments = ["--model-kwargs", "clamp=5.0", "-h", "--", "a b", ""]
    elsewhere = script.parent.parent / "elsewhere"
    assert _launch(script, *arguments, folder=elsewhere, PYTHONPATH=str(CHECKOUT)) == dict(
        argv=[str(script), *arguments],
        path=str(script.parent),
        file=str(script),
        models=["flowformer_hier_test", "flowformer_hier_ti"],
        sibling=7,
        worked=None,
        fairseq=False,
    )


def test_started_in_the_checkout(script):
    """Without PYTHONPATH or an installation, in the checkout's folder, workers still find the plugin."""
    assert _launch(script, "--workers", folder=CHECKOUT)["worked"] == 2


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


def _layers(script: Path) -> list[str]:
    return Path(f"{script}.layers").read_text().split()


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


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", IGNORES, "--model-kw", "attn_layer=flow", "depth=1"],
        ["-c", f"model: {IGNORES}\nmodel_kwargs: {{attn_layer: flow, depth: 1}}\n"],
        ["-c", "model_kwargs: {attn_layer: flow, depth: 1}\n", f"--model={IGNORES}"],
    ],
)
def test_attention_that_a_model_ignores_is_one_line(creating, arguments, capsys):
    arguments = [_config(creating, x) if "\n" in x else x for x in arguments]
    assert _refusal([str(creating), *arguments], capsys).startswith(f"attn_layer is 'flow', and {IGNORES}")
    assert not Path(f"{creating}.layers").exists()


@pytest.mark.parametrize(
    ("attn_layer", "said"),
    [
        ("flow*3,softmax", "a pattern of 4 layers; allowed: of at most 1"),
        ("flwo", "attn_layer is 'flwo'; allowed: attn, .*nearest: 'flow'"),
        ("3", "attn_layer is 3; allowed: the name of a mechanism"),
        ("daft_full dynamic_img_size=True", "dynamic_img_size is True, .*'daft_full'"),
    ],
)
def test_attention_that_is_not_to_be_had_is_refused(creating, attn_layer, said, capsys):
    line = _refusal([str(creating), *VIT, *f"attn_layer={attn_layer}".split(" "), *SMALL], capsys)
    assert re.search(said, line), line


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ("model(torch.zeros(1, 3, 40, 40))", "x has image size 40 x 40; allowed: 64 x 64"),
        ("timm.create_model('flowformer_hier_test', imgsize=64)", "no argument 'imgsize'.*nearest: 'img_size'"),
        (
            "from timm.utils import distributed as d; d.init_distributed_device_so('cuda')",
            "no CUDA here, .*--device cpu",
        ),
        ("torch.zeros(1).to('cuda')", "no CUDA here, add --device cpu"),
    ],
)
def test_a_users_mistake_in_a_running_script_is_one_line(creating, after, said, capsys, monkeypatch):
    if "cuda" in after and torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        after = "raise AssertionError('CUDA is not available but cuda was specified.')"
    creating.write_text(f"{CREATES}import torch, timm\n{after}\n")
    line = _refusal([str(creating), "-m", "flowformer_hier_test"], capsys)
    assert re.search(said, line), line


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
def test_a_missing_gpu_is_one_line_before_the_script_begins(computing, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as exited:
        computing(words)
    assert exited.value.code == 2 and not list(tmp_path.glob("*.began"))
    (line,) = capsys.readouterr().err.splitlines()
    assert "CUDA" in line and "--device cpu" in line


def test_device_modules_are_no_device(computing):
    with pytest.raises(SystemExit):
        computing("--device-modules cpu", "train.py")
    assert computing("--device-modules timm_plugin --device cpu", "train.py") == "cpu"


@pytest.mark.parametrize("words", ["--device cpu", "--device=cpu", "--dev cpu", "-c settings.yaml --device mps"])
def test_another_device_is_the_scripts_own(computing, words):
    assert computing(words) in ("cpu", "mps")


def test_a_file_of_settings_and_help_are_left_to_the_script(computing, capsys):
    assert computing("-c settings.yaml") == "cuda"
    with pytest.raises(SystemExit) as exited:
        computing("--help")
    assert exited.value.code == 0 and "--device" in capsys.readouterr().out


def test_where_cuda_is_there_nothing_is_refused(computing, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert computing("") == "cuda"


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
        (["-m", "flowformer_hier_test"], "FlowSelfAttention"),
        (["-m", "test_vit"], "Attention"),
        (["-m", "nf_regnet_b0", "--model-kwargs", "attn_layer=eca"], "EcaModule"),  # timm's name in such networks
    ],
)
def test_a_model_that_can_be_made_is_made(creating, arguments, kind):
    main([str(creating), *arguments])
    assert kind in _layers(creating)


def test_layers_are_told_the_grid(creating):
    """Without a grid they refuse images, and timm does not pass it to them."""
    creating.write_text(CREATES + "import torch\nmodel(torch.randn(1, 3, 32, 32))\n")
    main([str(creating), "--gp", "avg", *VIT, "attn_layer=daft_conv", "class_token=False", *SMALL])
    assert "DaftConvSelfAttention" in _layers(creating)


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
