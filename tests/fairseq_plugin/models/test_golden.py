"""Checkpoints of earlier versions and the authors' released model load, and give the logits that they gave."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fairseq_plugin import FlowformerLanguageModel
from fairseq_plugin.convert import convert
from recipes.bench.peers.released_attention import language_model as flow_attention
from tests.compare import assert_close
from tests.fairseq_plugin.helpers import checkpoint_files as files
from tests.fairseq_plugin.helpers.language_models import SMALL, build_model
from tests.fairseq_plugin.helpers.text import tokens
from tests.golden.make_fairseq import FOLDER, load, other_first_token, registered
from tests.processes import CHECKOUT


class Released(nn.Module):
    """The authors' attention with the projections of fairseq's, in the place of which they trained it."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.stock = stock

    def forward(self, query: Tensor, **_: object) -> tuple[Tensor, None]:
        """(T, B, C), causal."""
        stock, x = self.stock, query.transpose(0, 1)
        projected = (one(x).unflatten(-1, (stock.num_heads, -1)) for one in (stock.q_proj, stock.k_proj, stock.v_proj))
        out = flow_attention(*(one.transpose(1, 2) for one in projected)).transpose(1, 2).flatten(2)
        return stock.out_proj(out.transpose(0, 1)), None

    def _get_input_buffer(self, _: object) -> None:
        """What fairseq's layer asks for."""


@pytest.mark.parametrize("pre_norm", [True, False], ids=["pre-norm", "post-norm"])
@torch.no_grad()
def test_the_released_model_is_read_converted_and_as_it_is(pre_norm: bool, data_bin: str, tmp_path: Path) -> None:
    """Logits are those of fairseq's model with the authors' attention, in float32 and in float64."""
    symbols, sequence = len((Path(data_bin) / "dict.txt").read_text().splitlines()) + 4, tokens(2, 50)
    options = ["--share-decoder-input-output-embed", *(["--decoder-normalize-before"] if pre_norm else [])]
    authors = build_model("transformer_lm", *options, sizes=SMALL, words=symbols - 4).eval()
    for parameter in authors.parameters():
        parameter += 0.2 * torch.randn(parameter.shape)
    authors.decoder.embed_tokens.weight[1] = 0.0
    state = {name: x.clone() for name, x in authors.state_dict().items()}
    state |= {"decoder.version": torch.tensor([3.0]), "decoder.embed_positions._float_tensor": torch.zeros(1)}
    for layer in authors.decoder.layers:
        layer.self_attn = Released(layer.self_attn)
    for kind in files.KINDS:
        path = files.save(tmp_path / f"{kind}.pt", state, kind, "transformer_lm", *SMALL, *options)
        torch.save(convert(path, "flowformer_lm", {})[0], tmp_path / f"{kind}_converted.pt")
    changed = sequence.clone()
    changed[:, 0] = 4 + (sequence[:, 0] - 3) % 50
    for file in ("cfg.pt", "args.pt", "cfg_converted.pt", "args_converted.pt"):
        (model,) = FlowformerLanguageModel.from_pretrained(str(tmp_path), file, data_bin).eval().models
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
            expected, other = (authors.to(dtype)(x)[0] for x in (sequence, changed))
            assert_close("logits", model.to(dtype)(sequence)[0], expected, tolerance)
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
