"""Files that the plugins write can be read by whom umask lets read new files; safetensors alone would hide them.

Whatever completes files in one of the ways of ``common.files.output_files`` is in ``WRITERS``, as is what writes
without it.
"""

import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

from common.huggingface import LineartimeCache, LineartimeConfig, LineartimeForCausalLM
from fairseq_plugin import (
    FlowformerLanguageModel,
    convert,
    export_hf,
    export_step,
    from_safetensors,
    import_hf,
    read_prompt,
    to_safetensors,
)
from tests.fairseq_plugin.helpers.checkpoint_files import STOCK, save_model
from tests.fairseq_plugin.helpers.text import dictionary
from tests.processes import CHECKOUT
from timm_plugin import convert as convert_images
from timm_plugin.transfer.__main__ import main as transfer

_VIT = "vit_tiny_patch16_224"
_SIZES = {"img_size": 32, "depth": 1, "embed_dim": 24, "num_heads": 2}
_TYPED = ["--model-kwargs", *(f"{name}={value}" for name, value in _SIZES.items())]
_TRANSFER = ["--teacher", _VIT, *_TYPED, "--teacher-checkpoint", "vit.pth", "--attn", "hedgehog"]
_TRANSFER += "--data-dir images --epochs 1 -b 2 -j 0 --img-size 32 --device cpu".split()


def _model() -> LineartimeForCausalLM:
    attention = [{"kind": "linear"}]
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    return LineartimeForCausalLM(LineartimeConfig(attention=attention, **sizes))


def _cache() -> LineartimeCache:
    cache = LineartimeCache()
    _model()(torch.tensor([[5, 6]]), cache=cache)
    return cache


def _hub() -> object:
    return FlowformerLanguageModel.from_pretrained(".", "model.pt", ".")


#: What writes files, by its module, and calls that write to the folder ``new``; the working directory has a checkpoint
#: of each host, what was made of them, and images.
WRITERS: dict[str, list[Callable[[], object]]] = {
    "fairseq_plugin.convert": [lambda: convert.main(["stock.pt", "new/linear.pt", "--arch", "linear_lm"])],
    "fairseq_plugin.export.huggingface_folder": [lambda: export_hf.main(["model.pt", "new/hf", "--data", "."])],
    "fairseq_plugin.export_step": [lambda: export_step.main(["model.pt", "new/step.pt2", "--data", "."])],
    "fairseq_plugin.from_safetensors": [lambda: from_safetensors.main(["safetensors", "new/checkpoint"])],
    "fairseq_plugin.generation.prompt_state": [lambda: read_prompt(_hub(), "w1 w2").save("new/state.safetensors")],
    "fairseq_plugin.import_hf": [lambda: import_hf.main(["hf", "new/back.pt"])],
    "fairseq_plugin.to_safetensors": [lambda: to_safetensors.main(["model.pt", "new/folder", "--dict", "dict.txt"])],
    "timm_plugin.convert": [
        lambda suffix=suffix: convert_images.main(["flowformer_deit_ti", "vit.pth", f"new/deit{suffix}", *_TYPED])
        for suffix in ("", ".safetensors", ".pth")
    ],
    "timm_plugin.transfer.__main__": [
        lambda: transfer([*_TRANSFER, "--output", "new/student.safetensors", "--teacher-dir", "new/teacher"])
    ],
    "common.huggingface.modeling": [lambda: _model().save_pretrained("new/saved", max_shard_size="1KB")],
    "common.huggingface.cache": [lambda: _cache().save("new/cache.safetensors")],
}
_WRITES = re.compile(r"\b(?:new_path|new_folder|empty_folder|unfinished|give_usual_modes|save_safetensors)\(")
#: What only the writers above call.
_INNER = {"common.files.output_files", "common.files.tensor_files"}


def test_every_module_that_writes_is_here() -> None:
    folders = [CHECKOUT / name for name in ("common", "fairseq_plugin", "timm_plugin")]
    paths = [path for folder in folders for path in folder.rglob("*.py") if _WRITES.search(path.read_text())]
    assert {".".join(x.relative_to(CHECKOUT).with_suffix("").parts) for x in paths} - _INNER == set(WRITERS)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what is read."""
    folder = tmp_path_factory.mktemp("sources")
    dictionary().save(str(folder / "dict.txt"))
    save_model(folder / "stock.pt", "cfg", *STOCK)
    save_model(folder / "model.pt", "cfg", "flowformer_lm")
    export_hf.main([str(folder / "model.pt"), str(folder / "hf"), "--data", str(folder)])
    to_safetensors.main([str(folder / "model.pt"), str(folder / "safetensors"), "--dict", str(folder / "dict.txt")])
    torch.save(timm.create_model(_VIT, **_SIZES).state_dict(), folder / "vit.pth")
    for name in ("a", "b"):
        (folder / "images" / "train" / name).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(folder / "images" / "train" / name / "1.png")
    return folder


@pytest.mark.parametrize("umask", [0o022, 0o027], ids=oct)
@pytest.mark.parametrize("module", WRITERS)
def test_files_have_the_mode_that_umask_says(
    module: str, umask: int, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sources)
    monkeypatch.setenv("LINEARTIME_CPU_KERNELS", "0")  # they take seconds to load
    new, before = Path("new"), os.umask(umask)
    try:
        new.mkdir()
        for write in WRITERS[module]:
            write()
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in new.rglob("*")}
        assert any(path.is_file() for path in modes)
        assert all(mode == (0o777 if path.is_dir() else 0o666) & ~umask for path, mode in modes.items()), modes
    finally:
        os.umask(before)
        shutil.rmtree(new)
