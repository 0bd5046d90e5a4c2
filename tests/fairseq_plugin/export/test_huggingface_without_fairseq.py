"""Folders of models load in a process in which fairseq cannot be imported, with and without trust_remote_code."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import common.huggingface
from common.huggingface import modeling_lineartime
from tests.fairseq_plugin.helpers.huggingface_models import classifiers, encoder_decoder, language_models, masked
from tests.fairseq_plugin.helpers.text import tokens

ROOT = Path(common.huggingface.__file__).parents[2]
#: A model of each kind, by transformers' class for it. None has kernels, which would take seconds to import.
KINDS = {
    "AutoModelForCausalLM": lambda: language_models("flash_lm", "--share-decoder-input-output-embed"),
    "AutoModelForMaskedLM": lambda: masked("flash_mlm"),
    "AutoModelForSequenceClassification": lambda: classifiers("flash_classifier", "--classifier-dim", "12"),
    "AutoModelForSeq2SeqLM": lambda: encoder_decoder("longformer"),
}
CODE = """
import sys
from pathlib import Path
sys.modules["fairseq"] = sys.modules["fairseq_plugin"] = None
import torch, transformers
torch.set_num_threads(int(sys.argv[2]))  # sums of matrix products differ by the number of threads
folders = sorted(Path(sys.argv[1]).iterdir())
# The first folder alone shows its own code: that imports lineartime, whose classes then are transformers' choice.
assert "common" not in sys.modules
remote = getattr(transformers, folders[0].name).from_pretrained(folders[0], trust_remote_code=True)
import common.huggingface
from common.huggingface import modeling_lineartime
assert type(remote) not in common.huggingface.AUTO_CLASSES.values()
remote.save_pretrained(folders[0] / "again")
assert (folders[0] / "again" / "modeling_lineartime.py").exists()
for folder in folders:
    stored, kind = torch.load(folder / "expected.pt"), getattr(transformers, folder.name)
    local = kind.from_pretrained(folder)
    assert type(local) is common.huggingface.AUTO_CLASSES[kind]
    for model in (local, *((remote, kind.from_pretrained(folder / "again")) if folder == folders[0] else ())):
        with torch.no_grad():
            assert torch.equal(model(**stored["inputs"]).logits, stored["logits"]), folder.name
    print(folder.name)
"""


@torch.no_grad()
def write(folder: Path, name: str) -> None:
    """Write the model for transformers' class ``name`` as an export does, with inputs and what they give."""
    model = KINDS[name]()[1]
    model.save_pretrained(folder)
    shutil.copy(ROOT / "common" / "huggingface" / "modeling_lineartime.py", folder)
    config = json.loads((folder / "config.json").read_text())
    classes = {name: type(model).__name__, "AutoConfig": "LineartimeConfig"}
    config["auto_map"] = {auto: f"modeling_lineartime.{kind}" for auto, kind in classes.items()}
    (folder / "config.json").write_text(json.dumps(config))
    inputs = {"input_ids": tokens(2, 9), "attention_mask": torch.tensor([[1] * 9, [0] * 3 + [1] * 6])}
    if name.endswith("Seq2SeqLM"):
        inputs["decoder_input_ids"] = tokens(2, 5)
    torch.save({"inputs": inputs, "logits": model(**inputs).logits}, folder / "expected.pt")


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A folder that has one of each kind."""
    for name in KINDS:
        write(tmp_path / "models" / name, name)
    return tmp_path / "models"


def test_every_kind_of_model_loads_without_fairseq(folders: Path, tmp_path: Path) -> None:
    """It costs seconds, since a new process imports torch and transformers."""
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CODE, str(folders), str(torch.get_num_threads())]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == sorted(KINDS)


@pytest.mark.parametrize("another", [False, True])
def test_without_lineartime_a_folder_says_what_it_needs(another: bool, folders: Path, tmp_path: Path) -> None:
    """Somebody else's package may have the name of ours. It costs seconds, as above."""
    folder = str(folders / "AutoModelForCausalLM")
    code = f"import transformers; transformers.AutoModelForCausalLM.from_pretrained({folder!r}, trust_remote_code=True)"
    if another:
        (tmp_path / "common.py").touch()
    else:
        code = f"import sys; sys.modules['common'] = None; {code}"
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: this model needs the package lineartime"), done.stderr
    assert "pip install '.[huggingface]'" in last
    assert "pip install common" not in done.stderr


def test_the_file_for_trust_remote_code_has_every_kind_of_model() -> None:
    for kind in common.huggingface.AUTO_CLASSES.values():
        remote = getattr(modeling_lineartime, kind.__name__)
        assert issubclass(remote, kind)
        assert remote.config_class is modeling_lineartime.LineartimeConfig
