"""Named sizes are the papers', and first weights are those of the papers' code."""

import pytest
import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from torch import nn

from fairseq_plugin.models.language_model_sizes import SIZES as OF_CORPUS
from fairseq_plugin.models.long_range_arena import OFFICIAL, RELEASED
from recipes.models import model_options
from tests.fairseq_plugin.helpers.kinds import CHANNELS, LIMIT, build, command, flags_of, models

#: Architecture, options, millions of parameters with 32,000 words, layers, width, heads: Tables 8 and 9 of FLASH; of
#: masked models without RoBERTa's head. Then other tables with 256 symbols, and their parameters.
PAPERS = """
flash_lm_base - 112 24 768 1
flash_lm_large - 496 72 1024 1
flash_quad_lm_base - 112 24 768 1
flash_quad_lm_large - 496 72 1024 1
transformer_plus_lm_base - 110 12 768 12
transformer_plus_lm_large - 486 36 1024 16
transformer_pp_lm_base - 110 12 768 12
transformer_pp_lm_large - 486 36 1024 16
mc_transformer_pp_lm_base - 110 12 768 12
mc_transformer_pp_lm_large - 486 36 1024 16
performer_lm_base - 110 12 768 12
performer_lm_large - 486 36 1024 16
combiner_lm_base - 124 12 768 12
combiner_lm_large - 562 36 1024 16
flash_quad_lm_w768 --flash-kernel softmax 105 22 768 1
flash_quad_lm_w768 --flash-no-gate --flash-separate-ffn 131 22 768 1
transformer_plus_lm_w768 --flash-attention-gate --decoder-ffn-embed-dim 2496 106 12 768 12
flash_quad_lm_w512 - 41 15 512 1
transformer_pp_lm_w1024 - 335 24 1024 16
flash_mlm_base - 112 24 768 1
flash_quad_mlm_large - 496 72 1024 1
transformer_pp_mlm_base - 110 12 768 12
combiner_mlm_large - 562 36 1024 16
transformer_plus_mlm_w768 - 110 12 768 12
""".strip().splitlines()


def count(model: nn.Module) -> int:
    head = getattr(getattr(model, "encoder", None), "lm_head", None)
    further = sum(x.numel() for name, x in head.named_parameters() if name != "weight") if head else 0
    return sum(x.numel() for x in model.parameters()) - further


