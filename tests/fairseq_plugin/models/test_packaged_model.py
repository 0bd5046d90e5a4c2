"""The trained language model that is part of the package: it loads by its name, knows its text, and writes."""

import math
from pathlib import Path

import pytest
import torch
from fairseq import options
from fairseq.hub_utils import GeneratorHubInterface
from safetensors.torch import load_file

from fairseq_plugin import FlowformerLanguageModel, LinearTimeLanguageModel
from fairseq_plugin.models.attention import GatedDeltaLanguageModel
from recipes.packaged_models import characters

NAME = "gated_delta_lm.shakespeare"
MOST_BYTES = 2_000_000
#: From Hamlet, which the model was not trained on.
PASSAGE = (
    "HAMLET:\nTo be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n"
    "The slings and arrows of outrageous fortune,\nOr to take arms against a sea of troubles\n"
    "And by opposing end them."
)
#: 4.39 was measured.
LARGEST_PERPLEXITY = 4.6


@pytest.fixture(scope="module")
def hub() -> GeneratorHubInterface:
    return LinearTimeLanguageModel.from_pretrained(NAME)


def _perplexity(hub: GeneratorHubInterface, text: str) -> float:
    return math.exp(-hub.score(text)["positional_scores"].mean().item())


def test_classes_know_the_names_of_their_models() -> None:
    """A wrong name is an error with the names that there are."""
    for kind in (LinearTimeLanguageModel, GatedDeltaLanguageModel):
        assert list(kind.hub_models()) == [NAME]
    assert FlowformerLanguageModel.hub_models() == {}
    with pytest.raises(ValueError, match=f"gated_delta_lm.shakespear'; allowed: '{NAME}'"):
        GatedDeltaLanguageModel.from_pretrained("gated_delta_lm.shakespear")


def test_it_is_small_and_in_half_precision() -> None:
    folder = Path(LinearTimeLanguageModel.hub_models()[NAME])
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MOST_BYTES
    tensors = load_file(folder / "model.safetensors")
    assert {x.dtype for x in tensors.values() if x.is_floating_point()} == {torch.float16}


def test_it_knows_its_text(hub: GeneratorHubInterface) -> None:
    """Perplexity of a character: 1.0 would be known by heart, and about 70 is guessing; backwards it is no text."""
    known = _perplexity(hub, PASSAGE)
    assert known < LARGEST_PERPLEXITY
    assert _perplexity(hub, PASSAGE[::-1]) > 20 * known


def test_it_writes_the_sentence_of_its_card(hub: GeneratorHubInterface) -> None:
    """Greedy: the likeliest character at each step. The card has the first line of this sentence."""
    card = (Path(LinearTimeLanguageModel.hub_models()[NAME]) / "README.md").read_text()
    written = hub.sample("ROMEO:", beam=1, max_len_b=60)
    sentence = written.removeprefix("ROMEO:\n").partition("\n")[0]
    assert len(sentence) > 15 and f"> {sentence}\n" in card


def test_it_samples_characters_of_its_text(hub: GeneratorHubInterface) -> None:
    """Another seed gives another text."""
    texts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        texts.append(hub.sample("JULIET:", sampling=True, sampling_topp=0.9, max_len_b=120))
    assert all(text.startswith("JULIET:") and len(text) > 20 for text in texts) and texts[0] != texts[1]
    characters_of_text = {symbol for symbol in hub.task.source_dictionary.symbols if len(symbol) == 1}
    assert set("".join(texts)) <= characters_of_text | {" ", "\n"}


def test_it_is_what_the_recipe_trains(hub: GeneratorHubInterface) -> None:
    """The options that the recipe gives to fairseq-train are those that are stored with the weights."""
    _, _, *command = map(str, characters.train_command(Path("data"), updates=2000))
    given = options.parse_args_and_arch(options.get_training_parser(), command)
    stored, model_options = hub.cfg.model, ("decoder_", "gated_delta_", "dropout", "max_target_positions")
    named = [name for name in vars(given) if name in stored and name.startswith(model_options)]
    assert {"decoder_layers", "decoder_embed_dim", "gated_delta_short_conv", "dropout"} <= set(named)
    for name in named:
        assert stored[name] == getattr(given, name), name
    assert hub.cfg.bpe._name == given.bpe == "lineartime_characters"
    assert hub.cfg.task.tokens_per_sample == given.tokens_per_sample
