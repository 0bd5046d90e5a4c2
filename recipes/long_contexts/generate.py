"""Continue a text with an exported decoding step: ``python recipes/long_contexts/generate.py step.onnx "a text"``.

Needs numpy and onnxruntime, neither fairseq nor this project: copy the file. The graph is of
``python -m fairseq_plugin.export_step``, and holds its dictionary; ``step.prompt.onnx`` beside it reads the prompt, if
it is there. The time of a token and the memory do not depend on how many there were before.
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

_SPACE = "▁"  # how recipes.shared.characters writes a space
_METADATA, _VERSION = "lineartime", 1


class Graph:
    """An exported step, of one token or many, and what its file says about itself.

    Raises:
        ValueError: the file is no such graph.
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
        except Exception as error:  # onnxruntime raises what it likes for a broken file
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
        """tokens (B, n) -> logits (B, V) and the state after; row i goes on from row ``order[i]`` of ``state``.

        The state stays where onnxruntime has it, and is not copied.
        """
        given = dict(tokens=numpy.asarray(tokens, numpy.int64), order=numpy.asarray(order, numpy.int64))
        feeds = {name: onnxruntime.OrtValue.ortvalue_from_numpy(x) for name, x in given.items()}
        logits, *after = self.session.run_with_ort_values(self._outputs, {**feeds, **dict(zip(self._past, state))})
        return logits.numpy(), after


class Writer:
    """Reads a prompt and writes on, with the graph at ``path`` and the one for prompts beside it.

    Raises:
        ValueError: a file is no such graph, or the two are of different models.
    """

    def __init__(self, path: Path, threads: int = 1) -> None:
        self.step = Graph(path, threads)
        beside = path.with_suffix(f".prompt{path.suffix}")
        self.prompt = Graph(beside, threads) if beside.exists() else self.step
        same = {key: value for key, value in self.step.about.items() if key != "tokens_per_call"}
        if same != {key: value for key, value in self.prompt.about.items() if key != "tokens_per_call"}:
            raise ValueError(f"{beside} is of another model than {path.name}; allowed: one of the same export")
        self.symbols: list[str] = self.step.about["symbols"]
        self.numbers = {symbol: number for number, symbol in enumerate(self.symbols)}
        self.longest: int | None = self.step.about["longest_sequence"]

    def numbers_of(self, words: Sequence[str]) -> list[int]:
        """The numbers of ``words``; that of the unknown word for those that the dictionary lacks.

        Raises:
            ValueError: padding is one of them, which the graph reads as no token.
        """
        numbers = [self.numbers.get(word, self.step.about["unk"]) for word in words]
        if self.step.about["pad"] in numbers:
            raise ValueError(f"the text has {self.symbols[self.step.about['pad']]}; allowed: words")
        return numbers

    def check_length(self, tokens: int) -> None:
        """Raise ValueError if the model has no weights for so many tokens: the graph itself looks at no limit."""
        if self.longest is not None and tokens > self.longest:
            raise ValueError(
                f"the text has {tokens:,} tokens; allowed: {self.longest:,}, for which the model has positions"
            )

    def read(self, numbers: Sequence[int]) -> tuple[numpy.ndarray, list[onnxruntime.OrtValue]]:
        """Logits (1, V) of what follows the beginning and ``numbers``, and the state after them.

        As many tokens at once as the graph for prompts takes; the last call is filled up with padding.
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
        """Up to ``count`` next tokens (samples,) of so many texts that go on from ``numbers``, one after another.

        A text ends after so many ends of a line, and gives padding from then on.
        """
        about = self.step.about
        self.check_length(len(numbers) + count)
        logits, state = self.read(numbers)
        order, ended = [0] * samples, numpy.zeros(samples, int)
        logits = logits[order]
        for i in range(count):
            logits[:, [about["pad"], *({about["bos"]} - {about["eos"]})]] = -numpy.inf  # no text has them
            chosen = numpy.where(ended >= lines, about["pad"], choose(logits))
            yield chosen
            ended += chosen == about["eos"]
            if i + 1 == count or (ended >= lines).all():
                return
            logits, state = self.step(chosen[:, None], order, state)
            order = list(range(samples))


class Sampler:
    """Draws tokens from softmax(logits / ``temperature``), or takes the likeliest where that is 0.

    Only the ``top_k`` likeliest, and the fewest that have a probability of ``top_p`` together, are drawn from.

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
    """A text as the dictionary writes it: words, or characters with a sign for the space; lines end in "</s>"."""
    lines = text.split("\n")
    split = [[_SPACE if one == " " else one for one in line] if characters else line.split() for line in lines]
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
    given = parser.parse_args(arguments)
    try:
        for name in ("count", "lines", "samples", "threads"):
            if getattr(given, name) < 1:
                raise ValueError(f"--{name} is {getattr(given, name)}; allowed: at least 1")
        sampler = Sampler(given.temperature, given.top_k, given.top_p, given.seed)
        writer = Writer(given.graph, given.threads)
        begun = words_of(given.text, given.characters)
        steps = list(writer.write(writer.numbers_of(begun), given.count, given.samples, sampler, given.lines))
    except ValueError as error:
        print(f"generate: {error}", file=sys.stderr)
        return 1
    for row in numpy.stack(steps, axis=1):
        written = [writer.symbols[number] for number in row if number != writer.step.about["pad"]]
        print(text_of([*begun, *written], given.characters).rstrip("\n"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
