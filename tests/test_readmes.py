"""The READMEs are correct: commands run, or at least have known options if they take too long; links are valid."""

import contextlib
import inspect
import io
import json
import os
import re
import shlex
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from fairseq import options
from PIL import Image

import fairseq_plugin  # noqa: F401  (registers what the commands name)
import timm_plugin
from tests.forked_commands import served
from tests.readmes import RUN, SHOWN, anchors, blocks, commands, links, prose, readmes, run_blocks
from tests.recipes.guides import layouts
from tests.torch_versions import NEWER_THAN_2_6

ROOT = Path(__file__).parents[1]
ALL = [block for path in readmes() for block in blocks(path)]
TO_RUN = [
    block
    for block in ALL
    if block.language in RUN and block.reason is None and (NEWER_THAN_2_6 or "export_step" not in block.code)
]
NOT_RUN = [block for block in ALL if block.language == "shell" and block.reason is not None]
PARSERS = {
    "fairseq-train": options.get_training_parser,
    "fairseq-eval-lm": options.get_eval_lm_parser,
    "fairseq-validate": options.get_validation_parser,
    "fairseq-generate": options.get_generation_parser,
    "fairseq-interactive": lambda: options.get_generation_parser(interactive=True),
}


def text(of: ModuleType) -> list[str]:
    """Words of a module of the standard library, line by line."""
    lines = (" ".join(re.findall(r"[a-zA-Z]+", line)) for line in inspect.getsource(of).splitlines())
    return [line for line in lines if line]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder that looks like a checkout, with the text files that the READMEs mention, each above 512 tokens."""
    for name in ("common", "fairseq_plugin", "timm_plugin", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name, source, lines in ("train", inspect, 600), ("valid", json, 250), ("test", shlex, 250):
        (tmp_path / f"{name}.txt").write_text("\n".join(text(source)[:lines]) + "\n")
        # Each line of the translation is the source line reversed; few lines, since each one is generated.
        for language, step in (("de", 1), ("en", -1)):
            translated = (" ".join(line.split()[::step]) for line in text(source)[: lines // 10])
            (tmp_path / f"{name}.{language}").write_text("\n".join(translated) + "\n")
    return tmp_path


@pytest.fixture
def environment() -> dict[str, str]:
    """The environment of a shell with an activated virtual environment; the folder alone provides the packages.

    Without kernels for CPUs, which each process would load for a second.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return {**own, "PATH": path, "OMP_NUM_THREADS": "1", "CHECKOUT": str(ROOT), "LINEARTIME_CPU_KERNELS": "0"}


def write_trained(folder: Path) -> None:
    """A photo, and untrained weights in the place of those that the example for timm trains."""
    Image.new("RGB", (64, 48), "red").save(folder / "photo.jpg")
    model = timm_plugin.create_model("deit_tiny_patch16_224", attn_layer="flow", num_classes=5, img_size=512)
    (folder / "work" / "photos").mkdir(parents=True)
    torch.save(model.state_dict(), folder / "work" / "photos" / "model_best.pth.tar")


@pytest.mark.parametrize("readme", sorted({block.readme for block in TO_RUN}))
def test_what_a_readme_shows_runs(readme, folder, environment):
    """Run all blocks of one README in order, in one folder: later blocks use output of earlier ones. Training is short.

    The training of the first README gets a new interpreter, as for a reader, and kernels for CPUs; importing fairseq
    takes most of its time.
    """
    wanted = [block for block in TO_RUN if block.readme == readme]
    if readme in layouts.PAGES:
        layouts.write(folder)
    if readme == "timm_plugin/README.md":
        write_trained(folder)
    first = readme == "README.md"
    with served() as before:
        environment |= {"BEFORE_FAIRSEQ": before, "BEFORE_TRAIN": "command" if first else before}
        environment |= {"LINEARTIME_CPU_KERNELS": "1"} if first else {}
        status, printed = run_blocks(wanted, folder, environment, new=first)
    assert status == 0, printed[-6000:]
    if first:  # whose training starts a new interpreter: nothing warns but fairseq and what it imports
        assert not re.findall(r"^\S*(?:common|fairseq_plugin|timm_plugin)/\S+\.py:\d+: \w*Warning.*", printed, re.M)


def known_fairseq_command(words: list[str]) -> None:
    """Raise SystemExit unless fairseq's own parser accepts every option."""
    arguments = words[1 : words.index("|")] if "|" in words else words[1:]
    options.parse_args_and_arch(PARSERS[words[0]](), input_args=arguments)


def known_module(words: list[str]) -> None:
    """Assert that ``python -m MODULE --option ...`` names a module, and options that its package or help mentions."""
    module = words[2]
    spec = find_spec(f"{module}.__main__") if find_spec(module).submodule_search_locations else find_spec(module)
    assert spec is not None, f"{module} cannot be run"
    paths = [ROOT / "recipes" / "runs.py", *Path(spec.origin).parent.glob("*.py")]
    sources = "\n".join(path.read_text() for path in paths)
    if module.startswith("timm_plugin"):
        return
    options_typed = [word for word in words[3:] if word.startswith("--") and " " not in word]  # no help text
    missing = [option for option in options_typed if f'"{option}"' not in sources]
    known = help_of(import_module(spec.name), module) if missing else ""
    assert set(missing) <= set(re.findall(r"--[\w-]+", known)), f"{module} has no {', '.join(missing)}"


def help_of(module: ModuleType, name: str) -> str:
    """The help text of a command."""
    parser = getattr(getattr(module, "EXPERIMENT", module), "parser", None)
    if parser is not None:
        return parser().format_help()
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
        patch.setattr(sys, "argv", [name, "--help"])
        module.main()
    return shown.getvalue()


@pytest.mark.parametrize("block", NOT_RUN, ids=lambda block: block.place)
def test_what_is_not_run_is_known_at_least(block):
    """Options of fairseq's commands pass fairseq's parsers, with the architectures they name; our modules exist."""
    for words in commands(block):
        if words[0] in PARSERS and "..." not in words:
            known_fairseq_command(words)
        elif words[:2] == ["python", "-m"] and words[2].split(".")[0] in ("recipes", "fairseq_plugin", "timm_plugin"):
            known_module(words)


@pytest.mark.parametrize("path", readmes(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_within_the_checkout_leads_somewhere(path):
    for target in links(path):
        file, _, anchor = target.partition("#")
        linked = path.parent / file if file else path
        assert linked.exists(), f"{target}: no such file"
        assert not anchor or anchor in anchors(linked), f"{target}: no such heading"


def test_every_block_says_its_language():
    """Otherwise a command could be overlooked."""
    for block in ALL:
        assert block.language in RUN + SHOWN, f"{block.place}: ```{block.language}"


@pytest.mark.parametrize("command", ["fairseq-train", "from_pretrained", "timm-scripts/train.py", "create_model"])
def test_the_first_readme_runs_both_hosts(command):
    assert any(block.readme == "README.md" and command in block.code for block in TO_RUN)


@pytest.mark.parametrize("path", readmes(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_row_of_a_table_has_the_cells_and_the_indent_of_its_head(path):
    """Otherwise the table ends above the row, and so does the list that contains the table."""
    for table in re.findall(r"(?:^ *\|.*\n)+", f"{prose(path)}\n", flags=re.MULTILINE):
        rows = table.splitlines()
        shapes = {(row.index("|"), len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", row)))) for row in rows}
        assert len(shapes) == 1 and len(rows) > 2, f"{path}:\n{table[:200]}"
