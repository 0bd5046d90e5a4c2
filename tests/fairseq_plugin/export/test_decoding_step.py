"""One decoding step with the state as inputs and outputs: in Python, exported, in onnxruntime, for every mechanism."""

import json
from pathlib import Path

import numpy
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from fairseq_plugin.export.decoding_step import DecodingStep, export_program
from fairseq_plugin.export_step import main, metadata_of, prompt_path, write
from fairseq_plugin.modules.named_states import named_state, state_of
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.checkpoint_files import STOCK, save_model
from tests.fairseq_plugin.helpers.language_models import awake, build_model
from tests.fairseq_plugin.helpers.one_line import refused_in_one_line
from tests.fairseq_plugin.helpers.text import dictionary, tokens
from tests.torch_versions import needs_newer_than_2_6

TINY = (
    "--decoder-layers 1 --decoder-embed-dim 16 --decoder-input-dim 16 --decoder-output-dim 16 "
    "--decoder-ffn-embed-dim 32 --decoder-attention-heads 2"
).split()
#: Every architecture whose decoding state is constant, and the additions; chunks and windows that fill up.
CASES = {
    "flowformer_lm": (),
    "flowformer_lm, forget": ("--flow-forget", "head", "--flow-short-conv", "3"),
    "linear_lm": (),
    "linear_lm, forget": ("--linear-forget", "channel", "--linear-short-conv", "3"),
    "cosformer_lm": (),
    "favor_lm": ("--favor-features", "16"),
    "favor_lm, forget": ("--favor-features", "16", "--favor-forget", "head"),
    "rfa_lm": ("--rfa-features", "16"),
    "rfa_gate_lm": ("--rfa-gate-features", "16"),
    "flash_lm, forget": ("--flash-chunk-size", "16", "--flash-query-dim", "8", "--flash-forget", "head"),
    "flash_lm": ("--flash-chunk-size", "16", "--flash-query-dim", "8"),
    "mixed_chunk_lm": ("--mixed-chunk-chunk-size", "16"),
    "daft_conv_lm": ("--daft-window", "9"),
    "local_lm": ("--local-window", "9"),
    "longformer_lm": ("--longformer-window", "9", "--longformer-global-tokens", "2"),
    "retention_lm": (),
    "gla_lm": (),
    "gated_delta_lm": (),
    "t2r_lm": (),
    "hedgehog_lm": (),
    "reformer_lm": ("--reformer-chunk-size", "8", "--reformer-rounds", "2"),
}
#: Of these the state grows.
GROWING = ("softmax_lm", "quadratic_lm", "yoso_lm", "sparse_lm", "synthesizer_lm", "combiner_lm", "daft_full_lm")
#: One for each kind of operators: an export costs seconds. Of all others it was tried when this was written.
IN_ONNX = ("flowformer_lm", "linear_lm, forget", "flash_lm", "daft_conv_lm", "gated_delta_lm")
LENGTH = 1000
RESET = ("--lineartime-reset-at-eos",)
pytestmark = pytest.mark.usefixtures("plain_pytorch")


def model_of(case: str, *arguments: str) -> nn.Module:
    """A model of one layer for ``LENGTH`` tokens, with weights under which attention shows."""
    arch = case.partition(",")[0]
    sizes = [*TINY, *CASES.get(case, ()), "--max-target-positions", str(LENGTH), *arguments]
    return awake(build_model(arch, sizes=sizes)).eval()


def logits_of(model: nn.Module, sequence: Tensor) -> Tensor:
    """The whole forward pass: (B, n, V)."""
    with torch.no_grad():
        return model(sequence)[0]


def session_of(path: Path) -> onnxruntime.InferenceSession:
    """The graph at ``path``, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options)


def exported(model: nn.Module, path: Path, size: int = 1) -> onnxruntime.InferenceSession:
    """``model``'s step of ``size`` tokens, written to ``path`` and read by onnxruntime."""
    step = DecodingStep(model)
    described = metadata_of("a name", step, dictionary(), False, size)
    write(export_program(step, size), step, described, path, ".onnx")
    return session_of(path)


def start(session: onnxruntime.InferenceSession, rows: int = 1) -> dict[str, numpy.ndarray]:
    """The state before the first token, as the file describes it."""
    about = json.loads(session.get_modelmeta().custom_metadata_map["lineartime"])
    return {
        f"past.{one['name']}": numpy.full((rows, *one["shape"]), one["fill"], one["dtype"]) for one in about["state"]
    }


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
def test_a_thousand_tokens_in_onnxruntime(case: str, tmp_path: Path) -> None:
    """Two rows that begin as one, and change places now and then."""
    model = model_of(case)
    session = exported(model, tmp_path / "step.onnx")
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


@pytest.mark.parametrize("case, trained", [*((case, ()) for case in CASES), *((case, RESET) for case in IN_ONNX)])
def test_many_tokens_and_padding_in_python(case: str, trained: tuple[str, ...]) -> None:
    """Blocks with padding on both sides, of which each row has another share, read what single tokens read.

    Documents end inside of a block, at its last token, at the first after it, and twice in a row.
    """
    model = model_of(case, *trained)
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


