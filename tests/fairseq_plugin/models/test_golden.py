"""Checkpoints of earlier versions and the authors' released model load, and give the logits that they gave."""

from pathlib import Path

import pytest
import torch

from fairseq_plugin import FlowformerLanguageModel
from fairseq_plugin.convert import convert
from tests.compare import assert_close
from tests.fairseq_plugin.helpers import checkpoint_files as files
from tests.fairseq_plugin.helpers.language_models import SMALL
from tests.fairseq_plugin.helpers.released_model import released_forward, released_weights
from tests.fairseq_plugin.helpers.text import tokens
from tests.golden.make_fairseq import FOLDER, load, other_first_token, registered
from tests.processes import CHECKOUT, run_program


@pytest.mark.parametrize("pre_norm", [True, False], ids=["pre-norm", "post-norm"])
def test_the_released_model_is_read_converted_and_as_it_is(pre_norm: bool, data_bin: str, tmp_path: Path) -> None:
    """Logits are those of a transcription of the authors' code, in float32 and in float64."""
    symbols, sequence = len((Path(data_bin) / "dict.txt").read_text().splitlines()) + 4, tokens(2, 50)
    state = released_weights(symbols, 32, 64, 2, pre_norm=pre_norm)
    options = ["--share-decoder-input-output-embed", *(["--decoder-normalize-before"] if pre_norm else [])]
    for kind in files.KINDS:
        path = files.save(tmp_path / f"{kind}.pt", state, kind, "transformer_lm", *SMALL, *options)
        torch.save(convert(path, "flowformer_lm", {})[0], tmp_path / f"{kind}_converted.pt")
    for file in ("cfg.pt", "args.pt", "cfg_converted.pt", "args_converted.pt"):
        (model,) = FlowformerLanguageModel.from_pretrained(str(tmp_path), file, data_bin).eval().models
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
            exact = {name: x.to(dtype) for name, x in state.items()}
            expected = released_forward(sequence, exact, 4, 2, pre_norm)
            with torch.no_grad():
                assert_close("logits", model.to(dtype)(sequence)[0], expected, tolerance)
    changed = sequence.clone()
    changed[:, 0] = 4 + (sequence[:, 0] - 3) % 50
    other = released_forward(changed, exact, 4, 2, pre_norm)
    assert (other - expected)[:, -1].norm() > 1e-3 * expected[:, -1].norm(), "the transcription attends"


def test_every_architecture_has_a_golden_file() -> None:
    """Fails for a new model without a file; ``python -m tests.golden.make_fairseq ARCHITECTURE`` makes it."""
    assert {path.stem for path in FOLDER.glob("*.pt")} == set(registered())


@pytest.mark.parametrize("arch", registered())
@torch.no_grad()
def test_a_golden_file_keeps_its_logits(arch: str, tmp_path: Path) -> None:
    """Also with options that a later version has not, and without those that it has; it names no place."""
    state = torch.load(FOLDER / f"{arch}.pt", weights_only=True)
    golden, path = state["golden"], FOLDER / f"{arch}.pt"
    model = load(arch)
    assert_close("logits", model(golden["tokens"])[0], golden["logits"])
    difference = model(other_first_token(golden["tokens"]))[0] - golden["logits"]
    assert difference[:, 1:].norm() > 5e-3 * golden["logits"].norm(), "attention shows in the logits"
    assert path.stat().st_size < 40_000 and str(CHECKOUT).encode() not in path.read_bytes()
    options = state["cfg"]["model"] if isinstance(state["cfg"]["model"], dict) else vars(state["cfg"]["model"])
    for name in ("daft_no_query", "flash_kernel", "flash_norm", "flow_form", "flow_clamp", "lineartime_post_norm"):
        options.pop(name, None)
    options["flow_unheard_of"] = options["unheard_of"] = 3
    torch.save(state, tmp_path / f"{arch}.pt")
    assert_close("logits", load(arch, tmp_path)(golden["tokens"])[0], golden["logits"])
    if arch == "daft_conv_lm_enwik8":  # whose name meant 8 heads when its file was made
        assert model.decoder.layers[0].self_attn.inner.shape.num_heads == 8


def test_a_new_process_loads_them(tmp_path: Path) -> None:
    """From another folder, with only the plugin imported, and tensors that were on a GPU."""
    state = torch.load(FOLDER / "flowformer_lm.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
        torch.save(state, tmp_path / "c.pt")
    script = f"""import sys; sys.path.insert(0, {str(CHECKOUT)!r}); import torch, fairseq_plugin
hub = fairseq_plugin.FlowformerLanguageModel.from_pretrained({str(tmp_path)!r}, "c.pt", {str(FOLDER)!r})
golden = torch.load({str(FOLDER / "flowformer_lm.pt")!r})["golden"]
print("EQUAL", torch.allclose(hub.models[0](golden["tokens"])[0], golden["logits"], atol=1e-4))"""
    assert "EQUAL True" in run_program(["-c", script], cwd=str(tmp_path))
    assert b"cuda:7" in (tmp_path / "c.pt").read_bytes()
