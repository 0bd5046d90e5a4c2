"""One decoding step with the state as inputs and outputs: in Python, exported, in onnxruntime, for every mechanism."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from fairseq_plugin.export.decoding_step import DecodingStep
from fairseq_plugin.export.onnx_operators import cummax, in_double, solve_triangular
from fairseq_plugin.export_step import main, prompt_path
from fairseq_plugin.modules.named_states import named_state, state_of
from tests.compare import assert_close
from tests.fairseq_plugin.helpers import kinds
from tests.fairseq_plugin.helpers.checkpoint_files import STOCK, save_model
from tests.fairseq_plugin.helpers.one_line import refused_in_one_line
from tests.fairseq_plugin.helpers.text import dictionary, tokens
from tests.torch_versions import needs_newer_than_2_6

#: Of these the state grows.
GROWING = {f"{name}_lm" for name in ("softmax", "quadratic", "yoso", "sparse", "synthesizer", "combiner", "daft_full")}
GROWING |= {"flash_quad_lm", "transformer_plus_lm", "transformer_pp_lm"}
LINEAR = "linear_lm --linear-forget head --linear-short-conv 3"
#: One for each kind of operators: an export costs seconds. Of all others it was tried when this was written.
IN_ONNX = ("flowformer_lm", LINEAR, "flash_lm", "daft_conv_lm", "gated_delta_lm")
#: Of this one a second graph reads a block: triangular systems, which single tokens have not.
BLOCKS, BLOCK = "gated_delta_lm", 12
#: Every model but for stacks of several kinds of layers, which ../test_every_door.py has; and further options.
MODELS = sorted({*kinds.models("_lm")} - {"hybrid_lm"})
MORE = ("flowformer_lm --flow-forget channel --flow-short-conv 3", "flash_lm --flash-forget head", LINEAR)
MORE += ("favor_lm --favor-features 16 --favor-forget head", "longformer_lm --longformer-global-tokens 2")
RESET, LENGTH = " --lineartime-reset-at-eos", 1000
SIZES = ("--decoder-layers", "1", "--tokens-per-sample", str(LENGTH))
pytestmark = pytest.mark.usefixtures("plain_pytorch")


@cache
def built(case: str) -> nn.Module:
    """A model of one narrow layer for ``LENGTH`` tokens, whose outputs depend on every part of it."""
    return kinds.randomised(kinds.build(*case.split(), *SIZES)).eval()


def logits_of(model: nn.Module, sequence: Tensor) -> Tensor:
    """The whole forward pass: (B, n, V)."""
    with torch.no_grad():
        return model(sequence)[0]


# ---- In Python


@pytest.mark.parametrize("case", [*MODELS, *MORE, *(case + RESET for case in IN_ONNX)])
def test_many_tokens_and_padding_in_python(case: str) -> None:
    """Blocks with padding on both sides, of which each row has another share, read what single tokens read.

    Documents end inside of a block, at its last token, at the first after it, and twice in a row.
    """
    model = built(case)
    if case in GROWING:
        with pytest.raises(ValueError, match="grows.*allowed"):
            DecodingStep(model)
        return
    step = DecodingStep(model)
    given, pad = tokens(2, 40), step.decoder.padding_idx
    given[0, [3, 11, 12, 23]] = given[1, [0, 6]] = step.decoder.dictionary.eos()
    expected = logits_of(model, given)
    with torch.no_grad():
        state = step.initial_state(2)
        blocks = torch.full((2, 30), pad)
        blocks[0, 2:25], blocks[1, :7] = given[0, :23], given[1, :7]
        logits, *state = step(blocks, torch.tensor([0, 1]), *state)
        assert_close("block", logits, torch.stack([expected[0, 22], expected[1, 6]]), tolerance=1e-5)
        nothing = torch.full((2, 1), pad)
        _, *same = step(nothing, torch.tensor([0, 1]), *state)
        assert all(torch.equal(x, y) for x, y in zip(same, state) if not x.is_floating_point())
        after, *_ = step(torch.stack([given[1, 7], given[0, 23]])[:, None], torch.tensor([1, 0]), *same)
        assert_close("step", after, torch.stack([expected[1, 7], expected[0, 23]]), tolerance=1e-5)
    # Tensors without values pass, of one token and of many: so it can be exported.
    step, past = step.to("meta"), [x.to("meta") for x in step.initial_state(2)]
    for size in (1, 24):
        blocks = torch.zeros(3, size, dtype=torch.int64, device="meta")
        logits, *present = step(blocks, blocks[:, 0], *past)
        assert len(logits) == 3 and [x.shape[1:] for x in present] == [x.shape[1:] for x in past]


def test_the_model_stays_as_it_was() -> None:
    """The step has a copy: the model still trains, looks at its limits, and decodes as before."""
    model = kinds.build("cosformer_lm", *SIZES)
    step = DecodingStep(model)
    assert model.training and not step.training and step.max_tokens == LENGTH
    assert all(x.requires_grad for x in model.parameters())
    with pytest.raises(ValueError, match=str(LENGTH)):
        model.eval()(tokens(1, LENGTH + 1))
    for option, limit in (("--decoder-learned-pos", LENGTH), ("--no-token-positional-embeddings", None)):
        assert DecodingStep(built(f"linear_lm {option}")).max_tokens == limit


@pytest.mark.parametrize("size", [1, 2, 8, 13, 40])
def test_operators_that_onnx_lacks_are_those_of_torch(size: int) -> None:
    """Running maxima; triangular systems, of which only what is below the diagonal is read, with large entries, too."""
    for x in (torch.randn(2, size, size), torch.randint(0, 3, (2, size, size)).float()):
        for dim in (1, -1):
            assert all(map(torch.equal, cummax(x, dim), x.cummax(dim)))
    a, b = (torch.randn(2, size, columns, dtype=torch.float64) for columns in (size, 3))
    expected = torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True)
    scale = expected.abs().max()
    found = solve_triangular(a, b, upper=False, unitriangular=True)
    assert_close("solution", found / scale, expected / scale)
    x = torch.linspace(-20, 20, 1001)  # what is rounded once is within half a unit of the last place
    assert torch.equal(in_double(torch.exp)(x), x.double().exp().float())
    assert in_double(torch.exp)(x.double()) is NotImplemented


# ---- In files


class Graphs(NamedTuple):
    """Graphs that the command wrote for a model."""

    folder: Path
    step: onnxruntime.InferenceSession
    block: onnxruntime.InferenceSession | None


def about(session: onnxruntime.InferenceSession) -> dict:
    """Metadata of a file."""
    return json.loads(session.get_modelmeta().custom_metadata_map["lineartime"])


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory, plain_pytorch) -> Callable[[str], Graphs]:
    """Function that exports a model once, by the command, for onnxruntime on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1

    @cache
    def export(case: str) -> Graphs:
        folder = tmp_path_factory.mktemp("model")
        kinds.save(folder / "model.pt", case.split()[0], built(case).state_dict(), *case.split()[1:], *SIZES)
        dictionary().save(str(folder / "dict.txt"))
        more = ("--prompt-tokens", str(BLOCK)) if case == BLOCKS else ()
        main([str(folder / "model.pt"), str(folder / "step.onnx"), *more])
        files = [folder / "step.onnx", *([prompt_path(folder / "step.onnx")] if more else [])]
        step, *block = (onnxruntime.InferenceSession(str(path), options) for path in files)
        return Graphs(folder, step, next(iter(block), None))

    return export


