"""The trained language model that is part of the package: it loads by its name, knows its text, and writes."""

import math
from pathlib import Path

import pytest
import torch
from fairseq import options
from fairseq.hub_utils import GeneratorHubInterface
from safetensors.torch import load_file

from fairseq_plugin import LinearTimeLanguageModel
from fairseq_plugin.models.attention import GatedDeltaLanguageModel
from recipes.packaged_models import characters

NAME = "gated_delta_lm.shakespeare"
#: From Hamlet, which the model was not trained on; 4.39 was measured, 1.0 is known by heart, about 70 is guessing.
PASSAGE = "HAMLET:\nTo be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n"


@pytest.fixture(scope="module")
def hub() -> GeneratorHubInterface:
    return LinearTimeLanguageModel.from_pretrained(NAME)


def test_the_packaged_model_knows_its_text_and_writes(hub: GeneratorHubInterface) -> None:
    """It is small, and greedily writes the sentence of its card."""
    folder = Path(LinearTimeLanguageModel.hub_models()[NAME])
    assert list(GatedDeltaLanguageModel.hub_models()) == [NAME]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 2_000_000
    tensors = load_file(folder / "model.safetensors")
    assert {x.dtype for x in tensors.values() if x.is_floating_point()} == {torch.float16}
    perplexity = [math.exp(-hub.score(x)["positional_scores"].mean().item()) for x in (PASSAGE, PASSAGE[::-1])]
    assert perplexity[0] < 6 and perplexity[1] > 15 * perplexity[0]
    sentence = hub.sample("ROMEO:", beam=1, max_len_b=60).removeprefix("ROMEO:\n").partition("\n")[0]
    assert len(sentence) > 15 and f"> {sentence}\n" in (folder / "README.md").read_text()
    with pytest.raises(ValueError, match=f"gated_delta_lm.shakespear'; allowed: '{NAME}'"):
        GatedDeltaLanguageModel.from_pretrained("gated_delta_lm.shakespear")


def test_the_packaged_model_is_what_the_recipe_trains(hub: GeneratorHubInterface) -> None:
    _, _, *words = map(str, characters.train_command(Path("data"), updates=2000))
    given, stored = options.parse_args_and_arch(options.get_training_parser(), words), hub.cfg.model
    named = [x for x in vars(given) if x in stored and x.startswith(("decoder_", "gated_delta_", "dropout", "max_t"))]
    assert {"decoder_layers", "gated_delta_short_conv", "dropout"} <= set(named)
    assert all(stored[name] == getattr(given, name) for name in named)
    assert hub.cfg.bpe._name == given.bpe == "lineartime_characters"
