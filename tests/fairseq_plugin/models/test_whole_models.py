"""Whole models can be copied and pickled, before and after they are used."""

import copy
import pickle

import pytest
import torch

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
        for other in (*unused, *used):
            assert torch.equal(other(sequence)[0], expected)
