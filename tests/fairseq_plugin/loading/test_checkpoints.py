"""fairseq's configuration objects load safely; everything else in a checkpoint is refused as torch refuses it."""

import argparse
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.checkpoint_utils import load_checkpoint_to_cpu
from fairseq.logging.meters import AverageMeter
from omegaconf import OmegaConf

from fairseq_plugin.models.flowformer import FlowformerLanguageModelConfig


class _Attack:
    """Content of a malicious file: an object that runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("echo executed > executed",)


@pytest.mark.parametrize(
    "stored",
    [
        argparse.Namespace(lr=[0.1], nested=argparse.Namespace(text="a", nothing=None, flag=True)),
        OmegaConf.create({"a": {"b": [1, 2.5, "c", None, True]}, "interpolated": "${a.b}"}),
        OmegaConf.create([1, {"x": "y"}]),
    ],
    ids=["namespace", "dictconfig", "listconfig"],
)
def test_configuration_objects_load(stored, tmp_path: Path) -> None:
    """Loads with ``weights_only=True``, the default of torch."""
    torch.save({"cfg": stored, "model": {"w": torch.ones(2)}}, tmp_path / "c.pt")
    loaded = torch.load(tmp_path / "c.pt", weights_only=True)
    assert loaded["cfg"] == stored and torch.equal(loaded["model"]["w"], torch.ones(2))


def test_namespaces_load_after_timm_has_read_a_file(tmp_path: Path) -> None:
    """timm allows namespaces only while it reads a file."""
    torch.save({"args": argparse.Namespace(lr=[0.1])}, tmp_path / "c.pt")
    with torch.serialization.safe_globals([argparse.Namespace]):
        pass
    assert torch.load(tmp_path / "c.pt", weights_only=True)["args"].lr == [0.1]


def test_metrics_of_numpy_load(tmp_path: Path) -> None:
    """``--eval-bleu`` stores arrays in checkpoints; training resumes from them and commands load the weights."""
    meter = AverageMeter()
    meter.update(np.array([3, 2, 1, 0]))
    meter.update(np.array([0.5, 0.25, 0.0, 0.0]))
    torch.save({"val": meter.state_dict(), "best": np.float64(1.5), "low": np.float32(0.5)}, tmp_path / "c.pt")
    loaded = torch.load(tmp_path / "c.pt", weights_only=True)
    assert loaded["val"]["sum"].tolist() == [3.5, 2.25, 1.0, 0.0] and (loaded["best"], loaded["low"]) == (1.5, 0.5)


def test_whole_configuration_loads(tmp_path: Path) -> None:
    """An omegaconf container with all options of a model, as in older checkpoints."""
    options = OmegaConf.to_container(OmegaConf.structured(FlowformerLanguageModelConfig), enum_to_str=True)
    torch.save({"cfg": OmegaConf.create({"model": options})}, tmp_path / "c.pt")
    assert torch.load(tmp_path / "c.pt")["cfg"].model.flow_form == "released"


def test_other_classes_are_still_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fairseq's own loader stops before the file's code runs."""
    monkeypatch.chdir(tmp_path)
    torch.save({"cfg": {}, "args": _Attack(), "model": {}}, "attack.pt")
    with pytest.raises(pickle.UnpicklingError, match="[Uu]nsupported|[Ww]eights only"):
        load_checkpoint_to_cpu("attack.pt")
    assert not Path("executed").exists()
