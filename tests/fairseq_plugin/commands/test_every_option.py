"""Every option of a training times whatever reads its checkpoint: the right result, or one line that says no.

The functions behind fairseq-generate, fairseq-interactive, fairseq-eval-lm and export_step are called here; a process
for each pair would take minutes.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.models import ARCH_MODEL_REGISTRY
from torch import Tensor, nn

from fairseq_plugin import PromptedLanguageModelingTask, PromptState, read_prompt
from fairseq_plugin.convert import convert
from fairseq_plugin.export.decoding_step import DecodingStep
from fairseq_plugin.export_step import load
from fairseq_plugin.modules.carried_state import CarriedState
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.checkpoint_files import save_model
from tests.fairseq_plugin.helpers.text import padded, tokens

EOS = 2
ADAPTIVE = ("--criterion", "adaptive_loss", "--adaptive-softmax-cutoff", "20,40")
ADAPTIVE_INPUT = ("--adaptive-input", "--adaptive-input-cutoff", "20,40", *ADAPTIVE)
RESET = ("--lineartime-reset-at-eos",)
#: Architecture and options of a training, by what they are.
TRAININGS: dict[str, tuple[str, ...]] = {
    "documents": ("linear_lm", *RESET),
    "documents, hybrid": ("hybrid_lm", "--lineartime-layers", "gated_delta,flow", *RESET),
    "documents, additions": ("linear_lm", "--linear-forget", "head", "--linear-short-conv", "3", *RESET),
    "hybrid": ("hybrid_lm", "--lineartime-layers", "gated_delta,linear"),
    "hybrid, softmax": ("hybrid_lm", "--lineartime-layers", "gated_delta,softmax"),
    "additions": ("flowformer_lm", "--flow-forget", "channel", "--flow-short-conv", "3"),
    "redraw": ("favor_lm", "--favor-features", "16", "--favor-redraw", "1"),
    "a limit": ("cosformer_lm",),
    "gated attention units": ("flash_lm",),
    "learned positions": ("linear_lm", "--decoder-learned-pos"),
    "no positions": ("linear_lm", "--no-token-positional-embeddings"),
    "post-norm": ("linear_lm", "--lineartime-post-norm", "--layernorm-embedding", "--no-scale-embedding"),
    "shared embeddings": ("linear_lm", "--share-decoder-input-output-embed"),
    "another width": ("linear_lm", "--decoder-input-dim", "16", "--decoder-output-dim", "16"),
    "adaptive softmax": ("linear_lm", *ADAPTIVE),
    "adaptive input": ("linear_lm", *ADAPTIVE_INPUT),
    "characters": ("linear_lm", "--character-embeddings"),
    "beginning of sentence": ("linear_lm", "--add-bos-token"),
    "activations": ("linear_lm", "--offload-activations", "--checkpoint-activations", "--min-params-to-wrap", "10"),
    "layer drop": ("linear_lm", "--decoder-layerdrop", "0.5"),
    "noise of blocks": ("linear_lm", "--quant-noise-pq", "0.1"),
    "NormFormer": ("linear_lm", "--scale-fc", "--scale-attn", "--scale-heads", "--scale-resids"),
    "weight decay": ("linear_lm", "--lineartime-decay-linear-only", "--optimizer", "adam"),
    "some parameters": ("hedgehog_lm", "--lineartime-trained-parameters", "attention"),
    "a stream": ("linear_lm", "--task", "streaming_language_modeling", "--batch-size", "2"),
    "half precision": ("linear_lm", "--memory-efficient-fp16", "--store-ema"),
}
_MASKED = ("--task", "masked_lm", "--criterion", "masked_lm")
_LABELS = tuple("--task sentence_prediction --criterion sentence_prediction --num-classes 2 --max-positions 48".split())
_PAIRS = ("--task", "translation", "--source-lang", "in", "--target-lang", "out")
#: Trainings of other models than language models.
OTHERS: dict[str, tuple[str, ...]] = {
    "masked, hybrid": ("hybrid_mlm", *_MASKED, "--lineartime-layers", "linear,softmax"),
    "masked, redraw": ("favor_mlm", *_MASKED, "--favor-features", "16", "--favor-redraw", "1"),
    "masked, a longest length": ("nystrom_mlm", *_MASKED, "--max-positions", "24"),
    "masked, learned positions": ("linear_mlm", *_MASKED, "--encoder-learned-pos"),
    "masked, post-norm": ("linear_mlm", *_MASKED, "--lineartime-post-norm", "--layernorm-embedding"),
    "masked, some parameters": ("hedgehog_mlm", *_MASKED, "--lineartime-trained-parameters", "attention"),
    "masked, gated attention units": ("flash_mlm", *_MASKED),
    "classifier, mean": ("flowformer_classifier", *_LABELS, "--pooling", "mean"),
    "classifier, arena": ("linear_classifier", *_LABELS, "--classifier-style", "arena", "--classifier-dim", "12"),
    "classifier, masked": ("flash_mlm", *_LABELS, "--flash-first-softmax", "--flash-first-to-all"),
    "pairs, cross-attention": ("linear", *_PAIRS, "--lineartime-cross-attention", "flow_source"),
    "pairs, hybrid": ("hybrid", *_PAIRS, "--lineartime-layers", "linear,softmax"),
    "pairs, additions": ("linear", *_PAIRS, "--linear-forget", "head", "--linear-short-conv", "3"),
    "pairs, redraw": ("favor", *_PAIRS, "--favor-features", "16", "--favor-redraw", "1"),
    "pairs, learned positions": ("linear", *_PAIRS, "--encoder-learned-pos", "--decoder-learned-pos"),
    "pairs, pre-norm": ("linear", *_PAIRS, "--encoder-normalize-before", "--decoder-normalize-before"),
    "pairs, adaptive softmax": ("linear", *_PAIRS, *ADAPTIVE),
    "pairs, some parameters": ("hedgehog", *_PAIRS, "--lineartime-trained-parameters", "attention"),
}
#: What is refused, by a text in its message.
REFUSED: dict[str, dict[str, str]] = {
    "hybrid, softmax": {"export_step": "grows"},
    "adaptive input": {"export_step": "--adaptive-input"},
    "characters": {"export_step": "--character-embeddings"},
}


def _log_probabilities(hub: GeneratorHubInterface, output: tuple) -> Tensor:
    return hub.models[0].get_normalized_probs(output, log_probs=True, sample=None)


def _whole(hub: GeneratorHubInterface, sequence: Tensor) -> Tensor:
    return _log_probabilities(hub, hub.models[0](sequence))


def generate(hub: GeneratorHubInterface, sequence: Tensor) -> None:
    """Prompts that are read at once, and those after a kept state, give what fairseq's own steps give."""
    task, prompts = hub.task, [hub.encode("w3 w21 w7"), hub.encode("w5")]
    options = {"beam": 3, "max_len_b": 12}
    expected = hub.generate(prompts, **options)
    hub.task = PromptedLanguageModelingTask.of(task)
    found = hub.generate(prompts, **options)
    path = Path(hub.cfg.task.data, "state.safetensors")
    read_prompt(hub, "w3 w21").save(path)
    after = PromptState.load(path, hub.models, task.dictionary)
    hub.task = PromptedLanguageModelingTask.of(task, after=after)
    continued = hub.generate([hub.encode("w7")], **options)
    for rows, wanted in zip([*found, *continued], [*expected, expected[0]], strict=True):
        for one, other in zip(rows, wanted, strict=True):
            assert one["tokens"].tolist() == other["tokens"].tolist()
            assert_close("scores", one["positional_scores"], other["positional_scores"], 1e-4)


