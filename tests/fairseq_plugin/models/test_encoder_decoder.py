"""Attention of a decoder to its source: beam search, the state that beams share, refusals."""

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator

from fairseq_plugin.models._encoder_decoder import SOURCE_ATTENTIONS
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.kinds import build, call, kind_of, shown
from tests.fairseq_plugin.helpers.text import dictionary, tokens

CROSS, KIND = "--lineartime-cross-attention", kind_of("flow")


@pytest.mark.parametrize("arch", ["flowformer", "s2t_flowformer"])
@pytest.mark.parametrize("cross", ["linear", "cosformer"])
@torch.no_grad()
def test_beam_search_gives_what_scores_of_whole_targets_say(arch: str, cross: str) -> None:
    """The scores of each hypothesis are those of a forward pass over it."""
    kind, model = (
        kind_of(arch),
        shown(arch, CROSS, cross, *(["--lineartime-mask-padding"] if "s2t" in arch else [])).float(),
    )
    batch = {name: x.float() if x.is_floating_point() else x for name, x in kind.rows(2, 9).items()}
    sample = {"net_input": {name: batch[name] for name in ("src_tokens", "src_lengths")}}
    generator = SequenceGenerator([model], dictionary(), beam_size=3, max_len_b=8, normalize_scores=False)
    for row, hypotheses in enumerate(generator.generate([model], sample)):
        assert len(hypotheses) == 3
        for hypothesis in hypotheses:
            out = hypothesis["tokens"]
            previous = torch.cat([out[-1:], out[:-1]])[None]  # fairseq's targets begin with eos
            alone = model(*(x[row : row + 1] for x in sample["net_input"].values()), previous)
            scores = model.get_normalized_probs(alone, log_probs=True)[0].gather(1, out[:, None])[:, 0]
            assert_close("scores", hypothesis["positional_scores"], scores, 1e-4)


@pytest.mark.parametrize("name", SOURCE_ATTENTIONS)
@torch.no_grad()
def test_the_state_of_a_source_is_shared_by_its_beams_and_has_one_size(name: str) -> None:
    model, sizes = build("flowformer", CROSS, name).eval(), []
    for length in (5, 40):
        encoded = model.encoder(tokens(2, length), torch.full((2,), length))
        encoded, state = model.encoder.reorder_encoder_out(encoded, torch.arange(2).repeat_interleave(4)), {}
        model.decoder(tokens(8, 1), encoded, state)
        kept = model.encoder.reorder_encoder_out(encoded, torch.tensor([3, 0, 0, 1, 4, 5, 7, 7]))
        cross = model.decoder.layers[0].encoder_attn._get_input_buffer(state)
        assert kept is encoded and all(len(x) == 2 for x in cross.values())
        sizes.append({key: x.shape for key, x in cross.items()})
    assert sizes[0] == sizes[1]


def test_what_an_attention_to_the_source_refuses() -> None:
    build("flowformer").make_generation_fast_(need_attn=True)
    with pytest.raises(ValueError, match="--print-alignment is given"):
        build("flowformer", CROSS, "linear").make_generation_fast_(need_attn=True)
    with pytest.raises(ValueError, match="--max-source-positions"):
        call(build("flowformer", CROSS, "cosformer"), KIND, KIND.rows(1, 97))
