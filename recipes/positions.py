"""The loss of a trained language model by position, the number of tokens before the predicted one in its window.

``python -m recipes.positions CHECKPOINT --data DATA_BIN --length 256 --longest 2048`` prints it as JSON.
"""

import argparse
import itertools
import json
from pathlib import Path

import torch
from fairseq.data import data_utils
from fairseq.models import ARCH_MODEL_REGISTRY
from torch import Tensor, nn
from tqdm import tqdm

from common.attention import ATTENTIONS
from common.checkpoints import read_checkpoint
from fairseq_plugin import LinearTimeLanguageModel
from fairseq_plugin.loading.checkpoint_config import check_configuration
from fairseq_plugin.loading.checkpoints import stored_architecture

SPLIT = "test"
#: The first bin ends at the training length divided by two to the power of this.
_DOUBLINGS = 4


def edges(length: int, longest: int) -> list[int]:
    """Bounds of the bins of positions: 0, ``length`` halved and doubled several times, and ``longest``."""
    halved = {length >> i for i in range(_DOUBLINGS + 1)} - {0}
    doubled = set()
    while (edge := length << len(doubled)) < longest:
        doubled.add(edge)
    return sorted({0, *halved, *doubled, longest})


def windows(stream: Tensor, length: int, longest: int, most: int) -> Tensor:
    """At most ``most`` windows of ``longest`` + 1 tokens of ``stream`` (n,), one beginning every ``length`` tokens.

    Each piece of the text is then read at each distance from the beginning of a window, so bins differ in the context
    of a token, not in the text.
    """
    count, pieces = (len(stream) - 1 - longest) // length + 1, longest // length
    if len(stream) <= longest or count < pieces:
        raise ValueError(
            f"the {SPLIT} text has {len(stream):,} tokens; allowed for windows of {longest:,} that begin every "
            f"{length:,}: at least {longest + (pieces - 1) * length + 1:,}; --times makes them shorter"
        )
    return stream.unfold(0, longest + 1, length)[: max(pieces, most)]


def read_stream(data: Path, split: str = SPLIT) -> Tensor:
    """The tokens (n,) of a split in a data-bin folder, in order, with the end of a line in front as fairseq has it."""
    dataset = data_utils.load_indexed_dataset(str(data / split), dictionary=None)
    if dataset is None or not len(dataset):
        raise ValueError(f"{data} has no {split} text; allowed: a folder of fairseq-preprocess that has")
    lines = [dataset[i] for i in range(len(dataset))]
    return torch.cat([lines[0][-1:], *lines]).long()


def load_model(path: Path, data: Path, longest: int) -> nn.Module:
    """The language model of ``path``, for inputs of ``longest`` tokens if its weights and its formula allow that.

    Raises:
        ValueError: the file cannot be read, or a part of the model has weights for fewer positions.
    """
    state = read_checkpoint(path)
    check_configuration(state, str(path))
    model = ARCH_MODEL_REGISTRY.get(stored_architecture(state, str(path)))
    if model is None or not issubclass(model, LinearTimeLanguageModel):
        raise ValueError(f"{path} holds no language model of this plugin; allowed: one of NAME_lm")
    mechanism = ATTENTIONS.get(getattr(model, "attention_name", None))  # FLASH is a layer of its own
    overrides = {}
    if mechanism is None or "max_tokens" not in mechanism.needs:  # else its formula would change
        overrides["max_target_positions"] = longest
    loaded = model.from_pretrained(str(path.parent), path.name, str(data), **overrides).models[0]
    loaded.eval()
    return loaded


@torch.no_grad()
def losses(model: nn.Module, windows: Tensor, title: str) -> Tensor:
    """The loss (W, n) of every token but the first of ``windows`` (W, n + 1), in nats; ValueError if n are too many."""
    rows = []
    for window in tqdm(windows, desc=f"  {title}", unit=" windows", leave=False, disable=None):
        target = window[None, 1:]
        output = model(window[None, :-1])
        scores = model.get_normalized_probs(output, log_probs=True, sample={"target": target})
        rows.append(-scores.gather(-1, target[..., None])[0, :, 0].double())
    return torch.stack(rows)


def perplexities(loss: Tensor, length: int) -> dict[str, float]:
    """exp of the mean of ``loss`` (W, n) in each bin, over pieces of the text that are read at every distance."""
    count, longest = loss.shape
    place = torch.arange(count)[:, None] * length + torch.arange(longest)  # in the text
    mask, found = (place >= longest - length) & (place < count * length), {}
    for begin, end in itertools.pairwise(edges(length, longest)):
        inside = loss[:, begin:end][mask[:, begin:end]]
        found[f"{begin:,} to {end:,}"] = float(inside.mean().exp())
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measure a model; one that cannot read so many tokens is not an error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="data-bin of its text")
    parser.add_argument("--length", type=int, required=True, help="of the sequences that it was trained on")
    parser.add_argument("--longest", type=int, required=True, help="window")
    parser.add_argument("--windows", type=int, default=200, help="at most (%(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    chosen = windows(read_stream(options.data), options.length, options.longest, options.windows)
    found = {"windows": len(chosen), "perplexities": {}, "refused": None}
    try:
        model = load_model(options.checkpoint, options.data, options.longest)
        found["perplexities"] = perplexities(losses(model, chosen, options.checkpoint.name), options.length)
    except ValueError as error:
        found["refused"] = str(error).splitlines()[0]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
