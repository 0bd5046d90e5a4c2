"""Checkpoints of earlier versions load safely and give the same logits as before."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compare import assert_close
from tests.fairseq_plugin.helpers.language_models import ARCHITECTURES
from tests.fairseq_plugin.helpers.masked_models import MASKED
from tests.golden.make_fairseq import FOLDER, load, other_first_token, registered
from tests.processes import CHECKOUT


def test_every_architecture_has_one() -> None:
    """Fails for a new model without a file; ``python -m tests.golden.make_fairseq ARCHITECTURE`` makes it."""
    assert {path.stem for path in FOLDER.glob("*.pt")} == set(registered())
    assert set(registered()) >= {*ARCHITECTURES, *MASKED}


@pytest.mark.parametrize("arch", registered())
def test_it_keeps_its_logits(arch: str) -> None:
    """Loaded by ``from_pretrained``; the file holds tokens and logits in addition to fairseq-train's content."""
    golden = torch.load(FOLDER / f"{arch}.pt", weights_only=True)["golden"]
    model = load(arch)
    with torch.no_grad():
        assert_close("logits", model(golden["tokens"])[0], golden["logits"], tolerance=1e-5)
        difference = model(other_first_token(golden["tokens"]))[0] - golden["logits"]
    assert difference[:, 1:].norm() > 5e-3 * golden["logits"].norm()  # attention affects the compared logits


def test_a_name_that_meant_other_heads() -> None:
    """``daft_conv_lm_enwik8`` had 8 heads when its file was made; it now has one per channel."""
    model = load("daft_conv_lm_enwik8")
    assert model.decoder.layers[0].self_attn.inner.shape.num_heads == 8 != model.decoder.embed_dim


@pytest.mark.parametrize("arch", registered())
def test_it_is_small_and_says_nothing_of_where_it_was_made(arch: str) -> None:
    """At most 40 kB, and no absolute path."""
    path = FOLDER / f"{arch}.pt"
    assert path.stat().st_size < 40_000
    state = torch.load(path, weights_only=True)
    paths = {text for text in _strings(state["cfg"]) if Path(text).is_absolute() or str(CHECKOUT) in text}
    assert paths <= {"/tmp/plasma"}  # fairseq's default
    assert {"cfg", "model", "optimizer_history", "extra_state", "task_state"} <= state.keys()


def _strings(stored: Any):
    if isinstance(stored, (dict, Namespace)):
        for value in (vars(stored) if isinstance(stored, Namespace) else stored).values():
            yield from _strings(value)
    elif isinstance(stored, str):
        yield stored
