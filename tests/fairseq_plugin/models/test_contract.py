"""The contract of every model of the plugin, over fairseq's registry; a new mechanism needs no line here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.data.data_utils import collate_tokens
from torch import Tensor, nn
from torch.nn import functional as F

from common.attention import ATTENTIONS, InnerAttention, supporting
from common.modules.gated_attention_unit import GatedAttentionUnit
from fairseq_plugin.models._encoder_decoder import SOURCE_ATTENTIONS
from tests.compare import assert_close, weights
from tests.fairseq_plugin.helpers.kinds import (
    KINDS,
    LIMIT,
    OURS,
    WITHOUT_ATTENTION,
    build,
    call,
    ending_of,
    flags_of,
    kind_of,
    load,
    models,
    noise,
    randomised,
    save,
    shown,
)
from tests.fairseq_plugin.helpers.text import PAD, padded, tokens

LENGTH = 27  # odd; three chunks of 8 and a remainder
#: Audio and speech have one encoder for all mechanisms: some of them represent the others, since each takes seconds.
SOME = ("flow_", "local_", "daft_full_", "mixed_chunk_", "s2t_flow", "s2t_conformer_linear", "s2t_softmax")
AUDIO = ("_wav2vec2", "_hubert", "_data2vec_audio")
ONE_TEXT = ("_lm", "_mlm", "_classifier")
TESTED = [x for x in OURS if ending_of(x) not in (*AUDIO[1:], "s2t_") or x.startswith(SOME)]
every_model = pytest.mark.parametrize("name", TESTED)
DECISIONS = [x for x in models("_decision") if x not in WITHOUT_ATTENTION]
CAUSAL = [*models("_lm"), "linear_lm --decoder-learned-pos", "flow_lm --checkpoint-activations"]
#: Encoder-decoders: every mechanism, then every attention to the source, and self-attention to source and target.
#: The fewer positions there may be, the more each of them counts in cosFormer.
FEW = "--max-source-positions 28 --max-target-positions 28"
TEXTS = models("") + [f"flow --lineartime-cross-attention {x} {FEW}" for x in SOURCE_ATTENTIONS]
TEXTS += [f"{x} --cross-self-attention --no-cross-attention" for x in ("flow", "linear", "softmax", "local")]
TEXTS += ["linear --lineartime-cross-attention linear --encoder-embed-dim 24 --encoder-attention-heads 3"]


@pytest.fixture(autouse=True)
def plain_pytorch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels for CPUs, which take seconds to compile, except where language models learn and decode."""
    name = request.node.callspec.params.get("name", "") if hasattr(request.node, "callspec") else ""
    if not (name.endswith("_lm") and request.node.originalname.startswith(("test_it_learns", "test_decoding"))):
        monkeypatch.setenv("LINEARTIME_CPU_KERNELS", "0")


def leaks(name: str) -> tuple[str, ...]:
    """The option without which fairseq's convolutions mix padding into real frames."""
    return ("--lineartime-mask-padding",) if "--lineartime-mask-padding" in flags_of(name) else ()


def test_every_mechanism_has_its_models() -> None:
    """One of each kind per mechanism that suits it, and no other."""
    for ending, kind in KINDS.items():
        found = {x.removesuffix(ending).removeprefix("s2t_").removeprefix("conformer_") for x in models(ending)}
        assert found & ATTENTIONS.keys() == set(supporting("causal" if kind.causal else "bidirectional")), ending
        assert found >= {"flowformer", *({"hybrid"} if kind.stock else ())}


@every_model
@torch.no_grad()
def test_padding_and_neighbours_never_change_a_token(name: str) -> None:
    """Padding of any content on either side, and rows of other lengths; a row of only padding is finite."""
    kind, model = kind_of(name), shown(name, *leaks(name))
    batch = kind.rows(2, LENGTH)
    alone = call(model, kind, batch)
    for left, right in ((0, 7), (5, 0), (3, 2)):
        beside = call(model, kind, kind.pad(batch, left, right))
        left = 0 if ending_of(name) in (*AUDIO, "s2t_") else left
        beside = (beside[:, left : left + alone.shape[1]] if kind.places else beside)[: len(alone)]
        assert_close(f"outputs with {left} and {right} of padding", beside, alone, 1e-5)
    first = {key: x[:1] if isinstance(x, Tensor) else x for key, x in batch.items()}
    assert_close("a row by itself", call(model, kind, first), alone[:1], 1e-5)
    if ending_of(name) in ONE_TEXT:
        sequence = batch["src_tokens"]
        rows = [padded(sequence[:1, :6], LENGTH - 6, 0), padded(sequence[:1, :1], 0, LENGTH - 1)]
        together = call(model, kind, {"src_tokens": torch.cat([sequence, *rows, torch.full((1, LENGTH), PAD)])})
        assert torch.isfinite(together).all()
        for label, found, real in (("short", together[2, -6:], 6), ("of one token", together[3, :1], 1)):
            assert_close(f"a row {label}", found, call(model, kind, {"src_tokens": sequence[:1, :real]})[0], 1e-5)


