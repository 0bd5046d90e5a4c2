"""An incompatible host raises one ImportError with the cause and a command that helps."""

import importlib
import runpy
import shutil
import sys
import types
from pathlib import Path

import pytest

from tests.processes import CHECKOUT
from timm_plugin import _host as host

INSTALL = r"pip install '\.\[timm\]'"


def _fake(monkeypatch, tmp_path, name: str, source: str) -> Path:
    """Create a package ``name`` that is found before the real one, which is unloaded for the test."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(source)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / name


@pytest.fixture(autouse=True)
def modules_put_back(monkeypatch):
    """Remove modules that a test imports in place of the real packages."""
    for name in ("common", "timm", "torchvision"):
        monkeypatch.setitem(sys.modules, name, sys.modules[name])


def test_this_host_fits():
    host.check_host()


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
        ("timm", "raise ModuleNotFoundError('no torch._six', name='torch._six')", f"timm.*no torch._six.*{INSTALL}"),
        ("timm", "raise RuntimeError('broken')", f"needs timm.*broken.*{INSTALL}"),
        ("torchvision", "raise RuntimeError('no torchvision::nms')", "torchvision::nms.*--force-reinstall torch"),
        ("common", "DISTRIBUTION = 'something else'", f"found another one in FOLDER.*export PYTHONPATH='{CHECKOUT}'"),
    ],
)
def test_a_package_that_does_not_fit(monkeypatch, tmp_path, name, source, said):
    if source is None:
        monkeypatch.setitem(sys.modules, name, None)
    else:
        said = said.replace("FOLDER", str(_fake(monkeypatch, tmp_path, name, source)))
    with pytest.raises(ImportError, match=said):
        host.check_host()


@pytest.mark.parametrize("version", ["1.0.31", "1.0.32.dev0", "1.1", "2.0.0rc1"])
def test_new_timm(monkeypatch, tmp_path, version):
    _fake(monkeypatch, tmp_path, "timm", f"__version__ = {version!r}")
    host.check_timm()


@pytest.mark.parametrize("plugin", ["timm_plugin", "fairseq_plugin"])
def test_an_error_of_our_own_package_is_not_called_a_foreign_one(monkeypatch, tmp_path, plugin):
    """In a checkout, ``common`` fails because torch or another package is missing."""
    folder = _fake(monkeypatch, tmp_path, "common", "import no_such_module")
    shutil.copy(CHECKOUT / "common" / "_installed.py", folder)
    shutil.copytree(CHECKOUT / plugin, tmp_path / plugin)
    checks = runpy.run_path(str(tmp_path / plugin / "_host.py"))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        checks["check_host"]()


@pytest.mark.parametrize("error", ["import no_such_module", "raise RuntimeError('broken')", "1 +"])
@pytest.mark.parametrize("plugin", ["timm_plugin", "fairseq_plugin"])
def test_foreign_common_that_fails(monkeypatch, tmp_path, plugin, error):
    folder = _fake(monkeypatch, tmp_path, "common", error)
    checks = runpy.run_path(str(CHECKOUT / plugin / "_host.py"))
    with pytest.raises(ImportError, match=f"{plugin} needs .*another one in .*which fails") as caught:
        checks["check_host"]()
    assert type(caught.value) is ImportError
    assert str(folder) in str(caught.value) and f"export PYTHONPATH='{CHECKOUT}'" in str(caught.value)


def test_foreign_common_that_is_only_a_folder(monkeypatch):
    namespace = types.ModuleType("common")
    namespace.__path__ = ["/somewhere/common"]
    monkeypatch.setitem(sys.modules, "common", namespace)
    with pytest.raises(ImportError, match=r"another one in .*/somewhere/common.*export PYTHONPATH="):
        host.check_host()


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
