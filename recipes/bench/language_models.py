"""Language models and wav2vec 2.0: training steps, decoding steps at far positions, and generation after a prompt."""

from argparse import Namespace
from collections.abc import Sequence
from functools import partial

import torch
from fairseq.tasks.language_modeling import LanguageModelingTask
from torch import Tensor, nn

from common.attention import ATTENTIONS
from fairseq_plugin import PromptedLanguageModelingTask

from . import models
from .attentions import is_causal
from .measure import DECODING, TRAINING, Candidate, Case, Place, error

STOCK, STOCK_AUDIO = "transformer_lm", "wav2vec2"
TRAINED = ("flash_lm", "transformer_pp_lm")
DECODED = ("flowformer_lm", "linear_lm", "cosformer_lm", "flash_lm", "daft_conv_lm", STOCK)
#: Plain linear attention, and models with one causal sum per head that decays, by a gate or by their own paper.
FORGETTING = (
    "linear_lm",
    "linear_lm --linear-short-conv 4",
    "flowformer_lm",
    "linear_lm --linear-forget head",
    "linear_lm --linear-forget channel",
    "cosformer_lm --cosformer-forget head",
    "favor_lm --favor-forget head",
    "rfa_lm --rfa-forget head",
    "rfa_gate_lm",
    "flowformer_lm --flow-forget head",
    "flowformer_lm --flow-forget channel",
    "mixed_chunk_lm --mixed-chunk-chunk-size 64 --mixed-chunk-forget head",
    "retention_lm",
    "gla_lm",
    "gated_delta_lm",
)
BEAM, NEAR, FAR = 5, 128, 16384


def training(names: Sequence[str], width: int, layers: int, size: int, place: Place) -> list[Candidate]:
    """A training step of each model on one sequence."""
    return [_trained(name, width, layers, size, place) for name in names]


def _trained(name: str, width: int, layers: int, size: int, place: Place) -> Candidate:
    by_map = name in TRAINED  # others have literal references
    model = place(models.language_model(name, width, layers, size)).train(by_map)
    words, weights = place(models.tokens(size)), list(model.parameters())
    # More than two chunks and not a multiple of their size; references are slow loops.
    loss = partial(models.next_token_loss, model, words[:, : 700 if by_map else 70])

    def check() -> dict[str, float]:
        literal = models.attention_written_out() if by_map else models.attention_by_reference(model)
        return models.training_errors(loss, weights, loss, weights, literal)

    step = models.training_step(partial(models.next_token_loss, model, words), weights)
    return Candidate(name, size, {TRAINING: step}, check, is_model=True)


def audio(size: int, place: Place, width: int = 256, layers: int = 2) -> list[Candidate]:
    """A training step of wav2vec 2.0 on one recording of ``size`` seconds, with a small feature extractor."""
    names = ("flowformer_wav2vec2", "linear_wav2vec2", STOCK_AUDIO)
    return [_trained_audio(name, size, place, width, layers) for name in names]


