"""fairseq's generator for language models, with a prompt that is read in one forward pass before decoding.

fairseq's own needs one step for each token of a prompt, although there is nothing to choose. Its loop is not changed:
here the prompt is read first, and the loop starts from the state after it. The prompt's tokens and scores are put
before the loop's results.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.search import PrefixConstrainedBeamSearch
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator
from fairseq.utils import safe_getattr
from torch import Tensor, nn

from common.files.output_files import check_new
from common.ops.shared.checks import check_positive_int

from ..modules.named_states import named_state
from .prompt_reading import check_readable, counts_tokens, read_block
from .prompt_state import PromptState, fingerprint_of

#: The default number of tokens that a model reads at once.
BLOCK_SIZE = 1024
# Prompts of a batch whose lengths differ by at most this many tokens are one group: as many tokens as the shortest has
# are read at once, and the loop reads the remaining ones step by step, as fairseq's does. Groups follow one another.
_MOST_STEPS = 64
# The most probabilities that are computed at once for the scores of a prompt.
_PROBABILITIES = 2**24

#: For one model: "state", from which its decoder continues; "prompt" (B, 1 + m); "rows", the prompt of each row.
Read = dict[str, Any]


class PromptEnsemble(EnsembleModel):
    """fairseq's ensemble, for language models that continue prompts which they have read.

    To fairseq's generator, a read prompt is an encoder's output, which the generator repeats for beams and reorders.

    Raises:
        ValueError: a model is neither ours nor ``transformer_lm``, or ``block_size`` is below 1.
    """

    def __init__(self, models: Sequence[nn.Module], block_size: int) -> None:
        super().__init__(models)
        check_positive_int("--prompt-block-size", block_size)
        self.block_size = block_size
        for model in models:
            check_readable(model)
        self._read: Read | None = None  # the prompts of the last step

    def read(self, prompt: Tensor, temperature: float, after: PromptState | None = None) -> tuple[list[Read], Tensor]:
        """Read all but the last token of ``prompt`` (B, 1 + m): the ``Read`` of each model, and scores (B, m).

        Reads blocks of ``block_size`` tokens, so memory only grows by the state of the models. O(m) if the mechanism is
        linear. ``after`` is the state after the first tokens of each prompt, which are not read again.
        """
        reads, scores = [], []
        num_known = 0 if after is None else len(after)
        rows = torch.arange(len(prompt), device=prompt.device)
        for i, model in enumerate(self.models):
            state = {} if after is None else after.incremental_state(i, model, len(prompt))
            parts = [torch.zeros(len(prompt), 0, device=prompt.device)]
            for begin in range(num_known, prompt.size(1) - 1, self.block_size):
                end = min(begin + self.block_size, prompt.size(1) - 1)
                features = read_block(model.decoder, prompt, begin, end, state)
                parts.append(_scores(model, features, prompt[:, begin + 1 : end + 1], temperature))
            reads.append({"state": state, "prompt": prompt, "rows": rows})
            scores.append(torch.cat(parts, dim=1))
        scored = torch.logsumexp(torch.stack(scores), dim=0) - math.log(self.models_size)
        return reads, scored if after is None else torch.cat([after.scores.expand(len(prompt), -1), scored], dim=1)

    def whole(self, tokens: Tensor) -> Tensor:
        """The prompts of the last step followed by ``tokens`` (rows, 1 + n) without the first: (rows, 1 + m + n)."""
        if self._read is None:
            return tokens
        return torch.cat([self._read["prompt"][self._read["rows"]], tokens[:, 1:]], dim=1)

    def forward_encoder(self, net_input: dict[str, Any]) -> list[Read]:
        """fairseq's hook: the prompts as ``read`` returned them; an empty list for prompts without tokens."""
        return net_input["read"]

    def reorder_encoder_out(self, encoder_outs: list[Read], new_order: Tensor) -> list[Read]:
        """Row i continues from row ``new_order[i]``; after the first step, the decoder reorders the state."""
        for model, entry in zip(self.models, encoder_outs):
            entry["rows"] = entry["rows"].index_select(0, new_order)
            if "state" in entry:
                model.decoder.reorder_incremental_state_scripting(entry["state"], new_order)
        return encoder_outs

    def forward_decoder(
        self, tokens: Tensor, encoder_outs: list[Read], incremental_states: list[dict], temperature: float = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities (rows, words) of the token after prompts and ``tokens`` (rows, 1 + n), and no attention."""
        self._read = encoder_outs[0] if encoder_outs else None
        for state, entry in zip(incremental_states, encoder_outs):
            state.update(entry.pop("state", {}))
        if not all(counts_tokens(model.decoder) for model in self.models):  # its positions are column numbers
            tokens = self.whole(tokens)
        elif self._read is not None and tokens.size(1) == 1:
            tokens = self._read["prompt"][self._read["rows"], -1:]
        return super().forward_decoder(tokens, encoder_outs, incremental_states, temperature)


class PromptGenerator(SequenceGenerator):
    """fairseq's generator for language models, with ``PromptEnsemble``; tokens and scores are those of fairseq's own.

    ``block_size`` is the number of tokens read at once. A prompt counts in ``min_len``, ``max_len_a``, ``max_len_b``
    and in normalised scores, as in fairseq's own. Two differences are intended: n-grams of the prompt may not be
    repeated either, on a CPU as on a GPU, and the penalties of ``diverse_beam_groups`` and ``diversity_rate`` begin
    after the prompt, in which there is no choice.

    ``after`` is the state after a text that precedes every prompt, as if it were a part of it. ``save_to`` is a new
    file for the state after the prompt, of which there must be exactly one.

    Raises:
        ValueError: see ``PromptEnsemble``; ``after`` has other models, another dictionary or another temperature;
            ``save_to`` exists. When called: a prompt is longer than the longest generation, or has padding before its
            end of sentence; with ``save_to``, there is a second prompt, or one with padding or an end of sentence.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        tgt_dict,
        block_size: int = BLOCK_SIZE,
        after: PromptState | None = None,
        save_to: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(PromptEnsemble(models, block_size), tgt_dict, **options)
        self.after, self.save_to, self._has_saved = after, save_to, False
        if after is not None:
            after.check(models, tgt_dict, "the state of a prompt is given")
            if after.temperature != self.temperature:
                raise ValueError(
                    f"--temperature is {self.temperature}; allowed with this state of a prompt: {after.temperature}, "
                    "at which its tokens were scored"
                )
        if save_to is not None:
            check_new(Path(save_to), "--save-state")
            self._maker = fingerprint_of(models, tgt_dict)
        if self.repeat_ngram_blocker is not None:
            self.repeat_ngram_blocker = _BlockedInAll(self.repeat_ngram_blocker, self.model.whole)
        self._prompts: dict[int, Tensor] = {}  # by sentence number, with the beginning of sentence
        if isinstance(self.search, PrefixConstrainedBeamSearch):
            allowed = self.search.prefix_allowed_tokens_fn
            self.search.prefix_allowed_tokens_fn = lambda sentence, tokens: allowed(
                sentence, torch.cat([self._prompts[sentence], tokens[1:]])
            )

    def _generate(
        self,
        sample: dict[str, Any],
        prefix_tokens: Tensor | None = None,
        constraints: Tensor | None = None,
        bos_token: int | None = None,
    ) -> list[list[dict[str, Tensor]]]:
        """fairseq's, for prompts ``prefix_tokens`` (B, n); padding in a prompt is replaced by a chosen word."""
        if constraints is not None:
            raise ValueError("constraints are given; allowed with prompts that are read in one pass: none")
        source = sample["net_input"]["src_tokens"]
        if prefix_tokens is None:
            prefix_tokens = source.new_empty(len(source), 0)
        num_known = 0 if self.after is None else len(self.after)
        longest = self._longest(num_known + source.size(1))
        lengths = self._readable(prefix_tokens, longest, num_known)
        if self.save_to is not None:
            self._check_one(prefix_tokens, lengths, num_known)
        hypotheses: dict[int, list[dict[str, Tensor]]] = {}
        for rows in _together(lengths.tolist()):
            index = torch.tensor(rows, device=source.device)
            num_read = int(lengths[index].min())
            bos = self.eos if bos_token is None else bos_token
            group_hypotheses = self._go_on(_rows_of(sample, index), prefix_tokens[index], num_read, longest, bos)
            hypotheses.update(zip(rows, group_hypotheses, strict=True))
        return [hypotheses[row] for row in range(len(source))]

    def _longest(self, source_length: int) -> int:
        """The most tokens of a sentence, with its prompt and without the end, as in fairseq's loop."""
        return min(int(self.max_len_a * source_length + self.max_len_b), self.max_len - 1)

    def _readable(self, prefix_tokens: Tensor, longest: int, known: int) -> Tensor:
        """The number (B,) of tokens of each prompt, after ``known`` tokens, that can be read before the loop begins.

        These are the tokens before the first padding, which fairseq's loop replaces by a chosen word, whether it fills
        up a batch or was typed. If a prompt ends its sentence, one token is left to the loop, which cannot end a
        sentence at its first step.
        """
        padding, ends = prefix_tokens.eq(self.pad), prefix_tokens.eq(self.eos)
        after_eos, after_padding = ends.cumsum(1).ne(0), padding.cumsum(1).ne(0)
        if bool((after_padding & ends & ends.cumsum(1).eq(1)).any()):
            raise ValueError("a prompt has <pad>, for which a word is chosen, before </s>; allowed: after it alone")
        sizes = torch.arange(1, prefix_tokens.size(1) + 1, device=after_eos.device) * ~(after_eos | padding)
        if sizes.numel() and (most := known + int(sizes.max())) > longest:
            detail = f", {known} of them by --load-state" if known else ""
            raise ValueError(
                f"a prompt has {most} tokens{detail}; allowed: {longest}, by --max-len-a and --max-len-b, which count "
                f"the prompt, and by the model's positions, {self.max_len}"
            )
        before = (~(after_eos | after_padding)).sum(1)
        return (before - (after_eos & ~after_padding).any(1).long()).clamp(min=0)

    def _check_one(self, prompts: Tensor, lengths: Tensor, known: int) -> None:
        """Raise ValueError unless ``prompts`` (B, n) are one prompt whose state, after ``lengths``, can be saved."""
        if len(prompts) != 1 or self._has_saved:
            raise ValueError("more than one prompt is given; allowed with --save-state: one")
        if bool(prompts.eq(self.pad).any()):
            raise ValueError("the prompt has <pad>, for which a word is chosen; allowed with --save-state: words alone")
        if prompts.size(1) > int(lengths[0]):
            raise ValueError("the prompt ends its sentence; allowed with --save-state: one that does not")
        if known + int(lengths[0]) == 0:
            raise ValueError("the prompt has no tokens; allowed with --save-state: at least one")

    def _save(self, begun: Tensor, reads: list[Read], scores: Tensor) -> None:
        """Save the state after the one prompt ``begun`` (1, 1 + m) with its ``scores`` (1, m)."""
        states = [named_state(model, read["state"]) for model, read in zip(self.model.models, reads)]
        PromptState(begun[0], scores[0], self.temperature, states, self._maker).save(self.save_to, "--save-state")
        self._has_saved = True

    def _go_on(
        self, sample: dict[str, Any], prompts: Tensor, length: int, longest: int, bos: int
    ) -> list[list[dict[str, Tensor]]]:
        """Hypotheses for the rows of ``sample``; the first ``length`` tokens of ``prompts`` (B, n) are read at once."""
        beginnings = torch.cat([self._begin(bos).to(prompts).expand(len(prompts), -1), prompts[:, :length]], dim=1)
        self._prompts = dict(zip(sample["id"].tolist(), beginnings))
        reads, scores = [], None
        if beginnings.size(1) > 1:
            reads, scores = self.model.read(beginnings, self.temperature, self.after)
            if self.save_to is not None:
                self._save(beginnings, reads, scores)
            scores = scores - self.unk_penalty * beginnings[:, 1:].eq(self.unk)
        sample["net_input"]["read"] = reads
        remaining = prompts[:, length:]  # with padding, which fairseq's loop counts for --min-len
        with self._shorter_by(beginnings.size(1) - 1, longest):
            hypotheses = super()._generate(sample, remaining if remaining.size(1) else None, bos_token=bos)
        if scores is None:
            return hypotheses
        return [self._joined(*row) for row in zip(beginnings[:, 1:], scores, hypotheses)]

    def _begin(self, bos: int) -> Tensor:
        """The first tokens of every prompt: ``bos``, or the tokens of ``after``, which begin with ``bos``."""
        if self.after is None:
            return torch.tensor([bos])
        if int(self.after.tokens[0]) != bos:
            words = [self.tgt_dict[int(word)] for word in (self.after.tokens[0], bos)]
            raise ValueError(
                f"the state of a prompt is given whose text begins with {words[0]}; allowed: with {words[1]}, as the "
                "task's --add-bos-token says"
            )
        return self.after.tokens

    @contextmanager
    def _shorter_by(self, length: int, longest: int) -> Iterator[None]:
        """Inside, the loop's length limits are reduced by a prompt of ``length`` tokens."""
        limits = self.min_len, self.max_len_a, self.max_len_b
        self.min_len, self.max_len_a, self.max_len_b = self.min_len - length, 0, longest - length
        try:
            yield
        finally:
            self.min_len, self.max_len_a, self.max_len_b = limits

    def _joined(self, prompt: Tensor, scores: Tensor, hypotheses: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Prepend ``prompt`` (m,) with its ``scores`` (m,) to each of ``hypotheses``; the best first."""
        joined = []
        for hypothesis in hypotheses:
            positional = torch.cat([scores.to(hypothesis["positional_scores"]), hypothesis["positional_scores"]])
            score = positional.sum()
            if self.normalize_scores:
                score = score / len(positional) ** self.len_penalty
            tokens = torch.cat([prompt, hypothesis["tokens"]])
            joined.append({**hypothesis, "tokens": tokens, "score": score, "positional_scores": positional})
        return sorted(joined, key=lambda hypothesis: float(hypothesis["score"]), reverse=True)


def read_prompt(
    hub: GeneratorHubInterface,
    text: str,
    temperature: float = 1.0,
    replace_newline_with_eos: bool = False,
    block_size: int = BLOCK_SIZE,
) -> PromptState:
    """Read ``text`` with the models of ``hub``, the result of a language model's ``from_pretrained``.

    O(tokens) if the mechanism is linear. ``temperature`` is that of the later generation. With
    ``replace_newline_with_eos`` each newline ends a sentence, as in the files of ``fairseq-preprocess``.

    Raises:
        ValueError: unsupported models; a text without tokens, or with ``<pad>``; ``block_size`` below 1.
    """
    task = hub.task
    lines = text.splitlines(keepends=True) if replace_newline_with_eos else [text]
    bos = task.source_dictionary.bos() if safe_getattr(task.args, "add_bos_token", False) else hub.src_dict.eos()
    tokens = [torch.tensor([bos])]
    for line in lines:
        encoded = hub.encode(line.rstrip("\n") if replace_newline_with_eos else line)
        tokens.append(encoded if replace_newline_with_eos and line.endswith("\n") else encoded[:-1])
    prompt = torch.cat(tokens)[None].to(hub.device)
    if prompt.size(1) < 2:
        raise ValueError("text has no tokens; allowed: at least one")
    if bool(prompt.eq(hub.src_dict.pad()).any()):
        raise ValueError("text has <pad>; allowed: words, since generation chooses one in its place")
    ensemble = PromptEnsemble(list(hub.models), block_size).eval()
    with torch.no_grad():
        reads, scores = ensemble.read(prompt, temperature)
    states = [named_state(model, read["state"]) for model, read in zip(hub.models, reads)]
    return PromptState(prompt[0], scores[0], temperature, states, fingerprint_of(hub.models, hub.tgt_dict))


class _BlockedInAll(nn.Module):
    """fairseq's ``blocker`` of repeated n-grams, applied to prompts and generated tokens.

    A row is not changed if no word would be left, as while it still reads its prompt.
    """

    def __init__(self, blocker: nn.Module, whole: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocker, self.whole = blocker, whole

    def forward(self, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int) -> Tensor:
        """Log-probabilities (rows, words), -inf for words that would repeat an n-gram."""
        tokens = self.whole(tokens[:, : step + 1])
        blocked = self.blocker(tokens, lprobs.clone(), bsz, beam_size, tokens.size(1) - 1)
        nothing_left = blocked.eq(-math.inf).all(dim=1, keepdim=True)
        return torch.where(nothing_left, lprobs, blocked)


def _scores(model: nn.Module, features: Tensor, words: Tensor, temperature: float) -> Tensor:
    """Log-probabilities (B, n) of ``words`` (B, n) after features (B, n, C), in slices of bounded memory."""
    size = max(1, _PROBABILITIES // (len(words) * len(model.decoder.dictionary)))
    scores = []
    for part, targets in zip(features.split(size, dim=1), words.split(size, dim=1)):
        logits = model.decoder.output_layer(part) / temperature
        probabilities = model.get_normalized_probs((logits, None), log_probs=True, sample=None)
        scores.append(probabilities.gather(-1, targets[..., None])[..., 0])
    return torch.cat(scores, dim=1)


def _together(lengths: Sequence[int]) -> list[list[int]]:
    """Groups of rows whose ``lengths`` differ by at most ``_MOST_STEPS``."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not groups or lengths[row] > lengths[groups[-1][0]] + _MOST_STEPS:
            groups.append([])
        groups[-1].append(row)
    return groups


def _rows_of(sample: dict[str, Any], index: Tensor) -> dict[str, Any]:
    """The rows ``index`` of the fields of ``sample`` that the generator reads: "id" and the source."""
    numbers = sample.get("id")
    numbers = index if numbers is None else numbers.to(index.device)[index]
    source = {name: sample["net_input"][name][index] for name in ("src_tokens", "src_lengths")}
    return {"id": numbers, "net_input": source}
