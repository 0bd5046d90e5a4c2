"""The mixed chunk module: a Transformer's heads inside chunks, scaled copies of them between chunks."""

from common.attention import build_attention


def test_parameters_start_as_in_the_gated_attention_unit():
    module = build_attention("mixed_chunk", num_heads=64, head_dim=64)
    assert {name: tuple(x.shape) for name, x in module.named_parameters()} == {
        "gamma": (2, 64, 64),
        "beta": (2, 64, 64),
    }
    assert (module.beta == 0).all() and abs(module.gamma.std() - 0.02) < 1e-3 and abs(module.gamma.mean()) < 1e-3
    assert (module.options.chunk_size, module.options.kernel, module.options.rotary) == (256, "softmax", True)
