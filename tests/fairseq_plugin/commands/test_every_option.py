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
from torch import Tensor

from fairseq_plugin import PromptedLanguageModelingTask, PromptState, read_prompt
from fairseq_plugin.convert import convert
from fairseq_plugin.decoding_step import DecodingStep
from fairseq_plugin.export_step import load
from fairseq_plugin.modules.carried_state import CarriedState
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.checkpoint_files import save_model
from tests.fairseq_plugin.helpers.text import tokens

EOS = 2
ADAPTIVE = ("--criterion", "adaptive_loss", "--adaptive-softmax-cutoff", "20,40")
ADAPTIVE_INPUT = ("--adaptive-input", "--adaptive-input-cutoff", "20,40", *ADAPTIVE)
RESET = ("--lineartime-reset-at-eos",)
#: Architecture and options of a training, by what they are.
TRAININGS: dict[str, tuple[str, ...]] = {
    "documents": ("linear_lm", *RESET),
    "documents, hybrid": ("hybrid_lm", "--lineartime-layers", "gated_delta,flow", *RESET),
    "documents, additions": ("linear_lm", "--linear-forget", "head", "--linear-short-conv", "3", *RESET),
    "documents, redraw": ("favor_lm", "--favor-features", "16", "--favor-redraw", "1", *RESET),
    "hybrid": ("hybrid_lm", "--lineartime-layers", "gated_delta,linear"),
    "hybrid, softmax": ("hybrid_lm", "--lineartime-layers", "gated_delta,softmax"),
    "additions": ("flowformer_lm", "--flow-forget", "channel", "--flow-short-conv", "3"),
    "redraw": ("favor_lm", "--favor-features", "16", "--favor-redraw", "1"),
    "a limit": ("cosformer_lm",),
    "gated attention units": ("flash_lm",),
    "learned positions": ("linear_lm", "--decoder-learned-pos"),
    "no positions": ("linear_lm", "--no-token-positional-embeddings"),
    "post-norm": ("linear_lm", "--lineartime-post-norm", "--layernorm-embedding", "--no-scale-embedding"),
    "no last norm": ("linear_lm", "--no-decoder-final-norm"),
    "shared embeddings": ("linear_lm", "--share-decoder-input-output-embed"),
    "another width": ("linear_lm", "--decoder-input-dim", "16", "--decoder-output-dim", "16"),
    "adaptive softmax": ("linear_lm", *ADAPTIVE),
    "adaptive input": ("linear_lm", *ADAPTIVE_INPUT),
    "tied weights": ("linear_lm", *ADAPTIVE_INPUT, "--tie-adaptive-weights", "--tie-adaptive-proj"),
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
#: What is refused, by a text in its message.
REFUSED: dict[str, dict[str, str]] = {
    "hybrid, softmax": {"export_step": "grows"},
    "adaptive input": {"export_step": "--adaptive-input"},
    "tied weights": {"export_step": "--adaptive-input"},
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
    save_model(tmp_path / "model.pt", "args", arch, *arguments)
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
