"""fairseq's configuration objects load safely; everything else in a checkpoint is refused as torch refuses it."""

import argparse
import os
import pickle
from pathlib import Path

import pytest
import torch
from fairseq.checkpoint_utils import load_checkpoint_to_cpu
from omegaconf import OmegaConf

from fairseq_plugin.language_model import FlowformerLanguageModelConfig  # the import adds the allow-list


class _Attack:
    """What a hostile file would hold: an object that runs a command when it is unpickled."""

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
    """With ``weights_only``, torch's default, on."""
    torch.save({"cfg": stored, "model": {"w": torch.ones(2)}}, tmp_path / "c.pt")
    loaded = torch.load(tmp_path / "c.pt", weights_only=True)
    assert loaded["cfg"] == stored and torch.equal(loaded["model"]["w"], torch.ones(2))


def test_whole_configuration_loads(tmp_path: Path) -> None:
    """An omegaconf container of all of a model's options, as older checkpoints hold it."""
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
