"""BigBird: which tokens see each other, the random chunks, and comparison with transformers' module."""

import copy

import pytest
import torch
from torch.nn import functional as F

from common.attention import build_attention
from common.ops import bigbird_attention
from common.ops.bigbird import draw_numbers
from common.ops.bigbird.random_chunks import choose_chunks
from tests.common.inputs import qkv
from tests.common.properties import largest_tensor
from tests.compare import assert_close, gradients


def numbers(random_chunks: int):
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return draw_numbers(random_chunks)


def chunks_seen(token: int, n: int, random_chunks: int) -> list[int]:
    """The chunks of four tokens that the output of ``token`` depends on."""
    q, k, v = qkv(n, batch=1)
    out = bigbird_attention(q, k, v, numbers(random_chunks), chunk_size=4)
    reached = gradients(out[:, :, token], [v])[0].abs().sum((0, 1, 3)).nonzero().flatten()
    return sorted({token // 4 for token in reached.tolist()})


def test_neighbours_and_ends_are_seen_and_ends_see_all():
    assert chunks_seen(25, 50, 0) == [0, 5, 6, 7, 12]
    assert chunks_seen(5, 50, 0) == [0, 1, 2, 12]
    assert chunks_seen(3, 50, 0) == chunks_seen(49, 50, 0) == list(range(13))


def test_random_chunks_are_more_of_them():
    seen = chunks_seen(25, 50, 2)
    assert len(seen) == 7 and set(chunks_seen(25, 50, 0)) < set(seen)
    assert chunks_seen(25, 50, 20) == list(range(13)), "more than there are is all"


def test_random_chunks_are_different_real_and_not_seen_anyway():
    last = torch.tensor([[0], [1], [6], [40]])
    chosen, valid = choose_chunks(numbers(3), 50, last)
    for row, end in enumerate(last.flatten().tolist()):
        for chunk in range(end + 1):
            left = set(range(1, end)) - {chunk - 1, chunk, chunk + 1}
            indices = chosen[row, chunk][valid[row, chunk]].tolist()
            assert len(indices) == len(set(indices)) == min(3, len(left)) and set(indices) <= left


def test_random_chunks_are_as_likely_as_each_other():
    chosen, _ = choose_chunks(numbers(3), 1000, torch.tensor([[999]]))
    counts = torch.bincount(chosen.flatten() // 100)
    assert counts.sum() == 3000 and (counts > 240).all() and (counts < 360).all()


def test_few_chunks_are_softmax_attention():
    q, k, v = qkv(19)
    out = bigbird_attention(q, k, v, numbers(3), chunk_size=4)
    assert_close("out", out, F.scaled_dot_product_attention(q, k, v))


def test_each_module_has_random_chunks_of_its_own_and_keeps_them():
    sizes = {"chunk_size": 2, "random_chunks": 2}
    first, second = build_attention("bigbird", **sizes), build_attention("bigbird", **sizes)
    inputs = qkv(40)
    out = first(*inputs)
    assert not torch.equal(second(*inputs), out) and torch.equal(first.train()(*inputs), out)
    assert torch.equal(first.half()(*inputs), out), "numbers are integers, which no dtype rounds"
    second.load_state_dict({name: x.half() for name, x in first.state_dict().items()})
    assert torch.equal(second(*inputs), out), "a state dict remembers them whatever is done to it"
    assert torch.equal(copy.deepcopy(second)(*inputs), out)


def test_files_of_version_0_2_held_the_numbers():
    """Loading accepts and keeps these numbers."""
    sizes = {"chunk_size": 2, "random_chunks": 2}
    first, inputs = build_attention("bigbird", **sizes), qkv(40)
    with pytest.warns(UserWarning, match="do not say"):
        first.load_state_dict({"numbers": draw_numbers(2)})
    second = build_attention("bigbird", **sizes)
    averaged = {name: x.clone().mul_(0.9999).add_(x, alpha=1 - 0.9999) for name, x in first.state_dict().items()}
    second.load_state_dict(averaged)
    assert torch.equal(second(*inputs), first(*inputs))
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="numbers"):
        second.load_state_dict({"numbers": draw_numbers(3)})


@torch.no_grad()
def test_memory_is_that_of_the_chunks_that_are_seen():
    q, k, v = (x.detach() for x in qkv(800, batch=1))
    for chunk_size in (16, 32):
        largest = largest_tensor(lambda c=chunk_size: bigbird_attention(q, k, v, numbers(3), chunk_size=c))
        assert largest <= q.shape[1] * 800 * 8 * chunk_size


def test_it_is_transformers_big_bird_with_the_same_random_chunks():
    """In evaluation, transformers uses the first chunk for each random one, and so counts its keys repeatedly."""
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.big_bird.modeling_big_bird")
    heads, channels, n, size = 2, 4, 48, 4
    sizes = {"hidden_size": heads * channels, "num_attention_heads": heads, "block_size": size}
    config = transformers.BigBirdConfig(**sizes, num_random_blocks=2)
    layer = modeling.BigBirdBlockSparseAttention(config).double().eval()
    chosen, _ = choose_chunks(numbers(2), n // size, torch.tensor([[n // size - 1]]))
    layer._bigbird_block_rand_mask_with_head = lambda **_: [chosen[0, 1:-1].numpy()] * heads
    x = torch.randn(2, n, heads * channels, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    real = torch.ones(2, n, dtype=torch.float64)
    blocked, band, rows, columns = modeling.BigBirdModel.create_masks_for_block_sparse_attn(real, size)
    masks = {"band_mask": band, "from_mask": rows, "to_mask": columns}
    expected = layer(x, **masks, from_blocked_mask=blocked, to_blocked_mask=blocked)[0]
    names = ("query", "key", "value")
    q, k, v = (getattr(layer, name)(x).unflatten(-1, (heads, channels)).transpose(1, 2) for name in names)
    out = bigbird_attention(q, k, v, numbers(2), chunk_size=size).transpose(1, 2).flatten(2)
    assert_close("out", out, expected, 1e-5)
