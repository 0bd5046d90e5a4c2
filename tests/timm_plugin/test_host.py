"""Importing the plugin: it registers its models once, changes nothing of timm, and says what does not fit."""

import configparser
import importlib
import runpy
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import timm

import timm_plugin
from common._installed import version_numbers
from tests.golden.make_timm import registered
from tests.processes import CHECKOUT
from timm_plugin import _host as host

INSTALL = r"pip install '\.\[timm\]'"
#: Patterns that match exactly our models.
PATTERNS = ["daft*", "flash*", "flowformer*", "*_hier_s", "mixer_deit_s"]


def test_names():
    names = timm.list_models(PATTERNS)
    assert set(names) == {*registered(), "mixer_deit_s"}
    modules = [x for x in vars(timm_plugin).values() if getattr(x, "__name__", "").startswith("timm_plugin.models.")]
    exported = {name for module in modules for name in module.__all__}
    for name in names:
        assert name in exported and timm.models.model_entrypoint(name).__doc__


IMPORT_AGAIN = """
import warnings
warnings.simplefilter("error", UserWarning)
sys.modules["fairseq"] = None  # any attempt to import it fails
import timm, timm.task
def methods():
    tasks = [task for task in vars(timm.task).values() if isinstance(task, type)]
    return [(task, name, value) for task in tasks for name, value in vars(task).items() if callable(value)]
methods_before, create_before = methods(), timm.create_model
import timm_plugin
assert methods() == methods_before and len(methods_before) > 20  # timm is not patched
assert timm.create_model is create_before
before = timm.list_models(PATTERNS, include_tags=True)
import importlib
importlib.reload(timm_plugin)
for name in [name for name in sys.modules if name.startswith("timm_plugin.")]:
    importlib.reload(sys.modules[name])
for name in [name for name in sys.modules if name.startswith("timm_plugin")]:
    del sys.modules[name]
import timm_plugin
assert timm.list_models(PATTERNS, include_tags=True) == before and len(before) == 26, before
for name in ("flash_vit_s", "daft_full_s", "deit_tiny_patch16_224"):
    timm.create_model(name, depth=1, device="meta", **({"attn_layer": "flow"} if "deit" in name else {}))
timm.create_model("soft_hier_s", depths=(1, 1, 1, 1), device="meta")
assert not [name for name in sys.modules if name.startswith("fairseq.")]
print("done")
"""


def test_import_twice_reload_and_without_fairseq():
    """In a new interpreter. timm is unchanged."""
    code = f"import sys; sys.path.insert(0, {str(CHECKOUT)!r})\nPATTERNS = {PATTERNS}\n{IMPORT_AGAIN}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "done\n")


def test_minimum_version_is_the_one_installed_by_the_extra():
    config = configparser.ConfigParser()
    config.read(CHECKOUT / "setup.cfg")
    wanted = [line for line in config["options.extras_require"]["timm"].splitlines() if line.startswith("timm>=")]
    assert wanted == ["timm>=" + ".".join(map(str, host.MINIMUM_TIMM))]
    assert version_numbers(timm.__version__) >= host.MINIMUM_TIMM


# ---- hosts that do not fit: one ImportError with the cause and a command that helps


@pytest.fixture(autouse=True)
def modules_put_back(monkeypatch):
    """Remove modules that a test imports in place of the real packages."""
    for name in ("common", "timm", "torchvision"):
        monkeypatch.setitem(sys.modules, name, sys.modules[name])


def _fake(monkeypatch, tmp_path, name: str, source: str) -> Path:
    """Create a package ``name`` that is found before the real one, which is unloaded for the test."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(source)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / name


@pytest.mark.parametrize(
    ("name", "source", "said"),
    [
        ("timm", None, rf"timm_plugin needs timm\b.*{INSTALL}"),
        ("torchvision", None, rf"timm_plugin needs torchvision\b.*{INSTALL}"),
        ("common", None, "package common.*not on the path.*export PYTHONPATH="),
        *(
            ("timm", f"__version__ = {version!r}", rf"timm 1\.0\.31 or newer; {version} is in FOLDER.*{INSTALL}")
            for version in ("0.9.16", "1.0.30", "1.0.9")
        ),
        *(("timm", f"__version__ = {version!r}", None) for version in ("1.0.32.dev0", "1.1", "2.0.0rc1")),
        ("timm", "raise ModuleNotFoundError('no torch._six', name='torch._six')", f"timm.*no torch._six.*{INSTALL}"),
        ("timm", "raise RuntimeError('broken')", f"needs timm.*broken.*{INSTALL}"),
        ("torchvision", "raise RuntimeError('no torchvision::nms')", "torchvision::nms.*--force-reinstall torch"),
        ("common", "DISTRIBUTION = 'something else'", f"found another one in FOLDER.*export PYTHONPATH='{CHECKOUT}'"),
    ],
)
def test_a_package_that_does_not_fit(monkeypatch, tmp_path, name, source, said):
    """None: it fits."""
    if source is None:
        monkeypatch.setitem(sys.modules, name, None)
    else:
        folder = str(_fake(monkeypatch, tmp_path, name, source))
    if said is None:
        host.check_host()
        return
    with pytest.raises(ImportError, match=said.replace("FOLDER", folder if source else "")):
        host.check_host()


@pytest.mark.parametrize("plugin", ["timm_plugin", "fairseq_plugin"])
@pytest.mark.parametrize("error", ["import no_such_module", "1 +", None, "ours"])
def test_common_that_fails_or_is_only_a_folder(monkeypatch, tmp_path, plugin, error):
    """A foreign one is named, with the cure; our own, where a package is missing, is not called foreign."""
    if error == "ours":
        folder = _fake(monkeypatch, tmp_path, "common", "import no_such_module")
        shutil.copy(CHECKOUT / "common" / "_installed.py", folder)
        shutil.copytree(CHECKOUT / plugin, tmp_path / plugin)
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            runpy.run_path(str(tmp_path / plugin / "_host.py"))["check_host"]()
        return
    if error is None:
        namespace, folder = types.ModuleType("common"), tmp_path
        namespace.__path__ = [str(folder)]
        monkeypatch.setitem(sys.modules, "common", namespace)
    else:
        folder = _fake(monkeypatch, tmp_path, "common", error)
    with pytest.raises(ImportError, match=f"(?s)another one in .*export PYTHONPATH='{CHECKOUT}'") as caught:
        runpy.run_path(str(CHECKOUT / plugin / "_host.py"))["check_host"]()
    assert type(caught.value) is ImportError and str(folder) in str(caught.value) and plugin in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"), [("timm", "timm_plugin needs timm"), ("common", "timm_plugin needs .*package common")]
)
def test_the_import_itself_fails_so(monkeypatch, name, message):
    """Before any part of the plugin that would fail in another way is imported."""
    for module in [module for module in sys.modules if module.split(".")[0] == "timm_plugin"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, types.ModuleType("common") if name == "common" else None)
    with pytest.raises(ImportError, match=message) as caught:
        importlib.import_module("timm_plugin")
    assert type(caught.value) is ImportError