def _wav2vec2(architecture: str, width: int, layers: int) -> nn.Module:
    command = ["--task", "audio_pretraining", "--criterion", "wav2vec", "--arch", architecture, "--layer-norm-first"]
    command += ["--conv-feature-layers", "[(64, 10, 5)] + [(64, 3, 2)] * 4 + [(64, 2, 2)] * 2"]
    command += ["--extractor-mode", "layer_norm", "--encoder-layers", layers, "--encoder-embed-dim", width]
    command += ["--encoder-ffn-embed-dim", 4 * width, "--encoder-attention-heads", width // 64]
    return models.built([*command, "--attention-dropout", "0"])


def _trained_audio(name: str, size: int, place: Place, width: int, layers: int) -> Candidate:
    model = literal = place(_wav2vec2(name, width, layers))
    if name == STOCK_AUDIO:  # our softmax attention has a literal reference
        literal = place(_wav2vec2("softmax_wav2vec2", width, layers))
        literal.load_state_dict(model.state_dict())
    recording = place(torch.randn(1, size * 16_000, generator=torch.Generator().manual_seed(0)))

    def loss(model: nn.Module, samples: int) -> Tensor:
        return model(recording[:, :samples], mask=False, features_only=True)["x"].square().mean()

    def learning(model: nn.Module) -> list[Tensor]:  # the parameters that the features depend on
        parts = (model.feature_extractor, model.post_extract_proj, model.encoder)
        return [parameter for part in parts for parameter in part.parameters()]

    def check() -> dict[str, float]:  # 24 frames
        actual, expected = (partial(loss, x, 8000) for x in (model, literal))
        by_reference = models.attention_by_reference(literal)
        return models.training_errors(actual, learning(model), expected, learning(literal), by_reference)

    step = models.training_step(partial(loss, model, recording.shape[1]), learning(model))
    return Candidate(name, size, {TRAINING: step}, check, is_model=True)


def decoding(
    names: Sequence[str], near: int, rows: int, width: int, layers: int, size: int, place: Place
) -> list[Candidate]:
    """One token of each of ``rows`` hypotheses at position ``size`` and, unless it is 0, at ``near`` as well."""
    made = []
    for name in names:
        model = models.placed(models.language_model(name, width, layers, size + 1), place)
        made += [_decoded(name, model, position, rows, place) for position in (near, size) if position]
    return made


def _decoded(name: str, model: nn.Module, position: int, rows: int, place: Place) -> Candidate:
    """The state is computed without stepping there: each layer gets its input from the full forward."""
    words, forward = place(models.tokens(position + 1, rows)), model
    if name == STOCK:  # whose own full forward would allocate several tensors of position² per head
        decoder = model.decoder
        sizes = (decoder.embed_dim, len(decoder.layers), position + 1)
        forward = models.placed(models.language_model("softmax_lm", *sizes), place)
        forward.load_state_dict(model.state_dict())
    inputs, expected = models.layer_inputs(forward.decoder, lambda: forward(words))
    state: models.State = {}
    with torch.no_grad():
        for layer, x in zip(model.decoder.layers, inputs, strict=True):
            if name == STOCK:
                models.fill_cache(layer.self_attn, layer.self_attn_layer_norm(x[:-1]), state)
            else:
                layer(x[:-1], incremental_state=state)
    # Each row continues the one at the opposite position, as if the search had chosen it.
    order = place(torch.arange(rows).flip(0))
    step = models.decoding_step(model.decoder, words[order], order, state)
    check = lambda: {"logits": error(step()[0], expected[order])}
    return Candidate(name, rows, {DECODING: step}, check, position, is_model=True)


def beam_generation(size: int, place: Place, rows: int = 40, width: int = 32) -> list[Candidate]:
    """``size`` tokens of 40 hypotheses, reordered within their beams before each token, by every causal attention."""
    names = (STOCK, *(f"{name}_lm" for name in ATTENTIONS if is_causal(name)), *models.UNITS)
    return [_generated(name, size, place, rows, width) for name in names]


def _generated(name: str, size: int, place: Place, rows: int, width: int) -> Candidate:
    layers = 1 if name in models.UNITS else 2  # two units count as one layer
    model = models.placed(models.language_model(name, width, layers, size), place)
    words, generator = place(models.tokens(size, rows)), torch.Generator().manual_seed(3)
    firsts = torch.arange(rows) - torch.arange(rows) % BEAM
    orders = [place(firsts + torch.randint(0, BEAM, (rows,), generator=generator)) for _ in range(size - 1)]
    sequences = [words[:, :1]]
    for i, order in enumerate(orders, 1):
        sequences.append(torch.cat([sequences[-1][order], words[:, i : i + 1]], dim=1))

    @torch.no_grad()
    def generate() -> list[Tensor]:
        state: models.State = {}
        logits, _ = model(sequences[0], incremental_state=state)
        for order, sequence in zip(orders, sequences[1:]):
            model.decoder.reorder_incremental_state_scripting(state, order)
            logits, _ = model(sequence, incremental_state=state)
        return [logits[:, -1]]

    @torch.no_grad()
    def check() -> dict[str, float]:
        return {"logits": error(generate()[0], model(sequences[-1])[0][:, -1])}

    return Candidate(name, size * rows, {DECODING: generate}, check, is_model=True)


def prompts(size: int, place: Place, words: int = 16) -> list[Candidate]:
    """16 words after a prompt of ``size`` tokens, which is read in one pass, or token by token as fairseq does."""
    tasks = {"one pass": PromptedLanguageModelingTask, "token by token": LanguageModelingTask}
    made = []
    for name in ("flowformer_lm", "flash_lm"):
        model = models.placed(models.language_model(name, 128, 2, max(size, 600) + words + 2), place)
        made += [_prompted(f"{name}, {way}", task, model, size, words, place) for way, task in tasks.items()]
    return made


def _prompted(name: str, task: type, model: nn.Module, size: int, words: int, place: Place) -> Candidate:
    dictionary = model.decoder.dictionary
    task, eos = task(Namespace(), dictionary), dictionary.eos()

    @torch.no_grad()
    def generate(prompt: Tensor) -> list[Tensor]:
        options = Namespace(beam=1, max_len_a=0, max_len_b=prompt.size(1) + words, min_len=prompt.size(1) + words)
        generator = task.build_generator([model], options)
        source = torch.cat([prompt.new_full((1, 1), eos), prompt], dim=1)
        sample = {"net_input": {"src_tokens": source, "src_lengths": torch.tensor([source.size(1)])}}
        best = task.inference_step(generator, [model], sample)[0][0]
        return [best["tokens"], best["positional_scores"]]

    @torch.no_grad()
    def check() -> dict[str, float]:
        """The scores of all tokens by one forward pass; more than two chunks of flash_lm."""
        made, scores = generate(place(models.tokens(min(size, 600))))
        shifted = torch.cat([made.new_full((1,), eos), made[:-1]])
        literal = model.get_normalized_probs(model(shifted[None]), log_probs=True)[0]
        return {"scores": error(scores, literal.gather(1, made[:, None])[:, 0])}

    run = partial(generate, place(models.tokens(size)))
    return Candidate(name, size + words, {"generation": run}, check, is_model=True)


_flash = {width: partial(training, TRAINED, width, 2) for width in (256, 512, 768)}
_TITLE = "Training step of flash_lm and transformer_pp_lm"
CASES = {
    "flash_lm_256": Case(f"{_TITLE}, width 256", (512, 2048, 8192), _flash[256], TRAINED[1], devices=("cpu",)),
    "flash_lm_512": Case(f"{_TITLE}, width 512", (512, 2048, 8192), _flash[512], TRAINED[1], devices=("cpu",)),
    "flash_lm_cuda": Case(
        f"{_TITLE}, width 768", (2048, 8192, 32768, 131072), _flash[768], TRAINED[1], devices=("cuda",)
    ),
    "gpu_training": Case(
        "Training step of language models on a GPU, 6 layers of width 512",
        (512, 2048, 8192),
        partial(training, ("flowformer_lm", "gated_delta_lm", "flash_lm", STOCK), 512, 6),
        STOCK,
        devices=("cuda",),
    ),
    "forgetting": Case(
        "Training step of language models whose sums forget, width 256",
        (512, 2048, 8192, 16384),
        partial(training, FORGETTING, 256, 2),
        FORGETTING[0],
    ),
    "forgetting_decoding": Case(
        "One decoding step of language models whose sums forget",
        (2048,),
        partial(decoding, FORGETTING, 0, 1, 256, 2),
        FORGETTING[0],
        quick=128,
        axis="position",
    ),
    "decoding": Case(
        "One decoding step, 6 layers of width 512",
        (FAR,),
        partial(decoding, DECODED, NEAR, 1, 512, 6),
        STOCK,
        quick=1024,
        axis="position",
    ),
    "beam_decoding": Case(
        f"One decoding step of a beam of {BEAM}, each of which goes on from another, 6 layers of width 512",
        (NEAR,),
        partial(decoding, DECODED, 0, BEAM, 512, 6),
        STOCK,
        axis="position",
    ),
    "beam_generation": Case("Tokens of 40 hypotheses, from the first one on", (64,), beam_generation, STOCK, quick=16),
    "prompts": Case(
        "16 words after a prompt", (8192,), prompts, quick=256, axis="tokens of the prompt", devices=("cpu",)
    ),
    "audio": Case(
        "Training step of wav2vec 2.0", (5, 30, 60, 120, 240), audio, STOCK_AUDIO, axis="seconds", unit="seconds"
    ),
}
