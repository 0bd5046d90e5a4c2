"""Stored checkpoints of every image model keep loading and giving the same logits."""

from inspect import signature

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.models import model_entrypoint

from common.modules.stored_options import is_extra_state
from tests.compare import assert_close
from tests.golden.make_timm import FOLDER, GOLDEN, SIZES_OF, expected, registered, stored, weights

LARGEST = 60_000


def test_no_registered_model_lacks_one():
    assert {name for name, _ in GOLDEN.values()} | set(SIZES_OF) == set(registered())
    files = {path for file in GOLDEN for path in (weights(file), expected(file))}
    assert set(FOLDER.iterdir()) == files
    assert max(path.stat().st_size for path in files) <= LARGEST
    for name, file in SIZES_OF.items():
        classes = {signature(model_entrypoint(each)).return_annotation for each in (name, GOLDEN[file][0])}
        assert len(classes) == 1, name


@pytest.mark.parametrize("file", GOLDEN)
def test_loads_and_gives_the_logits(file):
    """And they depend on every stored tensor: one that was left at its first value would be noticed."""
    name, arguments, images, logits = stored(file)
    overlay = dict(file=str(weights(file)), num_classes=arguments["num_classes"])
    for ways in (dict(checkpoint_path=str(weights(file))), dict(pretrained=True, pretrained_cfg_overlay=overlay)):
        model = timm.create_model(name, **arguments, **ways).eval()
        assert_close("logits", model(images), logits, 1e-5)
    assert logits.std(0).min() > 1e-3  # images matter
    state = load_file(weights(file))
    for tensor_name, tensor in state.items():
        if not is_extra_state(tensor_name):  # a record of what the others mean
            model.load_state_dict({**state, tensor_name: tensor + torch.randn_like(tensor)})
            assert (model(images) - logits).abs().max() > 1e-4, tensor_name
