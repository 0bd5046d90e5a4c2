"""Models and files are as the page on sharing says. tests/test_readmes.py runs its blocks."""

from pathlib import Path

import pytest
import timm
import torch
from timm.models import save_for_hf

from fairseq_plugin import FlowformerLanguageModel
from tests.fairseq_plugin.helpers.commands import run_in_turn, training_command
from tests.fairseq_plugin.helpers.text import write_text
from tests.processes import CHECKOUT
from tests.readmes import blocks
from timm_plugin import attention_layer, create_model, store_attention

VIT = "vit_tiny_patch16_224"
SMALL = dict(img_size=32, depth=2, embed_dim=32, num_heads=2, num_classes=3)


def test_a_release_of_fairseq_is_small_loads_and_names_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's lines, on a training whose command has whole paths."""
    write_text(tmp_path)
    words = f"--only-source --trainpref train.txt --validpref valid.txt --destdir {tmp_path}/data-bin --workers 1"
    save_dir = tmp_path / "models" / "first"
    options = "--max-update 2 --no-epoch-checkpoints --disable-validation".split()
    train = training_command(f"{tmp_path}/data-bin", str(save_dir), "flowformer_lm", *options)
    to_folder = f"{save_dir}/checkpoint_last.pt my-lm --dict {tmp_path}/data-bin/dict.txt --half"
    commands = {
        "fairseq_cli.preprocess": words.split(),
        "fairseq_cli.train": train,
        "fairseq_plugin.to_safetensors": to_folder.split(),
        "fairseq_plugin.from_safetensors": ["my-lm", "my-checkpoint"],
    }
    run_in_turn(*((module, arguments, "") for module, arguments in commands.items()), cwd=str(tmp_path))

    page = blocks(CHECKOUT / "recipes" / "guides" / "sharing.md")
    (code,) = (block.code for block in page if "torch.save(shared" in block.code and block.language == "python")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    trained, released = save_dir / "checkpoint_last.pt", tmp_path / "release" / "model.pt"
    # Weights of 4 bytes and two averages of Adam for each become 2 bytes.
    assert released.stat().st_size < trained.stat().st_size / 4
    content = released.read_bytes()
    assert str(CHECKOUT).encode() not in content and str(tmp_path).encode() not in content
    assert str(tmp_path).encode() in trained.read_bytes()

    weights = torch.load(trained)["model"]
    assert len(weights) > 10
    for folder in (("release", "model.pt"), ("my-lm",), ("my-checkpoint", "model.pt")):
        model = FlowformerLanguageModel.from_pretrained(*folder).models[0]
        for name, x in model.state_dict().items():
            assert torch.equal(x, weights[name].half().float() if weights[name].is_floating_point() else weights[name])


def test_what_timms_own_create_model_gives(tmp_path: Path) -> None:
    """A class is stored after ``store_attention`` alone; patterns and numbers of tokens need our function."""
    model = timm.create_model(VIT, attn_layer=attention_layer("flow"), **SMALL)
    with pytest.raises(ValueError, match="attn_layer"):
        save_for_hf(model, tmp_path / "without", safe_serialization=True)
    store_attention(model)
    save_for_hf(model, tmp_path / "with", safe_serialization=True)
    assert timm.create_model(f"local-dir:{tmp_path}/with", pretrained=True).num_classes == 3
    for name, error in (("flow,softmax", AssertionError), ("daft_full", ValueError)):
        with pytest.raises(error):
            timm.create_model(VIT, attn_layer=name, **SMALL)(torch.zeros(1, 3, 32, 32))
        create_model(VIT, attn_layer=name, **SMALL)(torch.zeros(1, 3, 32, 32))
