"""Importing the plugin: its registered models, repeated imports, and that it needs no other host."""

import configparser
import subprocess
import sys

import pytest
import timm
import torch

import timm_plugin
from common._installed import version_numbers
from tests.processes import CHECKOUT
from tests.timm_plugin.helpers.models import REGISTERED
from timm_plugin import _host as host

#: Pattern that matches exactly our models.
PATTERNS = ["daft*", "flash*", "flowformer*", "*_hier_s", "mixer_deit_s"]


def test_names():
    assert tuple(sorted(timm.list_models(PATTERNS))) == REGISTERED
    plugin = timm_plugin
    modules = (
        plugin.daft,
        plugin.flash,
        plugin.flowformer,
        plugin.flowformer_deit,
        plugin.hierarchical_baselines,
        plugin.mixer,
    )
    assert {name for m in modules for name in timm.list_models(module=m.__name__.split(".")[-1])} == set(REGISTERED)
    exported = {name for module in modules for name in module.__all__}
    for name in REGISTERED:
        assert timm.get_pretrained_cfg(name).tag == ("uci_digits" if name == "flowformer_hier_digits" else "untrained")
        assert name in exported and timm.models.model_entrypoint(name).__doc__


IMPORT_AGAIN = """
import warnings
warnings.simplefilter("error", UserWarning)
sys.modules["fairseq"] = None  # any attempt to import it fails
import timm, timm.task
def methods():
    tasks = [task for task in vars(timm.task).values() if isinstance(task, type)]
    return [(task, name, value) for task in tasks for name, value in vars(task).items() if callable(value)]
methods_before = methods()
import timm_plugin
assert methods() == methods_before and len(methods_before) > 20  # timm is not patched
import timm_plugin
before = timm.list_models(PATTERNS, include_tags=True)
import importlib
importlib.reload(timm_plugin)
for name in [name for name in sys.modules if name.startswith("timm_plugin.")]:
    importlib.reload(sys.modules[name])
for name in [name for name in sys.modules if name.startswith("timm_plugin")]:
    del sys.modules[name]
import timm_plugin
assert timm.list_models(PATTERNS, include_tags=True) == before and len(before) == 26, before
timm.create_model("flash_vit_s", depth=1)
timm.create_model("soft_hier_s", depths=(1, 1, 1, 1))
timm.create_model("flowformer_hier_test")
timm.create_model("deit_tiny_patch16_224", attn_layer="flow", img_size=32, depth=1)
timm.create_model("daft_conv_test")
assert not [name for name in sys.modules if name.startswith("fairseq.")]
print("done")

from timm_plugin.models._registry import register_once
def flowformer_hier_test(pretrained=False, **kwargs):
    return None
flowformer_hier_test.__module__ = "timm.models.vision_transformer"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    register_once(flowformer_hier_test)
print([str(warning.message).split(" in registry")[0] for warning in caught])
"""


def test_import_twice_reload_and_without_fairseq():
    """In a new interpreter. timm is unchanged, and replacing another package's model still warns."""
    code = f"import sys; sys.path.insert(0, {str(CHECKOUT)!r})\nPATTERNS = {PATTERNS}\n{IMPORT_AGAIN}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "done\n['Overwriting flowformer_hier_test']\n"


def test_minimum_version_is_the_one_installed_by_the_extra():
    config = configparser.ConfigParser()
    config.read(CHECKOUT / "setup.cfg")
    wanted = [line for line in config["options.extras_require"]["timm"].splitlines() if line.startswith("timm>=")]
    assert wanted == ["timm>=" + ".".join(map(str, host.MINIMUM_TIMM))]
    assert version_numbers(timm.__version__) >= host.MINIMUM_TIMM


@pytest.mark.parametrize("size, stock", [("s", "deit_small_patch16_224"), ("ti", "deit_tiny_patch16_224")])
def test_flowformers_of_deits_shape_have_its_heads(size, stock):
    """Another number of heads fits the same weights but is another function of them."""
    with torch.device("meta"):
        flowformer, deit = timm.create_model(f"flowformer_deit_{size}"), timm.create_model(stock)
    assert [block.attn.num_heads for block in flowformer.blocks] == [block.attn.num_heads for block in deit.blocks]