def start(session: onnxruntime.InferenceSession, rows: int = 1) -> dict[str, numpy.ndarray]:
    """The state before the first token, as the file describes it."""
    entries = about(session)["state"]
    return {f"past.{one['name']}": numpy.full((rows, *one["shape"]), one["fill"], one["dtype"]) for one in entries}


def call(session, given: Tensor, order: list[int], state: dict[str, numpy.ndarray]) -> tuple[Tensor, dict]:
    """Logits after ``given`` (B, n), and the state after it."""
    names = list(state)
    found = session.run(
        ["logits", *(name.replace("past.", "present.") for name in names)],
        {"tokens": given.numpy(), "order": numpy.array(order), **state},
    )
    return torch.from_numpy(found[0]), dict(zip(names, found[1:]))


@needs_newer_than_2_6
@pytest.mark.parametrize("case", IN_ONNX)
def test_a_thousand_tokens_in_onnxruntime(case: str, graphs: Callable[[str], Graphs]) -> None:
    """Two rows that begin as one, and change places now and then."""
    model, session = built(case), graphs(case).step
    state, order, given = start(session), [0, 0], tokens(2, LENGTH)
    read, found = torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, 0, len(dictionary()))
    for i in range(LENGTH):
        step = given[:, i : i + 1]
        logits, after = call(session, step, order, state)
        assert i == 0 or all(x.shape == after[name].shape for name, x in state.items())
        read, found, state = torch.cat([read[order], step], 1), torch.cat([found[order], logits[:, None]], 1), after
        order = [1, 0] if i % 300 == 200 else [0, 1]
    assert not torch.equal(read, given)
    assert_close(case, found, logits_of(model, read), tolerance=1e-5)
    incremental: dict = {}
    with torch.no_grad():
        model.decoder.extend_features(read, incremental)
    for name, x in named_state(model.decoder, incremental).items():
        if ".log_" in name:  # a logarithm that goes through exp and log at each step
            found = torch.from_numpy(state[f"past.0.{name.rpartition('.')[2]}"])
            assert (found - x).abs().max() < 1e-5 * max(1.0, float(x.abs().max())), name