@needs_newer_than_2_6
@pytest.mark.parametrize("case", ["flash_lm", "gated_delta_lm"])
def test_prompts_in_blocks(case: str, tmp_path: Path) -> None:
    """The second graph's logits and state are those of single tokens; running maxima, triangular systems."""
    model = model_of(case)
    session = exported(model, tmp_path / "prompt.onnx", 24)
    given, pad = tokens(3, 40), model.decoder.padding_idx
    state = start(session, 3)
    _, state = call(session, given[:, :24], [0, 1, 2], state)
    rest = torch.nn.functional.pad(given[:, 24:], (0, 8), value=pad)
    logits, state = call(session, rest, [2, 0, 1], {name: x[[1, 2, 0]] for name, x in state.items()})
    assert_close(case, logits, logits_of(model, given)[:, -1], tolerance=1e-5)


@needs_newer_than_2_6
def test_far_positions(tmp_path: Path) -> None:
    """Sinusoids are computed: there is no last position, and at the 100,000th they are fairseq's."""
    model = model_of("linear_lm")
    session = exported(model, tmp_path / "step.onnx")
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


@pytest.mark.parametrize("arch", GROWING)
def test_states_that_grow_are_refused(arch: str) -> None:
    with pytest.raises(ValueError, match="grows.*allowed"):
        DecodingStep(model_of(arch))


def test_the_model_stays_as_it_was() -> None:
    """The step has a copy: the model still trains, looks at its limits, and decodes as before."""
    model = model_of("cosformer_lm").train()
    step = DecodingStep(model)
    assert model.training and not step.training and step.max_tokens == LENGTH
    assert all(x.requires_grad for x in model.parameters())
    with pytest.raises(ValueError, match=str(LENGTH)):
        model.eval()(tokens(1, LENGTH + 1))
    for arguments, limit in ((("--decoder-learned-pos",), LENGTH), (("--no-token-positional-embeddings",), None)):
        assert DecodingStep(model_of("linear_lm", *arguments)).max_tokens == limit


@pytest.fixture
def checkpoint(tmp_path: Path, data_bin: str) -> Path:
    """The checkpoint of a small linear_lm, with the dictionary beside it."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_model(folder / "model.pt", "cfg", "linear_lm", "--decoder-layers", "1")
    (folder / "dict.txt").write_bytes((Path(data_bin) / "dict.txt").read_bytes())
    return folder / "model.pt"


@needs_newer_than_2_6
def test_the_command_writes_graphs_that_say_what_they_are(checkpoint: Path, tmp_path: Path, capsys) -> None:
    target = tmp_path / "step.onnx"
    main([str(checkpoint), str(target), "--prompt-tokens", "16"])
    shown = capsys.readouterr().out
    about = []
    for path, size in ((target, 1), (prompt_path(target), 16)):
        assert f"{path}: {path.stat().st_size:,} bytes" in shown
        session = session_of(path)
        about.append(json.loads(session.get_modelmeta().custom_metadata_map["lineartime"]))
        assert about[-1].pop("tokens_per_call") == size
        assert len(about[-1].pop("sha256")) == 64  # of this file alone
        assert session.get_inputs()[0].shape[1] == size
    assert about[0] == about[1]
    assert about[0]["architecture"] == "linear_lm" and about[0]["longest_sequence"] is None
    assert about[0]["symbols"][: about[0]["unk"] + 1] == ["<s>", "<pad>", "</s>", "<unk>"]
    assert len(about[0]["symbols"]) == session.get_outputs()[0].shape[1]
    assert str(Path.cwd()).encode() not in target.read_bytes()  # nothing of this machine
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["step.onnx", "step.prompt.onnx"]


def test_a_program_of_torch(checkpoint: Path, tmp_path: Path) -> None:
    main([str(checkpoint), str(tmp_path / "step.pt2")])
    files = {"lineartime.json": ""}
    program = torch.export.load(tmp_path / "step.pt2", extra_files=files).module()
    about = json.loads(files["lineartime.json"])
    past = [torch.full((1, *x["shape"]), x["fill"], dtype=getattr(torch, x["dtype"])) for x in about["state"]]
    logits, *present = program(torch.tensor([[about["begins_with"]]] * 3), torch.tensor([0, 0, 0]), *past)
    assert logits.shape == (3, len(about["symbols"])) and len(present) == len(past)
    assert torch.equal(logits[0], logits[2]) and int(present[0][0]) == 1


def test_what_cannot_be_exported_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    for folder in ("out", "alone"):
        (tmp_path / folder).mkdir()
    (tmp_path / "out" / "there.onnx").write_text("mine")
    save_model(tmp_path / "alone" / "model.pt", "cfg", "linear_lm")
    save_model(checkpoint.with_name("stock.pt"), "cfg", *STOCK)
    save_model(checkpoint.with_name("grows.pt"), "cfg", "softmax_lm")
    target = tmp_path / "out" / "step.onnx"
    for arguments, said in (
        ([checkpoint, tmp_path / "out" / "there.onnx"], "there already"),
        ([checkpoint, target.with_suffix(".txt")], ".pt2"),
        ([checkpoint, tmp_path / "none" / "step.onnx"], "folder"),
        ([checkpoint, target, "--prompt-tokens", "1"], "--prompt-tokens is 1"),
        ([checkpoint, target, "--data", tmp_path / "none"], "--data"),
        ([tmp_path / "alone" / "model.pt", target], "dict.txt"),
        ([tmp_path / "none.pt", target], "none.pt"),
        ([checkpoint.with_name("stock.pt"), target], "transformer_lm"),
        ([checkpoint.with_name("grows.pt"), target], "grows"),
    ):
        with refused_in_one_line(tmp_path, said):
            main([str(one) for one in arguments])
