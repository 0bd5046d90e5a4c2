"""A host that does not fit gives one ImportError with the cause and the command that mends it."""

import subprocess
import sys
import types
from pathlib import Path

import pytest

from timm_plugin import host

ROOT = Path(__file__).resolve().parents[2]
INSTALL = "Run: pip install 'timm>=1.0.31' torchvision"


def _fake(monkeypatch, tmp_path, name: str, source: str) -> Path:
    """A package ``name`` that is found before the real one, which is forgotten for the test."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(source)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / name


@pytest.fixture(autouse=True)
def modules_put_back(monkeypatch):
    """What a test imports in place of the real packages is gone after it."""
    for name in ("common", "timm", "torchvision"):
        monkeypatch.setitem(sys.modules, name, sys.modules[name])


def test_this_host_fits():
    host.check_host()


@pytest.mark.parametrize("name", ["timm", "torchvision"])
def test_missing(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError) as caught:
        host.check_host()
    assert str(caught.value) == f"timm_plugin needs {name}, which is not installed. {INSTALL}"


def test_common_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "common", None)
    with pytest.raises(ImportError, match="needs the package common of lineartime, which is not on the path. Run: "):
        host.check_host()


@pytest.mark.parametrize("version", ["0.9.16", "1.0.30", "1.0.9"])
def test_old_timm(monkeypatch, tmp_path, version):
    folder = _fake(monkeypatch, tmp_path, "timm", f"__version__ = {version!r}")
    with pytest.raises(ImportError) as caught:
        host.check_timm()
    assert str(caught.value) == f"timm_plugin needs timm 1.0.31 or newer; {version} is in {folder}. {INSTALL}"


@pytest.mark.parametrize("version", ["1.0.31", "1.0.32.dev0", "1.1", "2.0.0rc1"])
def test_new_timm(monkeypatch, tmp_path, version):
    _fake(monkeypatch, tmp_path, "timm", f"__version__ = {version!r}")
    host.check_timm()


@pytest.mark.parametrize("error", ["ModuleNotFoundError('no torch._six', name='torch._six')", "RuntimeError('broken')"])
def test_broken_timm(monkeypatch, tmp_path, error):
    _fake(monkeypatch, tmp_path, "timm", f"raise {error}")
    with pytest.raises(ImportError, match="needs timm, whose import fails with: (no torch._six|broken). Run: pip"):
        host.check_timm()


def test_torchvision_for_another_torch(monkeypatch, tmp_path):
    _fake(monkeypatch, tmp_path, "torchvision", "raise RuntimeError('operator torchvision::nms does not exist')")
    with pytest.raises(ImportError) as caught:
        host.check_host()
    message = str(caught.value)
    assert "a torchvision that matches torch" in message and "torchvision::nms does not exist" in message
    assert message.endswith("Run: pip install --upgrade --force-reinstall torch torchvision")


def test_foreign_common(monkeypatch, tmp_path):
    folder = _fake(monkeypatch, tmp_path, "common", "DISTRIBUTION = 'something else'")
    with pytest.raises(ImportError, match="Python found another one in") as caught:
        host.check_host()
    assert str(folder) in str(caught.value) and f"export PYTHONPATH='{ROOT}'" in str(caught.value)


def test_foreign_common_that_is_only_a_folder(monkeypatch):
    namespace = types.ModuleType("common")
    namespace.__path__ = ["/somewhere/common"]
    monkeypatch.setitem(sys.modules, "common", namespace)
    with pytest.raises(ImportError, match="another one in /somewhere/common. Run: export PYTHONPATH="):
        host.check_host()


@pytest.mark.parametrize(
    ("blocked", "message"),
    [
        ("sys.modules['timm'] = None", "ImportError: timm_plugin needs timm, which is not installed. " + INSTALL),
        (
            "import types; sys.modules['common'] = types.ModuleType('common')",
            "ImportError: timm_plugin needs the package common of lineartime, but Python found another one in",
        ),
    ],
)
def test_the_import_itself_fails_so(blocked, message):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {blocked}; import timm_plugin"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith(message)
