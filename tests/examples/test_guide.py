"""CONTRIBUTING's guide is true as printed: its examples train in both hosts; they keep the contract in tests/common."""

import re
import textwrap

import pytest

from tests.fairseq_plugin.helpers.text import write_text
from tests.processes import CHECKOUT, Command, run_in_turn, run_program

EXAMPLES = ("mean", "pooled")
_REASON = r"( *)<!-- not run in tests: stands in (?P<file>\S+) -->"
INCLUDED = re.compile(_REASON + r"\n *```python\n(?P<code>.*?)\n *```\n", re.S)


@pytest.fixture
def run(tmp_path):
    """Runs code with arguments in a new process, where an example is registered before a plugin is imported.

    Returns what it printed. Forks have imported fairseq's plugin: with arguments, the interpreter is new.
    """

    def run(name: str, code: str, *arguments: str) -> str:
        script = tmp_path / "registered.py"
        path = f"import sys\nsys.path.insert(0, {str(CHECKOUT)!r})\n"
        script.write_text(f"{path}import tests.examples.{name}\n{textwrap.dedent(code)}")
        if arguments:
            return run_program([str(script), *map(str, arguments)], cwd=str(CHECKOUT))
        return run_in_turn(Command(str(script)), cwd=str(CHECKOUT))[0]

    return run


@pytest.fixture(scope="module")
def data_bin(tmp_path_factory):
    """A folder of binarised toy text."""
    folder = tmp_path_factory.mktemp("text")
    write_text(folder)
    splits = [f"--{split}pref={folder / split}.txt" for split in ("train", "valid")]
    run_in_turn(Command("fairseq_cli.preprocess", ["--only-source", *splits, "--destdir", str(folder / "bin")]))
    return folder / "bin"


def test_printed_code_stands_in_the_examples():
    blocks = list(INCLUDED.finditer((CHECKOUT / "CONTRIBUTING.md").read_text()))
    assert {block["file"] for block in blocks} == {f"tests/examples/{name}.py" for name in EXAMPLES}
    for block in blocks:
        code = re.sub(rf"(?m)^{block[1]}", "", block["code"])
        assert code in (CHECKOUT / block["file"]).read_text(), code


@pytest.mark.parametrize(
    "arch, options", [("mean_lm", ["--mean-temperature", "2"]), ("pooled_mlm", ["--pooled-no-gate"])]
)
def test_training_in_fairseq(arch, options, data_bin, run):
    name, kind = arch.split("_")
    task, criterion = {"lm": ("language_modeling", "cross_entropy"), "mlm": ("masked_lm", "masked_lm")}[kind]
    arguments = [data_bin, "--user-dir", "fairseq_plugin", "--task", task, "--criterion", criterion, "--arch", arch]
    side = "decoder" if kind == "lm" else "encoder"
    arguments += f"--{side}-layers 2 --{side}-embed-dim 32 --{side}-ffn-embed-dim 64 --{side}-attention-heads 4".split()
    arguments += [*options, "--optimizer", "adam", "--lr", "0.01", "--max-update", "3", "--no-save", "--cpu"]
    arguments += ["--tokens-per-sample", "32", "--batch-size", "4", "--log-format", "simple", "--log-interval", "1"]
    printed = run(name, "from fairseq_cli.train import cli_main; cli_main()", *arguments)
    assert "num_updates: 3" in printed or "3 updates" in printed, printed[-2000:]


@pytest.mark.parametrize("name", EXAMPLES)
def test_training_in_timm(name, run):
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
    run(name, code)
