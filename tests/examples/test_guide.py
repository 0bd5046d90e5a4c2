"""CONTRIBUTING's guide is true as printed: its examples train in both hosts; they keep the contract in tests/common."""

import re
import textwrap

import pytest

from tests.fairseq_plugin.helpers.text import write_text
from tests.processes import CHECKOUT, Command, run_in_turn, run_program

EXAMPLES = ("mean", "pooled")
OWN = "recipes/guides/your_own_attention.md"
#: Pages, and the files in which code stands that they print.
PAGES = {
    "CONTRIBUTING.md": {"tests/examples/mean.py"},
    "recipes/guides/published_attention.md": {"common/ops/kimi_delta/reference.py"},
}
_REASON = r"( *)<!-- not run in tests: stands in (?P<file>\S+) -->"
INCLUDED = re.compile(_REASON + r"\n *```python\n(?P<code>.*?)\n *```\n", re.S)


@pytest.fixture
def script(tmp_path):
    """Writes a program for a new process, in which the examples are registered before a plugin is imported."""

    def write(code: str) -> str:
        path = f"import sys\nsys.path.insert(0, {str(CHECKOUT)!r})\n"
        imports = "".join(f"import tests.examples.{name}\n" for name in EXAMPLES)
        (tmp_path / "registered.py").write_text(f"{path}{imports}{textwrap.dedent(code)}")
        return str(tmp_path / "registered.py")

    return write


@pytest.fixture(scope="module")
def data_bin(tmp_path_factory):
    """A folder of binarised toy text."""
    folder = tmp_path_factory.mktemp("text")
    write_text(folder)
    splits = [f"--{split}pref={folder / split}.txt" for split in ("train", "valid")]
    run_in_turn(Command("fairseq_cli.preprocess", ["--only-source", *splits, "--destdir", str(folder / "bin")]))
    return folder / "bin"


def test_printed_code_stands_in_the_files_that_are_tested():
    for page, files in PAGES.items():
        blocks = list(INCLUDED.finditer((CHECKOUT / page).read_text()))
        assert {block["file"] for block in blocks} == files
        for block in blocks:
            code = re.sub(rf"(?m)^{block[1]}", "", block["code"])
            kept = re.sub(r"(?m)^ +", "", (CHECKOUT / block["file"]).read_text())
            assert re.sub(r"(?m)^ +", "", code) in kept, code


def test_files_that_the_guide_writes_are_the_examples():
    written = re.findall(r"(?ms)^cat > (\w+\.py) <<'END'\n(.*?)^END$", (CHECKOUT / OWN).read_text())
    assert [name for name, _ in written] == ["nearby.py", "nearby_learned.py"]
    for name, code in written:
        assert code == (CHECKOUT / "tests" / "examples" / name).read_text()


def test_a_mechanism_may_be_registered_after_the_plugins(script):
    """It has the models of one that was registered before, and timm's name. In a new interpreter, as below."""
    code = """
import timm, timm_plugin, fairseq_plugin
from common.attention import register_attention
from fairseq.models import ARCH_MODEL_REGISTRY
register_attention("later")(type("LaterAttention", (tests.examples.mean.MeanAttention,), {}))
found = {word: {x.replace(word, "") for x in ARCH_MODEL_REGISTRY if word in x.split("_")} for word in ("mean", "later")}
assert found["mean"] == found["later"] and len(found["later"]) > 20, found
small = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)
for create in (timm.create_model, timm_plugin.create_model):
    assert create("vit_tiny_patch16_224", attn_layer="later", **small).blocks[0].attn.mechanism == "later"
"""
    run_program([script(code)], cwd=str(CHECKOUT))


TRAININGS = {
    "mean_lm": "--task language_modeling --criterion cross_entropy --mean-temperature 2",
    "pooled_mlm": "--task masked_lm --criterion masked_lm --pooled-no-gate",
}


def arguments_of(arch: str, data_bin) -> list[str]:
    """A short training of one of ``TRAININGS``."""
    side = "decoder" if arch.endswith("_lm") else "encoder"
    arguments = [str(data_bin), "--user-dir", "fairseq_plugin", "--arch", arch, *TRAININGS[arch].split()]
    arguments += f"--{side}-layers 2 --{side}-embed-dim 32 --{side}-ffn-embed-dim 64 --{side}-attention-heads 4".split()
    arguments += "--optimizer adam --lr 0.01 --max-update 3 --no-save --cpu --num-workers 0".split()
    arguments += ["--data-buffer-size", "0"]  # its thread may be in torch when the interpreter ends, which aborts
    return arguments + "--tokens-per-sample 32 --batch-size 4 --log-format simple --log-interval 1".split()


def test_training_in_fairseq(data_bin, script):
    """In one new interpreter, since forks have imported the plugin already."""
    code = f"""
from fairseq_cli.train import cli_main
for arguments in {[arguments_of(arch, data_bin) for arch in TRAININGS]!r}:
    sys.argv[1:] = arguments
    cli_main()
    print("ENDED", flush=True)
"""
    *trainings, _ = run_program([script(code)], cwd=str(CHECKOUT)).split("ENDED")
    assert len(trainings) == 2
    for printed in trainings:
        assert "num_updates: 3" in printed or "3 updates" in printed, printed[-2000:]


@pytest.mark.parametrize("name", EXAMPLES)
def test_training_in_timm(name, script):
    options = "max_tokens=16" if name == "pooled" else "temperature=2.0"
    code = f"""
import torch, timm, timm_plugin
layer = timm_plugin.attention_layer({name!r}, {options})
made = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=4)
model = timm.create_model("vit_tiny_patch16_224", attn_layer=layer, class_token=False, global_pool="avg", **made)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, losses = torch.randn(8, 3, 32, 32), []
for _ in range(5):
    loss = torch.nn.functional.cross_entropy(model(x), torch.arange(8) % 4)
    optimizer.zero_grad(); loss.backward(); optimizer.step(); losses.append(loss.item())
assert losses[-1] < losses[0], losses
"""
    run_in_turn(Command(script(code)), cwd=str(CHECKOUT))
