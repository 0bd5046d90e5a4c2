"""Small models that generate after prompts, what a task makes of prompts, and a comparison of hypotheses."""

from argparse import Namespace

import torch
from torch import Tensor, nn

from tests.compare import assert_close

from .language_models import ARCHITECTURES, awake, build_model
from .text import PAD, dictionary, tokens

EOS, WORDS = 2, 60
#: Architectures with their options: ours, and fairseq's own.
MODELS = {
    **{name: (name,) for name in ARCHITECTURES},
    "sinusoids": ("transformer_lm",),
    "learned positions": ("transformer_lm", "--decoder-learned-pos", "--decoder-normalize-before"),
}


def build_generating(arch: str, *arguments: str, seed: int = 1) -> nn.Module:
    """A small model whose next words are not all alike."""
    model = awake(build_model(arch, *arguments, seed=seed)).eval()
    with torch.no_grad():
        model.decoder.output_projection.weight.normal_(std=0.5)
    return model


def make_prompts(*lengths: int) -> Tensor:
    """Prompts of ``lengths``, with padding after them, as fairseq puts it."""
    rows = tokens(len(lengths), max(lengths), seed=7)
    return rows.masked_fill(torch.arange(rows.shape[1]) >= torch.tensor(lengths)[:, None], PAD)


def make_sample(prompts: Tensor) -> dict:
    """A batch of ``prompts`` as the generator takes it."""
    source = torch.cat([torch.full((len(prompts), 1), EOS), prompts], dim=1)
    return {"net_input": {"src_tokens": source, "src_lengths": source.ne(PAD).sum(1)}}


def generate(
    task: type,
    models: list[nn.Module],
    prompts: Tensor,
    prefix: Tensor | None = None,
    *,
    task_options: dict | None = None,
    words: int = WORDS,
    extra: dict | None = None,
    allowed=None,
    **options,
) -> list:
    """The hypotheses of each prompt in the order of their scores, by a ``task`` with ``task_options``."""
    own = task(Namespace(**(task_options or {})), dictionary(words))
    settings = Namespace(**{"max_len_a": 0, "max_len_b": 170, **options})
    generator = own.build_generator(models, settings, None, extra, allowed)
    return own.inference_step(generator, models, make_sample(prompts), prefix)


def assert_same_hypotheses(actual: list, expected: list) -> None:
    """Tokens are equal, and scores are close."""
    for row, wanted in zip(actual, expected, strict=True):
        assert [x["tokens"].tolist() for x in row] == [x["tokens"].tolist() for x in wanted]
        for hypothesis, other in zip(row, wanted):
            assert_close("score", hypothesis["score"], other["score"], 1e-4)
            assert_close("scores of tokens", hypothesis["positional_scores"], other["positional_scores"], 1e-3)