def streams(hub: GeneratorHubInterface, sequence: Tensor) -> None:
    """Blocks, each after the state of the one before, as ``streaming_language_modeling`` evaluates a text."""
    before, found = None, []
    for block in sequence.split(7, dim=1):
        carried = CarriedState(before)
        found.append(_log_probabilities(hub, hub.models[0](block, incremental_state=carried)))
        before = carried.after
    assert_close("streams", torch.cat(found, dim=1), _whole(hub, sequence))


def export_step(hub: GeneratorHubInterface, sequence: Tensor) -> None:
    """The step token by token; tensors without values pass, so it can be exported."""
    # The command reads a model without what wraps its layers for training; loading takes long, so elsewhere not again.
    wrapped = hub.cfg.model.offload_activations
    step = DecodingStep(load(Path(hub.cfg.task.data, "model.pt"))[1] if wrapped else hub.models[0])
    state, expected, rows = step.initial_state(2), _whole(hub, sequence), torch.arange(2)
    for i in range(sequence.shape[1]):
        logits, *state = step(sequence[:, i : i + 1], rows, *state)
        assert_close(f"step {i}", logits.log_softmax(-1), expected[:, i])
    step.to("meta")(sequence.to("meta"), rows.to("meta"), *(x.to("meta") for x in state))


