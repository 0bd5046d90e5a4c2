"""Continue a text with an exported decoding step: ``python recipes/long_contexts/generate.py step.onnx "a text"``.

It needs only numpy and onnxruntime, so the file can be copied. The graph comes from
``python -m fairseq_plugin.export_step`` and has the dictionary. ``step.prompt.onnx`` next to it reads the prompt, if it
exists. Time per token and memory do not depend on the number of tokens so far.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import onnxruntime

_SPACE = "▁"  # how recipes.texts writes a space
_METADATA, _VERSION = "lineartime", 1


class Graph:
    """An exported step of one or many tokens, with the metadata of its file.

    Raises:
        ValueError: the file is not such a graph.
    """

    def __init__(self, path: Path, threads: int = 1) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        try:
            content = path.read_bytes()
            self.session = onnxruntime.InferenceSession(content, options, onnxruntime.get_available_providers())
            described = self.session.get_modelmeta().custom_metadata_map.get(_METADATA, "{}")
            self.about: dict[str, Any] = json.loads(described)
            version, digest = self.about.get("version"), self.about.pop("sha256", "")
        except Exception as error:  # onnxruntime raises various errors for a broken file
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(f"{path} cannot be read: {reason}; allowed: an ONNX graph") from error
        if version != _VERSION:
            raise ValueError(f"{path} is no decoding step; allowed: a file of python -m fairseq_plugin.export_step")
        if hashlib.sha256(content.replace(digest.encode(), b"0" * len(digest))).hexdigest() != digest:
            raise ValueError(f"{path} is damaged: its digest is of another content; allowed: the file as exported")
        self.tokens_per_call: int = self.about["tokens_per_call"]
        names = [entry["name"] for entry in self.about["state"]]
        self._past, self._outputs = (
            [f"past.{name}" for name in names],
            ["logits", *(f"present.{name}" for name in names)],
        )

    def beginning(self) -> list[onnxruntime.OrtValue]:
        """The state of one text before its first token."""
        return [
            onnxruntime.OrtValue.ortvalue_from_numpy(numpy.full((1, *entry["shape"]), entry["fill"], entry["dtype"]))
            for entry in self.about["state"]
        ]

    def __call__(
        self, tokens: numpy.ndarray, order: Sequence[int], state: list[onnxruntime.OrtValue]
    ) -> tuple[numpy.ndarray, list[onnxruntime.OrtValue]]:
        """tokens (B, n) -> logits (B, V) and the state after; row i continues row ``order[i]`` of ``state``.

        The state stays in onnxruntime's memory and is not copied.
        """
        arrays = dict(tokens=numpy.asarray(tokens, numpy.int64), order=numpy.asarray(order, numpy.int64))
        feeds = {name: onnxruntime.OrtValue.ortvalue_from_numpy(x) for name, x in arrays.items()}
        logits, *after = self.session.run_with_ort_values(self._outputs, {**feeds, **dict(zip(self._past, state))})
        return logits.numpy(), after


class Writer:
    """Reads a prompt and continues it, with the graph at ``path`` and the graph for prompts next to it.

    Raises:
        ValueError: a file is not such a graph, or the two are of different models.
    """

    def __init__(self, path: Path, threads: int = 1) -> None:
        self.step = Graph(path, threads)
        prompt_path = path.with_suffix(f".prompt{path.suffix}")
        self.prompt = Graph(prompt_path, threads) if prompt_path.exists() else self.step
        same = {key: value for key, value in self.step.about.items() if key != "tokens_per_call"}
        if same != {key: value for key, value in self.prompt.about.items() if key != "tokens_per_call"}:
            raise ValueError(f"{prompt_path} is of another model than {path.name}; allowed: one of the same export")
        self.symbols: list[str] = self.step.about["symbols"]
        self.numbers = {symbol: number for number, symbol in enumerate(self.symbols)}
        self.longest: int | None = self.step.about["longest_sequence"]

    def numbers_of(self, words: Sequence[str]) -> list[int]:
        """The numbers of ``words``; words that are not in the dictionary get the number of the unknown word.

        Raises:
            ValueError: ``words`` has padding, which the graph does not read as a token.
        """
        numbers = [self.numbers.get(word, self.step.about["unk"]) for word in words]
        if self.step.about["pad"] in numbers:
            raise ValueError(f"the text has {self.symbols[self.step.about['pad']]}; allowed: words")
        return numbers

    def check_length(self, tokens: int) -> None:
        """Raise ValueError if the model has no weights for so many tokens; the graph itself does not check it."""
        if self.longest is not None and tokens > self.longest:
            raise ValueError(
                f"the text has {tokens:,} tokens; allowed: {self.longest:,}, for which the model has positions"
            )

    def read(self, numbers: Sequence[int]) -> tuple[numpy.ndarray, list[onnxruntime.OrtValue]]:
        """Logits (1, V) of the token after ``numbers``, and the state.

        Each call reads as many tokens as the graph for prompts accepts; the last call is padded.
        """
        tokens = [self.step.about["begins_with"], *numbers]
        self.check_length(len(tokens))
        state, size = self.prompt.beginning(), self.prompt.tokens_per_call
        for begin in range(0, len(tokens), size):
            part = tokens[begin : begin + size]
            part = part + [self.step.about["pad"]] * (size - len(part))
            logits, state = self.prompt(numpy.array([part]), [0], state)
        return logits, state

    def write(
        self, numbers: Sequence[int], count: int, samples: int, choose: "Sampler", lines: int
    ) -> Iterator[numpy.ndarray]:
        """Up to ``count`` next tokens (samples,) of ``samples`` texts that continue ``numbers``, step by step.

        A text ends after ``lines`` ends of a line; from then on its tokens are padding.
        """
        about = self.step.about
        self.check_length(len(numbers) + count)
        logits, state = self.read(numbers)
        order, ended = [0] * samples, numpy.zeros(samples, int)
        logits = logits[order]
        for i in range(count):
            logits[:, [about["pad"], *({about["bos"]} - {about["eos"]})]] = -numpy.inf  # never drawn
            chosen = numpy.where(ended >= lines, about["pad"], choose(logits))
            yield chosen
            ended += chosen == about["eos"]
            if i + 1 == count or (ended >= lines).all():
                return
            logits, state = self.step(chosen[:, None], order, state)
            order = list(range(samples))


class Sampler:
    """Draws tokens from softmax(logits / ``temperature``), or takes the most likely one if that is 0.

    It draws from the ``top_k`` most likely tokens, and of these from the fewest whose probabilities sum to ``top_p``.

    Raises:
        ValueError: an option outside of its range.
    """

    def __init__(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int | None = None) -> None:
        allowed = {
            "--temperature": (temperature, temperature >= 0, "at least 0"),
            "--top-k": (top_k, top_k >= 0, "at least 0, which is all"),
            "--top-p": (top_p, 0 < top_p <= 1, "above 0, at most 1"),
        }
        for name, (value, is_allowed, words) in allowed.items():
            if not is_allowed:
                raise ValueError(f"{name} is {value}; allowed: {words}")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.generator = numpy.random.default_rng(seed)

    def __call__(self, logits: numpy.ndarray) -> numpy.ndarray:
        """logits (B, V) -> tokens (B,)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        scaled = logits.astype(numpy.float64) / self.temperature
        order = numpy.argsort(-scaled, axis=-1, kind="stable")
        probability = numpy.exp(numpy.take_along_axis(scaled - scaled.max(-1, keepdims=True), order, -1))
        if self.top_k:
            probability[:, self.top_k :] = 0
        probability /= probability.sum(-1, keepdims=True)
        before = probability.cumsum(-1) - probability
        probability[before >= self.top_p] = 0
        reached = probability.cumsum(-1)
        drawn = self.generator.random((len(logits), 1)) * reached[:, -1:]
        return numpy.take_along_axis(order, (reached <= drawn).sum(-1, keepdims=True), -1)[:, 0]


