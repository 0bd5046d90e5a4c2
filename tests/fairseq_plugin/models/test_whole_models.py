"""Whole models can be copied, pickled and handed to other libraries, before and after they are used."""

import copy
import pickle

import pytest
import torch
from fairseq.models import MODEL_REGISTRY

from tests.fairseq_plugin.helpers.language_models import ARCHITECTURES, awake, build_model
from tests.fairseq_plugin.helpers.masked_models import MASKED, build_random
from tests.fairseq_plugin.helpers.text import tokens


@pytest.mark.parametrize("arch", [*ARCHITECTURES, *MASKED])
def test_copies_and_pickles_give_the_same_output(arch: str) -> None:
    model = build_random(arch) if arch in MASKED else awake(build_model(arch)).eval()
    sequence = tokens(2, 40)
    with torch.no_grad():
        unused = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        expected = model(sequence)[0]
        used = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for model_copy in (*unused, *used):
            assert torch.equal(model_copy(sequence)[0], expected)


def test_no_class_stands_where_peft_reads_options() -> None:
    """PEFT expects the options of one model in ``model.config``, and fails if it is a class."""
    plugin_models = {
        name: model for name, model in MODEL_REGISTRY.items() if model.__module__.startswith("fairseq_plugin")
    }
    assert len(plugin_models) > 100
    assert not [name for name, model in plugin_models.items() if isinstance(getattr(model, "config", None), type)]
