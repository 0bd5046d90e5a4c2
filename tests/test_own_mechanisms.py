"""Models with a user's own attention: every file of theirs names its module, and none imports it."""

import pytest

from tests.fairseq_plugin.helpers.text import write_text
from tests.processes import CHECKOUT, Command, run_in_turn, run_program

WRITE = """
import os, sys
sys.path.insert(0, {checkout!r})
os.environ["LINEARTIME_MECHANISMS"] = {file!r}
import timm, timm_plugin
from fairseq_cli.train import cli_main
from fairseq_plugin import export_hf

sys.argv[1:] = {train!r}.split()
cli_main()
export_hf.main(["model/checkpoint_last.pt", "exported", "--data", "bin"])
small = dict(img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2)
vit = timm_plugin.create_model("vit_tiny_patch16_224", attn_layer="nearby_learned", **small)
timm.models.save_for_hf(vit, "vit", safe_serialization=True)
"""
READ = """
import sys
sys.path.insert(0, {checkout!r})
import timm, timm_plugin
from transformers import AutoModelForCausalLM
from fairseq_plugin import LinearTimeLanguageModel
from common import huggingface
from common.attention import import_own

def read_all():
    yield lambda: LinearTimeLanguageModel.from_pretrained("model", "checkpoint_last.pt", "bin")
    yield lambda: AutoModelForCausalLM.from_pretrained("exported")
    yield lambda: timm.create_model("local-dir:vit", pretrained=True)

for read in read_all():
    try:
        read()
    except ValueError as error:
        print("REFUSED", error)
assert "nearby_learned" not in sys.modules
import_own("exported/nearby_learned.py")
for read in read_all():
    print("READ", type(read()).__name__)
"""
TRAIN = (
    "bin --user-dir {checkout}/fairseq_plugin --task language_modeling --arch nearby_learned_lm --optimizer adam "
    "--nearby-learned-sharpness 2 --max-update 2 --cpu --num-workers 0 --data-buffer-size 0 --tokens-per-sample 32 "
    "--batch-size 4 "
    "--decoder-layers 1 --decoder-embed-dim 32 --decoder-ffn-embed-dim 64 --decoder-attention-heads 4 "
    "--decoder-input-dim 32 --decoder-output-dim 32 --no-epoch-checkpoints --save-dir model"
)


@pytest.fixture
def folder(tmp_path):
    write_text(tmp_path)
    splits = [f"--{split}pref={tmp_path / split}.txt" for split in ("train", "valid")]
    run_in_turn(Command("fairseq_cli.preprocess", ["--only-source", *splits, "--destdir", str(tmp_path / "bin")]))
    return tmp_path


def test_files_of_models_name_the_module_and_import_nothing(folder):
    """In new interpreters, since the environment is read when ``common`` is imported."""
    (folder / "write.py").write_text(
        WRITE.format(
            checkout=str(CHECKOUT),
            file=str(CHECKOUT / "tests" / "examples" / "nearby_learned.py"),
            train=TRAIN.format(checkout=CHECKOUT),
        )
    )
    (folder / "read.py").write_text(READ.format(checkout=str(CHECKOUT)))
    run_program(["write.py"], cwd=str(folder))
    lines = run_program(["read.py"], cwd=str(folder)).splitlines()
    refused = [line for line in lines if line.startswith("REFUSED")]
    assert len(refused) == 3 and all("LINEARTIME_MECHANISMS=nearby_learned " in line for line in refused), lines
    assert len([line for line in lines if line.startswith("READ")]) == 3, lines