def words_of(text: str, characters: bool) -> list[str]:
    """A text in the dictionary's symbols: words, or characters with a sign for the space; lines end with "</s>"."""
    lines = text.split("\n")
    split = [[_SPACE if char == " " else char for char in line] if characters else line.split() for line in lines]
    return [word for i, words in enumerate(split) for word in ([] if i == 0 else ["</s>"]) + words]


def text_of(words: Sequence[str], characters: bool) -> str:
    """The inverse of ``words_of``."""
    shown = ["\n" if word == "</s>" else " " if characters and word == _SPACE else word for word in words]
    return "".join(shown) if characters else " ".join(shown).replace(" \n", "\n").replace("\n ", "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print continuations of a text; returns the exit status."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("graph", type=Path, help="of python -m fairseq_plugin.export_step")
    parser.add_argument("text", nargs="?", default="", help="how it begins (empty)")
    parser.add_argument("--characters", action="store_true", help="the dictionary is of characters, not of words")
    parser.add_argument("--count", type=int, default=200, help="tokens to write, at most (%(default)s)")
    parser.add_argument("--lines", type=int, default=1, help="ends of a line, at most (%(default)s)")
    parser.add_argument("--samples", type=int, default=1, help="texts to write, side by side (%(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest token (%(default)s)")
    parser.add_argument("--top-k", type=int, default=0, help="draw from so many tokens; 0 is all (%(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from this much probability (%(default)s)")
    parser.add_argument("--seed", type=int, help="of the draws")
    parser.add_argument("--threads", type=int, default=1, help="of onnxruntime (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        for name in ("count", "lines", "samples", "threads"):
            if getattr(options, name) < 1:
                raise ValueError(f"--{name} is {getattr(options, name)}; allowed: at least 1")
        sampler = Sampler(options.temperature, options.top_k, options.top_p, options.seed)
        writer = Writer(options.graph, options.threads)
        prompt = words_of(options.text, options.characters)
        steps = list(writer.write(writer.numbers_of(prompt), options.count, options.samples, sampler, options.lines))
    except ValueError as error:
        print(f"generate: {error}", file=sys.stderr)
        return 1
    for row in numpy.stack(steps, axis=1):
        written = [writer.symbols[number] for number in row if number != writer.step.about["pad"]]
        print(text_of([*prompt, *written], options.characters).rstrip("\n"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