@pytest.mark.parametrize("name", models("_mlm", "_classifier"))
def test_every_token_sees_every_token(name: str) -> None:
    """First, middle and last token see every third of the sequence; relu² has zeros, so not every token."""
    model, embedded = shown(name), []
    model.encoder.sentence_encoder.embed_tokens.register_forward_hook(lambda *given: embedded.append(given[-1]))
    out = model(tokens(1, LIMIT - 2))[0][0]
    for seeing in (0, LIMIT // 2, -1):
        (gradient,) = torch.autograd.grad(out[seeing].square().sum(), embedded, retain_graph=True)
        assert all(third.any() for third in (gradient[0] != 0).any(dim=-1).chunk(3)), f"token {seeing}"


def unequal() -> Tensor:
    """Three rows, two of which begin with padding."""
    sequence = tokens(3, LENGTH)
    sequence[1, :13], sequence[2, :3] = PAD, PAD
    return sequence


@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_decoding_is_the_full_forward(name: str) -> None:
    """Parts of any size and fairseq's single steps, after each other and with reordered beams; no later token counts.

    Positions count the real tokens of each row.
    """
    model, sequence = shown(*name.split()).float(), unequal()
    whole, real = model(sequence)[0], sequence.ne(PAD)
    assert_close("a prefix", model(sequence[:, :20])[0][real[:, :20]], whole[:, :20][real[:, :20]], 2e-5)
    read: dict[str, Any] = {}
    parts = [model.decoder.extend_features(x, read)[0] for x in sequence[:, :20].split([1, 7, 9, 3], dim=1)]
    parts = model.decoder.output_layer(torch.cat(parts, dim=1))
    assert_close("parts", parts[real[:, :20]], whole[:, :20][real[:, :20]], 2e-5)
    stepped: dict[str, Any] = {}
    for end in range(1, 21):
        step = model.decoder(sequence[:, :end], incremental_state=stepped)[0][:, -1]
        assert_close(f"step {end}", step[real[:, end - 1]], whole[:, end - 1][real[:, end - 1]], 2e-5)
    order = torch.tensor([2, 0, 0, 1])
    sequence, whole = sequence[order], whole[order]
    for label, state in {"parts": read, "steps": stepped}.items():
        model.decoder.reorder_incremental_state_scripting(state, order)
        for end in range(21, LENGTH + 1):
            step = model.decoder(sequence[:, :end], incremental_state=state)[0][:, -1]
            assert_close(f"step {end} after reordered {label}", step, whole[:, end - 1], 2e-5)


@pytest.mark.parametrize("name", TEXTS)
@torch.no_grad()
def test_translations_are_decoded_as_the_full_forward(name: str) -> None:
    """A target sees the source and its own past alone; padding, other rows, reordering and beams change nothing."""
    kind, model = kind_of(name.split()[0]), shown(*name.split())
    lines, target = [tokens(1, length, seed=length)[0] for length in (4, 13, 8)], tokens(3, 9, seed=1)
    source = collate_tokens(lines, PAD, left_pad=True)

    def forward(source: Tensor, target: Tensor) -> Tensor:
        lengths = source.ne(PAD).sum(1)
        return call(model, kind, {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": target})

    whole = forward(source, target)
    assert_close("right padding", forward(collate_tokens(lines, PAD), target), whole, 1e-6)
    for row, line in enumerate(lines):
        assert_close("a row by itself", forward(line[None], target[row : row + 1])[0], whole[row], 1e-6)
    assert not torch.allclose(forward(tokens(3, 13, seed=5), target), whole, atol=1e-3)
    later = torch.cat([target[:, :5], tokens(3, 4, seed=3)], dim=1)
    assert_close("a prefix", forward(source, later)[:, :5], whole[:, :5], 1e-6)
    assert_close("a padded target", forward(source, padded(target, 4, 0))[:, 4:], whole, 1e-6)

    def steps(rows: Tensor, state: dict[str, Any], first: int, last: int) -> Tensor:
        return torch.stack([model.decoder(rows[:, :end], encoded, state)[0][:, -1] for end in range(first, last)], 1)

    encoded, state = model.encoder(source, source.ne(PAD).sum(1)), {}
    assert_close("steps", steps(target, state, 1, 6), whole[:, :5], 1e-6)
    if " " in name:  # fairseq's own attention to the source keeps its keys if the number of rows is unchanged
        order = torch.tensor([2, 2, 0])  # beam search does not mix sources, but may
        encoded = model.encoder.reorder_encoder_out(encoded, order)
        model.decoder.reorder_incremental_state_scripting(state, order)
        assert_close("after a reordering", steps(target[order], state, 6, 10), whole[order, 5:], 1e-6)
    alone = model.encoder(source, source.ne(PAD).sum(1))
    encoded = model.encoder.reorder_encoder_out(alone, torch.arange(3).repeat_interleave(2))
    rows, expected = (x.repeat_interleave(2, 0) for x in (target, whole))
    assert_close("two beams", steps(rows, {}, 1, 5), expected[:, :4], 1e-6)
    encoded = model.encoder.reorder_encoder_out(encoded, torch.arange(2, 6))  # the first source is translated
    assert_close("without the first source", steps(rows[2:], {}, 1, 5), expected[2:, :4], 1e-6)
    encoded = alone
    assert_close("one beam after two", steps(target, {}, 1, 5), whole[:, :4], 1e-6)


@pytest.mark.parametrize("name", DECISIONS)
@torch.no_grad()
def test_actions_are_decoded_as_the_full_forward(name: str) -> None:
    """An action depends on what was before it; steps one by one give the same, from a state of constant size."""
    kind, model = kind_of(name), shown(name)
    batch = kind.rows(2, 12)
    whole, state, sizes = call(model, kind, batch), {}, []
    later = {key: x.clone() for key, x in batch.items()}
    later["actions"][:, 4:] += 1.0
    later["states"][:, 5:] += 1.0
    later["returns"][:, 5:] += 1.0
    assert_close("the same past", call(model, kind, later)[:, :5], whole[:, :5], 1e-5)
    for key in ("returns", "states", "actions"):
        earlier = {**batch, key: batch[key].clone()}
        earlier[key][:, 3] += 1.0
        assert (call(model, kind, earlier)[:, 4] - whole[:, 4]).norm() > 1e-7, key
    for step in range(12):
        now = (batch[key][:, step] for key in ("returns", "states", "timesteps"))
        action = model.extend(state, *now, batch["actions"][:, step - 1] if step else None)
        assert_close(f"step {step}", action, whole[:, step], 1e-5)
        sizes.append(sum(x.numel() for entries in state.values() for x in entries.values() if x is not None))
    if not any(module.state_tokens() != 0 for module in model.modules() if isinstance(module, InnerAttention)):
        assert len(set(sizes[6:])) == 1


@every_model
def test_every_parameter_learns_also_with_checkpointed_activations(name: str) -> None:
    """Gradients are finite beside padding, not 0, and equal; checkpointing runs each layer twice."""
    kind, results = kind_of(name), []
    flag = "--checkpoint-activations"
    for arguments in ((), *([(flag,)] if flag in flags_of(name) and name not in WITHOUT_ATTENTION else [])):
        model, calls = shown(name, *arguments).train(), []
        for module in model.modules():
            if isinstance(module, InnerAttention | GatedAttentionUnit):
                module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        batch = kind.pad(kind.rows(2, LENGTH), 0, 2)
        if ending_of(name) in ONE_TEXT:
            batch = {"src_tokens": torch.cat([batch["src_tokens"], torch.full((1, LENGTH + 2), PAD)])}
        out = call(model, kind, batch)
        out = out[:, :LENGTH] if kind.places else out
        (out * noise(*out.shape)).sum().backward()
        results.append((len(calls), {k: p.grad for k, p in model.named_parameters() if p.requires_grad}))
    assert len(results) == 1 or results[1][0] == 2 * results[0][0]
    idle = [key for key, x in results[0][1].items() if x is None or not x.any()]
    assert not idle or name == "awac_decision" or ending_of(name) in (*AUDIO, "_classifier"), idle  # other heads
    reached = {key: x for key, x in results[0][1].items() if x is not None}
    assert all(torch.isfinite(x).all() for x in reached.values())
    for _, found in results[1:]:
        for key, expected in reached.items():
            assert_close(key, found[key], expected, 1e-6, floor=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "autocast"])
@pytest.mark.parametrize("name", [*TESTED, *(x for x in TEXTS if "--" in x)])
@torch.no_grad()
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """fairseq's --fp16, which casts the model, and autocast: outputs near those of float32."""
    kind, model = kind_of(name.split()[0]), shown(*name.split()).float()
    for parameter in model.parameters():
        parameter.mul_(0.5)
    batch = {
        key: x.clamp(-2, 2) if isinstance(x, Tensor) and x.is_floating_point() else x
        for key, x in kind.rows(2, LENGTH).items()
    }
    expected = call(model, kind, batch)
    if dtype == torch.float16:
        actual = call(model.half(), kind, batch)
        assert actual.dtype == dtype
    else:
        with torch.autocast("cpu", dtype=dtype):
            actual = call(model, kind, batch)
    assert_close("outputs", actual.float(), expected, 0.1 if dtype == torch.bfloat16 else 2e-2, floor=1.0)


#: fairseq stores the options of all models alike, which takes a third of a second.
STORED = ("flow", "flash", "daft_conv", "hybrid", "combiner", "rfa", "lolcats")


@pytest.mark.parametrize("name", models(*ONE_TEXT))
def test_it_learns_is_stored_and_comes_back(name: str, tmp_path: Path) -> None:
    """The loss falls within a few updates; fairseq loads the checkpoint with equal outputs."""
    kind, model, sequence = kind_of(name), build(name).train(), tokens(8, LENGTH)
    assert not next(x for x in model.modules() if isinstance(x, nn.Embedding)).weight[PAD].any(), "padding is 0"
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(15):
        if ending_of(name) == "_classifier":
            scores, targets = model(sequence, features_only=True, classification_head_name="toy")[0], sequence[:, 0] % 3
        else:
            targets = sequence[:, 1:] if kind.causal else sequence[:, :-1]
            scores, targets = model(sequence)[0][:, :-1].flatten(0, 1), targets.flatten()
        loss = F.cross_entropy(scores, targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert min(losses[-3:]) < 0.9 * losses[0]
    again = build(name, seed=2).eval()
    again.load_state_dict(model.state_dict())
    if name.startswith(STORED):
        save(tmp_path / "model.pt", name, model.state_dict())
        again = load(tmp_path / "model.pt", name)
        assert type(again) is type(model)
    assert_close("outputs", again(sequence)[0], model.eval()(sequence)[0])


#: fairseq's model, ours with softmax attention, options of both, and those that ours needs to be it.
ROBERTA = "--encoder-learned-pos --layernorm-embedding --lineartime-post-norm"
ENCODERS = ("--layer-norm-first", "--layer-type conformer", "--pos-conv-depth 2", "--conv-pos-batch-norm")
STOCK = [
    ("transformer_lm", "softmax_lm", "", "--lineartime-post-norm"),
    ("transformer_lm", "softmax_lm", "--decoder-normalize-before --scale-heads", ""),
    ("roberta", "softmax_mlm", "", ROBERTA),
    ("transformer", "softmax", "", ""),
    ("transformer", "softmax", "--cross-self-attention --no-cross-attention", ""),
    *[
        (kind, f"softmax_{kind}", layers, "")
        for kind in ("wav2vec2", "hubert", "data2vec_audio")
        for layers in ("", *(x for x in ENCODERS if x.split()[0] in flags_of(kind)))
    ],
    ("s2t_transformer", "s2t_softmax", "", ""),
    ("s2t_conformer", "s2t_conformer_softmax", "", ""),
]


@pytest.mark.parametrize(("stock", "ours", "both", "own"), STOCK)
@torch.no_grad()
def test_softmax_is_the_stock_model(stock: str, ours: str, both: str, own: str) -> None:
    """With the same parameter names and weights, the same outputs, also of a padded batch."""
    kind, theirs = kind_of(ours), randomised(build(stock, *both.split())).eval()
    model = build(ours, *both.split(), *own.split()).eval()
    model.load_state_dict(theirs.state_dict())
    assert weights(model.state_dict()).keys() >= theirs.state_dict().keys() - {"decoder.version"}
    # A conformer's convolution mixes what attention gives at padding, which is 0 here, into real frames.
    batch = kind.rows(2, LENGTH)
    for beside in (batch,) if "conformer" in f"{stock}{both}" else (batch, kind.pad(batch, 0, 4)):
        actual, expected = (call(x, kind, beside) for x in (model, theirs))
        assert_close("outputs", *(x[:, :LENGTH] if kind.places else x for x in (actual, expected)), 1e-5)