READERS: dict[str, Callable[[GeneratorHubInterface, Tensor], None]] = {
    "generate": generate,
    "streams": streams,
    "export_step": export_step,
}


@pytest.mark.parametrize("training", TRAININGS)
@torch.no_grad()
def test_every_reader_of_a_checkpoint(training: str, data_bin: str, tmp_path: Path) -> None:
    """``from_pretrained``, generation, streams, exported steps, and conversion, which takes stock models alone."""
    arch, *arguments = TRAININGS[training]
    # fairseq turns "args" into "cfg" in each reading, which takes most of a second; its first "cfg" had no --scale-fc.
    kind = "args" if "--scale-fc" in arguments else "cfg"
    save_model(tmp_path / "model.pt", kind, arch, *arguments)
    (tmp_path / "dict.txt").write_bytes((Path(data_bin) / "dict.txt").read_bytes())
    sequence = tokens(2, 20)
    sequence[:, 0] = sequence[0, 8] = sequence[0, 9] = sequence[1, 15] = EOS
    hub = ARCH_MODEL_REGISTRY[arch].from_pretrained(str(tmp_path), "model.pt", str(tmp_path))
    task, _ = hub.task, hub.models[0].eval()
    for name, read in READERS.items():
        hub.task = task
        match = REFUSED.get(training, {}).get(name)
        if match is None:
            read(hub, sequence)
        else:
            with pytest.raises(ValueError, match=match) as refusal:
                read(hub, sequence)
            assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match=f"{arch}.*allowed.*transformer_lm"):
        convert(tmp_path / "model.pt", "linear_lm")


def encode(model: nn.Module, hub: nn.Module) -> None:
    """Every token's symbols, or each sequence's label, of the loaded model and of the one that was stored."""
    loaded, sequence = hub.model.eval(), padded(tokens(2, 20), 0, 3)
    if model.classification_heads:
        scores = [x(sequence, classification_head_name="sentence_classification_head")[0] for x in (loaded, model)]
        predicted = hub.predict("sentence_classification_head", sequence[:, :20], return_logits=True)
        assert_close("predict", predicted, scores[1])
    else:
        scores = [x(sequence)[0] for x in (loaded, model)]
    assert_close("scores", *scores)


def translate(model: nn.Module, hub: nn.Module) -> None:
    """Scores of generated tokens, one step for each, are those of the stored model's forward pass over all."""
    source = hub.encode("w3 w21 w7 w40")
    for found in hub.generate(source, beam=3, max_len_b=12):
        target = found["tokens"][None]
        before = torch.cat([target.new_full((1, 1), EOS), target[:, :-1]], dim=1)
        output = model(source[None], torch.tensor([len(source)]), before)
        scores = model.get_normalized_probs(output, log_probs=True, sample=None)
        assert_close("scores", found["positional_scores"], scores.gather(2, target[..., None]).flatten(), 1e-4)


@pytest.mark.parametrize("training", OTHERS)
@torch.no_grad()
def test_every_reader_of_another_model(training: str, data_bin: str, tmp_path: Path) -> None:
    """``from_pretrained``, scores and generation; commands for language models and stock models refuse it."""
    arch, *arguments = OTHERS[training]
    model = save_model(tmp_path / "model.pt", "args", arch, *arguments)
    symbols = (Path(data_bin) / "dict.txt").read_bytes()
    for name in ("dict.txt", "dict.in.txt", "dict.out.txt", "input0/dict.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(symbols)
    (tmp_path / "label").mkdir()
    (tmp_path / "label" / "dict.txt").write_text("0 1\n1 1\n")
    hub = ARCH_MODEL_REGISTRY[arch].from_pretrained(str(tmp_path), "model.pt", str(tmp_path))
    (translate if arguments[1] == "translation" else encode)(model.eval(), hub.eval())
    with pytest.raises(ValueError, match=f"{arch}.*allowed: language models"):
        load(tmp_path / "model.pt")
    with pytest.raises(ValueError, match=f"{arch}.*allowed.*transformer_lm"):
        convert(tmp_path / "model.pt", "linear_lm")
