"""The example that writes text with an exported step: what it reads, draws and writes, beside fairseq's own."""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from fairseq_plugin.export_step import export
from fairseq_plugin.models.flowformer import LinearLanguageModel
from recipes.long_contexts import exported_step, generate
from recipes.long_contexts.generate import Graph, Sampler, Writer, main, text_of, words_of
from tests.fairseq_plugin.helpers.checkpoint_files import save_model
from tests.torch_versions import needs_newer_than_2_6

pytestmark = needs_newer_than_2_6
POSITIONS = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """model.pt with learned positions, its dictionary, and its step with one for prompts of 8; costs two exports."""
    folder = tmp_path_factory.mktemp("exported")
    save_model(folder / "model.pt", "cfg", "linear_lm", "--decoder-layers", "1", "--decoder-learned-pos")
    (folder / "dict.txt").write_text("".join(f"w{i} 1\n" for i in range(60)))
    export(folder / "model.pt", folder / "step.onnx", prompt_tokens=8)
    return folder


def greedy(words: list[str], writer: Writer, count: int) -> list[int]:
    """The likeliest tokens after ``words``."""
    return [int(chosen[0]) for chosen in writer.write(writer.numbers_of(words), count, 1, Sampler(temperature=0), 99)]


@pytest.mark.parametrize("length", [0, 3, 7, 8, 20])
def test_it_writes_what_fairseq_writes(folder: Path, length: int) -> None:
    """Prompts of fewer tokens than the graph takes, of as many, and of more; with that graph and without."""
    words = [f"w{7 * i % 60}" for i in range(length)]
    writer = Writer(folder / "step.onnx")
    hub = LinearLanguageModel.from_pretrained(str(folder), "model.pt")
    model, expected = hub.models[0], [writer.step.about["eos"], *writer.numbers_of(words)]
    model.eval()
    for _ in range(12):
        with torch.no_grad():
            scores = model(torch.tensor([expected]))[0][0, -1]
        scores[[hub.task.source_dictionary.pad(), hub.task.source_dictionary.bos()]] = -torch.inf
        expected.append(int(scores.argmax()))
    assert greedy(words, writer, 12) == expected[1 + length :]
    writer.prompt = writer.step
    assert greedy(words, writer, 12) == expected[1 + length :]


def test_it_needs_neither_fairseq_nor_torch(folder: Path) -> None:
    """A process of its own, with nothing but the file."""
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: assert not {'torch', 'fairseq', 'common', 'recipes'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, generate.__file__, str(folder / "step.onnx"), "w1 w2", "--count", "9"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "--samples", "2", "--seed", "3"], capture_output=True, text=True, env=environment, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["w1", "w2"]] * 2


def test_samples_are_rows_of_their_own(folder: Path) -> None:
    """Side by side they are what each is alone, and a text that has ended gives padding."""
    writer = Writer(folder / "step.onnx")
    pad, eos = writer.step.about["pad"], writer.step.about["eos"]
    plan = numpy.array([[5, 6, eos, 7, 8], [9, eos, eos, 9, 9]])

    def planned(logits: numpy.ndarray) -> numpy.ndarray:
        seen.append(logits)
        return plan[:, len(seen) - 1]

    seen: list[numpy.ndarray] = []
    together = numpy.stack(list(writer.write([10, 11], 5, 2, planned, 2)), axis=1)
    assert together.tolist() == [[5, 6, eos, 7, 8], [9, eos, eos, pad, pad]]
    both = seen
    for row in range(2):
        seen, whole = [], plan
        plan = whole[[row]]
        list(writer.write([10, 11], 5, 1, planned, 99))
        plan = whole
        for i, logits in enumerate(seen[: 5 if row == 0 else 3]):
            real = numpy.isfinite(logits[0])
            assert abs(logits[0][real] - both[i][row][real]).max() < 1e-5


