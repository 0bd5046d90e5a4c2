"""Models of lineartime in lm-evaluation-harness, which read less than its own ``hf`` because they have a state.

Answers to one question share what was read of the question, and a long text is read in one stream. Importing this
module registers the model ``lineartime`` with the harness.

Legend: Q questions (contexts), N choices (continuations), n tokens, V tokens of the vocabulary.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .cache import LineartimeCache
from .configuration import LineartimeConfig

#: Below the harness's own logger, whose level and format its users choose.
logger = logging.getLogger("lm_eval.lineartime")

#: Tokens of a text that are read at a time.
_BLOCK = 1024
_ALLOWED = "a folder of python -m fairseq_plugin.export_hf with a language model"


class Choice(NamedTuple):
    """A request for the log-likelihood of a continuation after a context."""

    index: int
    texts: tuple[str, str] | None  # for the harness's own store of answers; None for a part of a longer text
    context: tuple[int, ...]
    continuation: tuple[int, ...]


@register_model("lineartime")
class LineartimeLM(HFLM):
    """A language model of lineartime; options are those of the harness's ``hf``.

    * Log-likelihoods are those of ``hf``. A context that several continuations share is read once, and each continues
      from a copy of its state.
    * ``loglikelihood_rolling`` reads a text as one stream after one ``</s>``, so that each token sees all before it.
      ``hf`` begins anew in every window of ``max_length`` tokens, and predicts the ``</s>`` that a tokenizer adds, so
      its numbers differ. A model with parameters for a limited number of positions is evaluated in windows, as by
      ``hf``.
    * ``generate_until`` is that of ``hf``: greedy unless a task says otherwise, until one of the task's texts.

    ``tokens_read`` counts tokens that the model has read, without padding, and ``tokens_requested`` those of the
    requests of log-likelihoods, which ``hf`` reads one by one. Both are in the results under ``config``.

    Raises:
        ValueError: ``pretrained`` is neither such a model nor a folder of one.
    """

    def __init__(self, pretrained: str | PreTrainedModel, **options: Any) -> None:
        if isinstance(pretrained, str) and not (Path(pretrained) / "config.json").is_file():
            raise ValueError(f"pretrained is {pretrained!r}, which has no config.json; allowed: {_ALLOWED}")
        super().__init__(pretrained, backend="causal", **options)
        if self.config.model_type != LineartimeConfig.model_type:
            raise ValueError(f"pretrained holds a model of type {self.config.model_type!r}; allowed: {_ALLOWED}")
        self.tokens_read = self.tokens_requested = 0

    def get_model_info(self) -> dict[str, Any]:
        """The harness's hook: facts for the results, with the numbers of tokens."""
        counts = {"tokens_read": self.tokens_read, "tokens_requested": self.tokens_requested}
        return {**super().get_model_info(), **counts}

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """The harness's hook: the log-likelihood of each continuation, and whether it is what greedy decoding gives."""
        questions: dict[tuple[int, ...], list[Choice]] = {}
        for i, (texts, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"a continuation has {len(continuation)} tokens; allowed: {self.max_length}, the max_length of the "
                    "model (--model_args max_length=...)"
                )
            kept = (context + continuation)[-(self.max_length + 1) :]  # as hf: the end of what is too long
            before = tuple(kept[: len(kept) - len(continuation)])
            questions.setdefault(before, []).append(Choice(i, texts, before, tuple(continuation)))
        longest_first = sorted(questions.values(), key=lambda choices: -len(choices[0].context))
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        read = self.tokens_read
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="log-likelihoods") as bar:
            for batch in _batches(longest_first, self._rows(override_bs, longest_first)):
                choices = [choice for question in batch for choice in question]
                for choice, answer in zip(choices, self._score(batch, choices)):
                    answers[choice.index] = answer
                    if choice.texts is not None:
                        self.cache_hook.add_partial("loglikelihood", choice.texts, answer)
                bar.update(len(choices))
        requested = sum(len(context) + len(continuation) - 1 for _, context, continuation in requests)
        self.tokens_requested += requested
        logger.info(
            f"{len(requests):,} log-likelihoods after {len(questions):,} contexts: {self.tokens_read - read:,} tokens "
            f"were read, of {requested:,} if each were read by itself"
        )
        return answers

    def _rows(self, override_bs: int | None, questions: Sequence[Sequence[Choice]]) -> int:
        """The number of rows of a batch."""
        if override_bs is not None:
            return override_bs
        if self.batch_size != "auto":
            return int(self.batch_size)
        longest = [(None, list(choice.context), list(choice.continuation)) for choice in questions[0]]
        return self._detect_batch_size(longest, 0)

    def _score(self, questions: Sequence[Sequence[Choice]], choices: Sequence[Choice]) -> list[tuple[float, bool]]:
        """The answers to ``choices``, which are those of ``questions`` in order; each question is read once."""
        contexts = [torch.tensor(question[0].context) for question in questions]
        tokens = pad_sequence(contexts, batch_first=True, padding_side="left")
        lengths = torch.tensor([len(context) for context in contexts])
        mask = torch.arange(tokens.shape[1]) >= tokens.shape[1] - lengths[:, None]
        cache = LineartimeCache()
        logits = self._read(tokens, mask, cache, logits_to_keep=1).logits
        row_of_choice = torch.tensor([i for i, question in enumerate(questions) for _ in question])
        targets = [torch.tensor(choice.continuation) for choice in choices]
        logits = logits[row_of_choice.to(logits.device)]  # (N, 1, V), of the first token of each continuation
        if max(map(len, targets)) > 1:
            cache.batch_select_indices(row_of_choice)
            further = pad_sequence([target[:-1] for target in targets], batch_first=True)
            real = torch.arange(further.shape[1]) < torch.tensor([len(target) - 1 for target in targets])[:, None]
            later = self._read(further, torch.cat([mask[row_of_choice], real], dim=1), cache).logits
            logits = torch.cat([logits, later], dim=1)
        log_probs = F.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)
        return [_answer(row[: len(target)], target.to(row.device)) for row, target in zip(log_probs, targets)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The harness's hook: the log-likelihood of each text, which is read as one stream."""
        if self.model.decoder.max_tokens is not None:
            logger.info("texts are evaluated in windows, as by hf: the model has a limited number of positions")
            return super().loglikelihood_rolling(requests, disable_tqdm)
        texts = [self._after_prefix(self.tok_encode(request.args[0])) for request in requests]
        longest_first = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        sums, read = [0.0] * len(texts), self.tokens_read
        size = 1 if self.batch_size == "auto" else int(self.batch_size)
        for start in tqdm(range(0, len(texts), size), disable=disable_tqdm or self.rank != 0, desc="streams"):
            chosen = longest_first[start : start + size]
            for i, log_likelihood in zip(chosen, self._stream([texts[i] for i in chosen])):
                sums[i] = log_likelihood
                self.cache_hook.add_partial("loglikelihood_rolling", requests[i].args, log_likelihood)
        self.tokens_requested += sum(len(text) - 1 for text in texts)
        logger.info(
            f"{len(texts):,} texts, each in one stream: {self.tokens_read - read:,} tokens. hf begins anew every "
            f"{self.max_length:,} tokens, so its numbers differ for longer texts"
        )
        return sums

    def _after_prefix(self, tokens: list[int]) -> list[int]:
        """``tokens`` after the prefix, which the tokenizer may have put there already."""
        return tokens if tokens[:1] == [self.prefix_token_id] else [self.prefix_token_id, *tokens]

    def _stream(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """The log-likelihoods of ``texts``, the longest first, after their first tokens; blocks share one state."""
        sums, cache, position = [0.0] * len(texts), LineartimeCache(), 0
        while position < len(texts[0]) - 1:
            left = sum(len(text) - 1 > position for text in texts)  # the others have ended
            if position and left < cache.batch_size:
                cache.batch_select_indices(torch.arange(left))
            blocks = [torch.tensor(text[position : position + _BLOCK + 1]) for text in texts[:left]]
            tokens = pad_sequence([block[:-1] for block in blocks], batch_first=True)
            real = torch.arange(tokens.shape[1]) < torch.tensor([len(block) - 1 for block in blocks])[:, None]
            log_probs = F.log_softmax(self._read(tokens, real, cache).logits, dim=-1, dtype=self.softmax_dtype)
            for i, (row, block) in enumerate(zip(log_probs, blocks)):
                sums[i] += _answer(row[: len(block) - 1], block[1:].to(row.device))[0]
            position += _BLOCK
        return sums

    @torch.no_grad()
    def _read(self, tokens: Tensor, mask: Tensor, cache: LineartimeCache, **options: Any) -> ModelOutput:
        """Read ``tokens`` (B, n) after those of ``cache``; the last n columns of ``mask`` are True at real tokens."""
        self.tokens_read += int(mask[:, -tokens.shape[1] :].sum())
        mixed = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype=mixed, enabled=mixed is not None):
            return self.model(
                input_ids=tokens.to(self.device),
                attention_mask=mask.to(self.device, torch.long),
                cache=cache,
                use_cache=True,
                **options,
            )

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        """The harness's hook: the tokens of ``generate``, with those of ``context``."""
        generated = super()._model_generate(context, max_length, stop, **options)
        mask = options.get("attention_mask")
        steps = max(generated.shape[1] - context.shape[1] - 1, 0)  # the last token is not read
        self.tokens_read += (context.numel() if mask is None else int(mask.sum())) + steps * len(context)
        return generated


def _batches(questions: Sequence[list[Choice]], rows: int) -> Iterator[list[list[Choice]]]:
    """Batches of whole questions with at most ``rows`` choices; a question with more is a batch by itself."""
    batch: list[list[Choice]] = []
    for question in questions:
        if batch and sum(map(len, batch)) + len(question) > rows:
            yield batch
            batch = []
        batch.append(question)
    if batch:
        yield batch


def _answer(log_probs: Tensor, target: Tensor) -> tuple[float, bool]:
    """The log-likelihood of ``target`` (n,), and whether it has the largest of ``log_probs`` (n, V) everywhere."""
    greedy = bool((log_probs.argmax(-1) == target).all())
    return float(log_probs.gather(1, target[:, None]).sum()), greedy