@pytest.mark.parametrize("row", PAPERS)
def test_sizes_of_flash_are_the_papers(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters within 1 %; layers, width, heads, chunk and units; typed options win."""
    arch, *options, millions, layers, width, heads = row.split()
    for module in ("fairseq.models.roberta.model", "fairseq_plugin.models._encoder"):
        monkeypatch.setattr(f"{module}.init_bert_params", lambda module: None)  # which moves data that is not there
    arguments = [] if options == ["-"] else options
    with torch.device("meta"):
        model = build(arch, "--tokens-per-sample", "512", *arguments, sizes=False, words=32000 - 4)
    side = getattr(model, "decoder", None) or model.encoder.sentence_encoder
    layer = side.layers[0]
    assert abs(count(model) / 1e6 / int(millions) - 1) <= 0.012
    assert (len(side.layers), side.embed_tokens.embedding_dim) == (int(layers), int(width))
    chunk = {"base": 256, "large": 512}.get(arch.rpartition("_")[2])
    if hasattr(layer, "unit"):
        assert (layer.unit.heads, layer.unit.expanded_dim, layer.unit.query_dim) == (int(heads), 2 * int(width), 128)
        assert layer.unit.chunk_size == (None if "quad" in arch else chunk)
    else:
        assert layer.self_attn.num_heads == int(heads)
        sizes = layer.self_attn.inner.options.as_dict() if hasattr(layer.self_attn.inner, "options") else {}
        assert not chunk or sizes.get("row_length", sizes.get("chunk_size", chunk)) == chunk
    layers = "encoder_layers" if "_mlm" in arch else "decoder_layers"
    typed = model_options([*command(arch, sizes=False), f"--{layers.replace('_', '-')}", "2"])
    assert getattr(typed, layers) == 2


#: Architecture -> layers, width, heads, FFN, dropout. DAFT-full and DAFT-conv also have their biases and filters.
TABLES = {f"{name}_lm_wiki103": (6, 512, 8, 2048, 0.1) for name in (*OF_CORPUS["wiki103"], "flowformer")}
TABLES |= {f"{name}_lm_enwik8": (12, 512, 8, 2048, 0.1) for name in OF_CORPUS["enwik8"]}
TABLES |= {f"{name}_lm_cifar10": (12, 512, 4, 2048, 0.1) for name in OF_CORPUS["cifar10"]}
TABLES |= {"sparse_lm_cifar10": (128, 256, 2, 512, 0.25)}
TABLES |= {f"daft_full_lm_{corpus}": (12, 512, 1, 2048, 0.1) for corpus in ("enwik8", "cifar10")}
TABLES |= {f"daft_conv_lm_{corpus}": (12, 512, 512, 2048, 0.1) for corpus in ("enwik8", "cifar10")}
#: What the papers say of a mechanism.
OPTIONS = {
    "local_lm_cifar10": {"window": 256},
    "sparse_lm_cifar10": {"pattern": "strided", "stride": 96},
    "daft_full_lm_enwik8": {"bias_dim": 128},
    "daft_full_lm_cifar10": {"bias_dim": 256},
    "daft_conv_lm_enwik8": {"window": 64, "query": True, "reparameterize": True},
    "daft_conv_lm_cifar10": {"window": 256},
}


@pytest.mark.parametrize("arch", TABLES)
def test_sizes_of_the_other_papers(arch: str) -> None:
    """With 256 symbols; parameters are counted where attention adds none, and typed options win."""
    layers, width, heads, ffn, dropout = TABLES[arch]
    with torch.device("meta"):
        model = build(arch, "--tokens-per-sample", "512", sizes=False, words=252)
    decoder, first = model.decoder, model.decoder.layers[0]
    assert (len(decoder.layers), decoder.embed_dim, decoder.dropout_module.p) == (layers, width, dropout)
    assert (first.self_attn.num_heads, first.fc1.out_features, first.normalize_before) == (heads, ffn, True)
    shared = arch.endswith("wiki103")
    assert (decoder.output_projection.weight is decoder.embed_tokens.weight) == shared
    if not any(True for _ in first.self_attn.inner.parameters()) and not arch.startswith(("reformer", "rfa")):
        layer = 4 * (width * width + width) + 2 * width * ffn + ffn + width + 4 * width
        assert count(model) == layers * layer + 2 * width + 256 * width * (1 if shared else 2)
    found = first.self_attn.inner.options.as_dict()
    assert OPTIONS.get(arch, {}).items() <= found.items()
    typed = model_options([*command(arch, sizes=False), "--decoder-layers", "2", "--dropout", "0.3"])
    assert (typed.decoder_layers, typed.dropout) == (2, 0.3)


ARENA = {
    "softmax_lra_listops": (4, 8, 512, 512, 1024, 0.1, "first"),
    "flow_lra_text": (4, 4, 256, 256, 1024, 0.1, "first"),
    "linear_lra_retrieval": (4, 4, 128, 128, 512, 0.1, "first"),
    "daft_conv_lra_image": (1, 8, 128, 64, 128, 0.3, "first"),
    "mixed_chunk_lra_pathfinder": (4, 4, 32, 16, 32, 0.2, "mean"),
    "flowformer_lra_listops_released": (1, 2, 512, 512, 1024, 0.1, "first"),
    "flowformer_lra_text_released": (1, 4, 256, 256, 1024, 0.1, "first"),
    "flowformer_lra_retrieval_released": (4, 4, 128, 128, 512, 0.1, "first"),
    "flowformer_lra_image_released": (1, 4, 128, 64, 128, 0.3, "first"),
    "flowformer_lra_pathfinder_released": (1, 8, 256, 128, 256, 0.2, "mean"),
}


@pytest.mark.parametrize("arch", ARENA)
def test_sizes_of_the_arena(arch: str) -> None:
    names = ("layers", "attention_heads", "embed_dim", "attention_dim", "ffn_embed_dim")
    found = model_options(command(arch, sizes=False))
    sizes = [getattr(found, f"encoder_{x}") for x in names]
    assert (*sizes, found.dropout, getattr(found, "pooling", "first")) == ARENA[arch]
    assert (getattr(found, "flow_competition", "") == "softmax_heads") == arch.endswith("_released")
    assert model_options([*command(arch, sizes=False), "--encoder-layers", "2"]).encoder_layers == 2


def test_every_attention_has_every_task_of_the_arena() -> None:
    every = [x.removesuffix("_classifier") for x in models("_classifier") if "hybrid" not in x]
    names = {f"{x}_lra_{task}" for x in every for task in OFFICIAL}
    assert names | {f"flowformer_lra_{task}_released" for task in RELEASED} <= set(ARCH_MODEL_REGISTRY)


@pytest.mark.parametrize("task", ["text", "image"])
def test_gated_attention_units_of_the_arena_have_as_many_parameters(task: str) -> None:
    """At most a tenth more or less than the Arena's Transformer, without embeddings and norms."""
    models = (build(f"{name}_lra_{task}", sizes=False) for name in ("softmax", "flash"))
    layers = [x.encoder.sentence_encoder.layers.named_parameters() for x in models]
    sizes = [sum(x.numel() for name, x in part if x.dim() > 1 and "bias" not in name) for part in layers]
    assert 0.9 < sizes[1] / sizes[0] < 1.1


@pytest.mark.parametrize("size", ["", "_xs", "_s", "_sp", "_m", "_mp", "_l", "_lp"])
def test_named_sizes_of_speech_are_those_of_the_stock_model(size: str) -> None:
    names = (f"s2t_transformer{size}", f"s2t_flowformer{size}")
    stock, ours = (vars(model_options(["data", "--task", "speech_to_text", "--arch", name])) for name in names)
    assert {name: ours[name] for name in stock} == {**stock, "arch": names[1]}


def test_sizes_of_series_and_decisions() -> None:
    """The papers' numbers of parameters; Franceschi's ten blocks of 40 channels and one of 160."""
    first = 40 * (3 * 3 + 2) + 40 * (40 * 3 + 2) + 40 * 4  # a norm and a bias per channel, and the residual
    last = 160 * (40 * 3 + 2) + 160 * (160 * 3 + 2) + 160 * 41
    lstm = 4 * (3 + 512 + 2) * 512 + 4 * (512 + 512 + 2) * 512
    layer = 4 * (256 + 1) * 256 + (256 + 1) * 1024 + (1024 + 1) * 256 + 4 * 256
    for name, expected in (
        ("lstm_time_series", lstm + 3 * 513),
        ("tcn_time_series", first + 9 * 2 * 40 * (40 * 3 + 2) + last + 3 * 161),
        ("flowformer_decision", (LIMIT + 1 + CHANNELS + 2 + 3 + 2) * 256 + 3 * layer + 512 + 2 * 257),
    ):
        assert sum(x.numel() for x in build(name, sizes=False).parameters()) == expected, name
    model = build("flowformer_time_series", sizes=False)
    part = model.encoder.layers[0]
    assert (len(model.encoder.layers), part.fc1.out_features, part.self_attn.num_heads) == (2, 2048, 8)
    assert not part.normalize_before and part.self_attn.inner.options.clamp is None


OF_FLASH = ("flash", "transformer", "mc_", "performer", "combiner")


@pytest.mark.parametrize("name", [x for x in models("_mlm") if x.startswith(OF_FLASH)])
def test_masked_models_begin_as_the_paper_says(name: str) -> None:
    """Matrices, embeddings, scales and relative biases N(0, 0.02); biases 0, norms 1 or 1/√d."""
    model = build(name, "--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "256")
    for key, x in model.encoder.sentence_encoder.named_parameters():
        kind, value = key.split(".")[-1], x.detach()
        if "norm" in key or kind in ("beta", "scale") or (kind == "bias" and value.dim() == 1):
            expected = 64**-0.5 if kind == "scale" else float("norm" in key and kind == "weight")
            assert torch.equal(value, torch.full_like(value, expected)), key
        else:
            assert abs(value.mean()) < 0.01 and 0.015 < value.std() < 0.025, key


@pytest.mark.parametrize(
    ("name", "part", "std"),
    [
        ("flash_lm", "decoder.embed_tokens.weight", 0.02),
        ("transformer_pp_lm", "decoder.embed_tokens.weight", 512**-0.5),
        ("flow_lra_image", "embed_tokens.weight", 1.0),
        ("flow_lra_image", "embed_positions.weight", 0.02),
        ("flowformer_decision", "embed_timestep.weight", 1.0),
        ("flowformer_decision", "fc1.weight", 0.02),
    ],
)
def test_first_weights(name: str, part: str, std: float) -> None:
    flags = {"--decoder-embed-dim": "512", "--decoder-input-dim": "512", "--decoder-output-dim": "512"}
    words = [x for flag in flags if flag in flags_of(name) for x in (flag, flags[flag])]
    found = next(x for key, x in build(name, *words, words=400).named_parameters() if key.endswith(part))
    assert found.detach().std().item() == pytest.approx(std, rel=0.1)


@pytest.mark.parametrize("name", ["rfa_gate_decision", "linear_decision --linear-forget head"])
def test_gates_begin_as_their_mechanism_has_them(name: str) -> None:
    """GPT-2's bias of 0 would forget all but two tokens."""
    attention = build(*name.split()).layers[0].self_attn
    gate = next(module for key, module in attention.inner.named_modules() if key.endswith("gate_proj"))
    assert (gate.bias > 1).all() and attention.out_proj.bias.eq(0).all()
