"""Generation after a prompt, as fairseq's tasks make it."""

from argparse import Namespace
from collections.abc import Callable

import torch
from fairseq.tasks.language_modeling import LanguageModelingTask
from torch import Tensor, nn

from fairseq_plugin import PromptedLanguageModelingTask

#: Whether the prompt is read in one pass -> the task.
_TASKS = {False: LanguageModelingTask, True: PromptedLanguageModelingTask}


def generation(model: nn.Module, prompt: Tensor, words: int, one_pass: bool) -> Callable[[], list[Tensor]]:
    """A function that generates ``words`` words after prompt (1, n), greedily.

    It returns the tokens (n + words + 1,), including the prompt and the end, and their scores.
    """
    dictionary = model.decoder.dictionary
    task = _TASKS[one_pass](Namespace(), dictionary)
    length = prompt.size(1) + words
    options = Namespace(beam=1, max_len_a=0, max_len_b=length, min_len=length)
    generator = task.build_generator([model], options)
    source = torch.cat([prompt.new_full((1, 1), dictionary.eos()), prompt], dim=1)
    sample = {"net_input": {"src_tokens": source, "src_lengths": torch.tensor([source.size(1)])}}

    def generate() -> list[Tensor]:
        best = task.inference_step(generator, [model], sample)[0][0]
        return [best["tokens"], best["positional_scores"]]

    return generate


@torch.no_grad()
def scores(model: nn.Module, tokens: Tensor) -> Tensor:
    """The score of each of ``tokens`` (n,), which begin a sentence, by one forward pass."""
    shifted = torch.cat([tokens.new_full((1,), model.decoder.dictionary.eos()), tokens[:-1]])
    return model.get_normalized_probs(model(shifted[None]), log_probs=True)[0].gather(1, tokens[:, None])[:, 0]