def test_draws() -> None:
    """The likeliest, the distribution itself, the k likeliest, and the fewest of a probability."""
    probability = numpy.array([0.1, 0.4, 0.2, 0.3])
    logits = numpy.log(probability)[None].repeat(20_000, 0)

    def shares(sampler: Sampler) -> numpy.ndarray:
        return numpy.bincount(sampler(logits), minlength=4) / len(logits)

    assert shares(Sampler(temperature=0)).tolist() == [0, 1, 0, 0]
    assert abs(shares(Sampler(seed=1)) - probability).max() < 0.015
    squared = probability**2 / (probability**2).sum()
    assert abs(shares(Sampler(temperature=0.5, seed=1)) - squared).max() < 0.015
    for sampler in (Sampler(top_k=2, seed=1), Sampler(top_p=0.7, seed=1), Sampler(top_k=3, top_p=0.6, seed=1)):
        assert abs(shares(sampler) - numpy.array([0, 4, 0, 3]) / 7).max() < 0.015
    assert (Sampler(seed=4)(logits) == Sampler(seed=4)(logits)).all()
    impossible = numpy.array([[0.0, -numpy.inf, -numpy.inf]])
    assert all(Sampler(seed=i)(impossible) == 0 for i in range(50))


@pytest.mark.parametrize("characters", [True, False])
def test_texts_and_words(characters: bool) -> None:
    text = "to be,\nor  not" if characters else "to be,\nor not"
    words = words_of(text, characters)
    assert "</s>" in words and all(len(word) == 1 or word == "</s>" for word in words) == characters
    assert text_of(words, characters) == text


def test_the_speed_is_measured_beside_fairseq(folder: Path, capsys) -> None:
    arguments = [str(folder / "model.pt"), str(folder / "step.onnx"), "--positions", "5", "40"]
    exported_step.main(arguments)
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    assert [int(row[0]) for row in rows] == [5, 40]
    assert all(float(row[1]) > 0 and float(row[2]) > 0 and float(row[3]) < 1e-5 for row in rows)
    with pytest.raises(SystemExit):
        exported_step.main([*arguments[:3], "50"])
    assert f"at most {POSITIONS}" in capsys.readouterr().err


def test_what_is_wrong_is_said(folder: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no graph")
    (tmp_path / "step.onnx").write_bytes((folder / "step.onnx").read_bytes())
    other = (folder / "step.prompt.onnx").read_bytes()
    (tmp_path / "step.prompt.onnx").write_bytes(signed_again(other.replace(b'"linear_lm"', b'"lineaa_lm"')))
    for arguments, said in (
        ([tmp_path / "broken.onnx"], "broken.onnx"),
        ([tmp_path / "none.onnx"], "none.onnx"),
        ([tmp_path / "step.onnx"], "another model"),
        ([folder / "step.onnx", "w1 " * 40, "--count", "20"], f"allowed: {POSITIONS}"),
        ([folder / "step.onnx", "w1 <pad> w2"], "<pad>"),
        ([folder / "step.onnx", "--samples", "0"], "--samples is 0"),
        ([folder / "step.onnx", "--temperature", "-1"], "--temperature is -1"),
        ([folder / "step.onnx", "--top-p", "0"], "--top-p is 0"),
    ):
        assert main([str(one) for one in arguments]) == 1
        assert said in capsys.readouterr().err


def signed_again(content: bytes) -> bytes:
    """``content`` with its own digest."""
    empty = re.sub(rb'(?<="sha256": ")[0-9a-f]{64}', b"0" * 64, content)
    return empty.replace(b"0" * 64, hashlib.sha256(empty).hexdigest().encode())


def test_a_damaged_file_is_refused(folder: Path, tmp_path: Path) -> None:
    """Wherever it is; onnxruntime itself takes other weights."""
    whole, draw = (folder / "step.onnx").read_bytes(), random.Random(1)
    assert signed_again(whole) == whole
    for place in [draw.randrange(len(whole)) for _ in range(20)]:
        flipped = bytes([whole[place] ^ (1 << draw.randrange(8))])
        (tmp_path / "step.onnx").write_bytes(whole[:place] + flipped + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"^[^\n]*step.onnx [^\n]*allowed[^\n]*$"):
            Graph(tmp_path / "step.onnx")
    for content in (whole + b"more", whole[:-1], whole[: len(whole) // 2], b"", b"{}"):
        (tmp_path / "step.onnx").write_bytes(content)
        with pytest.raises(ValueError, match=r"^[^\n]*step.onnx [^\n]*allowed[^\n]*$"):
            Graph(tmp_path / "step.onnx")


def test_the_file_describes_itself(folder: Path) -> None:
    """What somebody needs who writes such a program in another language."""
    about = Writer(folder / "step.onnx").step.about
    assert about["longest_sequence"] == POSITIONS and about["tokens_per_call"] == 1
    assert {"name", "shape", "dtype", "fill"} == set(about["state"][0])
    assert json.loads(json.dumps(about)) == about