@needs_newer_than_2_6
def test_prompts_in_blocks(graphs: Callable[[str], Graphs]) -> None:
    """The second graph's logits and state are those of single tokens, with padding and rows in another order."""
    model, session = built(BLOCKS), graphs(BLOCKS).block
    given, state = tokens(3, 20), start(session, 3)
    _, state = call(session, given[:, :BLOCK], [0, 1, 2], state)
    rest = nn.functional.pad(given[:, BLOCK:], (0, 4), value=model.decoder.padding_idx)
    logits, _ = call(session, rest, [2, 0, 1], {name: x[[1, 2, 0]] for name, x in state.items()})
    assert_close("logits", logits, logits_of(model, given)[:, -1], tolerance=1e-5)


@needs_newer_than_2_6
def test_far_positions(graphs: Callable[[str], Graphs]) -> None:
    """Sinusoids are computed: there is no last position, and at the 100,000th they are fairseq's."""
    model, session = built(LINEAR), graphs(LINEAR).step
    state = start(session)
    for count in (0, 100_000):
        incremental: dict = {}
        with torch.no_grad():
            model.decoder.extend_features(torch.tensor([[5]]), incremental)
            named = {**named_state(model.decoder, incremental), ".seen.count": torch.tensor([count])}
            incremental = state_of(model.decoder, named, torch.tensor([0]))
            features, _ = model.decoder.extend_features(torch.tensor([[7]]), incremental)
            expected = model.decoder.output_layer(features)[:, 0]
        _, after = call(session, torch.tensor([[5]]), [0], state)
        logits, _ = call(session, torch.tensor([[7]]), [0], {**after, "past.decoder.count": numpy.array([count])})
        assert_close(str(count), logits, expected, tolerance=1e-5)


@needs_newer_than_2_6
def test_a_file_says_what_it_is(graphs: Callable[[str], Graphs]) -> None:
    """And nothing of this machine; ../test_every_door.py reads files for torch."""
    folder, *sessions = graphs(BLOCKS)
    said = [about(session) for session in sessions]
    for session, one, size in zip(sessions, said, (1, BLOCK), strict=True):
        assert one.pop("tokens_per_call") == size == session.get_inputs()[0].shape[1]
        assert len(one.pop("sha256")) == 64  # of this file alone
    assert said[0] == said[1]
    assert said[0]["architecture"] == BLOCKS and said[0]["longest_sequence"] is None
    assert said[0]["symbols"][: said[0]["unk"] + 1] == ["<s>", "<pad>", "</s>", "<unk>"]
    assert len(said[0]["symbols"]) == sessions[0].get_outputs()[0].shape[1]
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert files.keys() == {"model.pt", "dict.txt", "step.onnx", "step.prompt.onnx"}
    assert str(Path.cwd()).encode() not in files["step.onnx"]


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    for folder in ("here", "out", "alone"):
        (tmp_path / folder).mkdir()
    here, target = tmp_path / "here", tmp_path / "out" / "step.onnx"
    dictionary().save(str(here / "dict.txt"))
    target.with_name("there.onnx").write_text("mine")
    for path, arguments in (("here/model", ["linear_lm"]), ("here/stock", STOCK), ("here/grows", ["softmax_lm"])):
        save_model(tmp_path / f"{path}.pt", "cfg", *arguments)
    save_model(tmp_path / "alone" / "model.pt", "cfg", "linear_lm")
    for checkpoint, place, more, said in (
        (here / "model.pt", target.with_name("there.onnx"), [], "there already"),
        (here / "model.pt", target.with_suffix(".txt"), [], ".pt2"),
        (here / "model.pt", tmp_path / "none" / "step.onnx", [], "folder"),
        (here / "model.pt", target, ["--prompt-tokens", "1"], "--prompt-tokens is 1"),
        (here / "model.pt", target, ["--data", str(tmp_path / "none")], "--data"),
        (tmp_path / "alone" / "model.pt", target, [], "dict.txt"),
        (tmp_path / "none.pt", target, [], "none.pt"),
        (here / "stock.pt", target, [], "transformer_lm"),
        (here / "grows.pt", target, [], "grows"),
    ):
        with refused_in_one_line(tmp_path, said):
            main([str(checkpoint), str(place), *more])
