"""``python -m timm_plugin SCRIPT ARGUMENTS...`` runs a script as Python would, with the models registered."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm.task

from tests.processes import CHECKOUT
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
    ), open(os.environ["ANSWER"] + os.environ.get("RANK", ""), "w"))
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


def _launch(script: Path, *arguments: str, launcher=()) -> subprocess.CompletedProcess:
    """Run the launcher from another folder than the script's and the checkout's."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(CHECKOUT),
        "ANSWER": str(script.parent / "answer"),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, *launcher, "-m", "timm_plugin", str(script), *arguments],
        cwd=script.parent.parent / "elsewhere",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_script_runs_as_python_would_run_it(script):
    arguments = ["--workers", "--model-kwargs", "clamp=5.0", "-h", "--", "a b", ""]
    result = _launch(script, *arguments)
    assert result.returncode == 3, result.stderr
    assert json.loads((script.parent / "answer").read_text()) == dict(
        argv=[str(script), *arguments],
        path=str(script.parent),
        file=str(script),
        models=["flowformer_hier_test", "flowformer_hier_ti"],
        sibling=7,
        worked=2,
        fairseq=False,
    )


def test_under_torchrun(script):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    result = _launch(script, "--amp", launcher=launcher)
    assert "exitcode  : 3" in result.stderr, result.stderr
    for rank in "01":
        answer = json.loads((script.parent / f"answer{rank}").read_text())
        assert answer["argv"] == [str(script), "--amp"] and answer["models"]


def test_started_in_the_checkout(script):
    """Without PYTHONPATH or an install, from the checkout's folder, workers still find the plugin."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-m", "timm_plugin", str(script), "--workers"],
        cwd=CHECKOUT,
        env={**environment, "ANSWER": str(script.parent / "answer")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 3, result.stderr
    assert json.loads((script.parent / "answer").read_text())["worked"] == 2


def test_usage(capsys):
    for arguments, status in (([], 2), (["--help"], 0), (["-h"], 0)):
        with pytest.raises(SystemExit) as exited:
            main(arguments)
        assert exited.value.code == status
        captured = capsys.readouterr()
        assert USAGE in (captured.err if status else captured.out)


@pytest.mark.parametrize("script", ["nowhere/validate.py", "."])
def test_no_such_script(capsys, script):
    with pytest.raises(SystemExit) as exited:
        main([script, "--model", "x"])
    assert exited.value.code == 2
    assert f"timm_plugin: no such file: {script!r}" in capsys.readouterr().err


NO_ARGUMENTS = "import pathlib, sys\npathlib.Path(sys.argv[0] + '.ran').touch()\n"


@pytest.fixture
def quick_script(tmp_path, monkeypatch):
    """A script that leaves a file beside itself; what the launcher changes is put back."""
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    for task in [value for value in vars(timm.task).values() if isinstance(value, type)]:
        if "prepare_distributed" in vars(task):
            monkeypatch.setattr(task, "prepare_distributed", task.prepare_distributed)
    script = tmp_path / "quick.py"
    script.write_text(NO_ARGUMENTS)
    return script


@pytest.mark.parametrize("where", ["options", "config"])
def test_attention_that_a_model_ignores_is_refused_before_the_script_runs(quick_script, where, capsys):
    given = ["--amp", "-m", "vit_pwee_patch16_reg1_gap_256", "--model-kwargs", "attn_layer=flow", "depth=1"]
    if where == "config":
        config = quick_script.with_suffix(".yaml")
        config.write_text("model: vit_pwee_patch16_reg1_gap_256\nmodel_kwargs: {attn_layer: flow, depth: 1}\nlr: 0.1\n")
        given = ["--amp", "-c", str(config)]
    with pytest.raises(SystemExit) as exited:
        main([str(quick_script), *given])
    assert exited.value.code == 2
    assert "attn_layer is 'flow', and vit_pwee_patch16_reg1_gap_256" in capsys.readouterr().err
    assert not Path(f"{quick_script}.ran").exists()


@pytest.mark.parametrize("name", ["flow_source", "cosformer"])
def test_attention_of_ours_that_has_no_place_in_timms_table_is_refused(quick_script, name, capsys):
    with pytest.raises(SystemExit) as exited:
        main([str(quick_script), "-m", "vit_tiny_patch16_224", "--model-kwargs", f"attn_layer={name}"])
    assert exited.value.code == 2
    assert f"attn_layer is '{name}'; allowed: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [
        ["--model", "vit_tiny_patch16_224", "--model-kwargs", "attn_layer=flow", "depth=1"],
        ["--model", "vit_pwee_patch16_reg1_gap_256", "--model-kwargs", "attn_layer=diff"],  # not ours to judge
        ["--model-ema", "--model-kwargs", "attn_layer=flow"],
        ["-c", "missing.yaml"],
    ],
)
def test_what_a_script_takes_is_left_to_it(quick_script, given):
    main([str(quick_script), *given])
    assert Path(f"{quick_script}.ran").exists()
