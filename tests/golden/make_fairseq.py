"""``python -m tests.golden.make_fairseq [ARCHITECTURE ...]``: tiny checkpoints of fairseq-train, and their logits.

Name an architecture that has no checkpoint yet. Never run it to fix a failing test: these files stand for those that
users have. Only a change that intentionally breaks earlier checkpoints requires new ones.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from torch import Tensor, nn

from tests.fairseq_plugin.helpers.commands import USER_DIR, run_in_turn
from tests.processes import CHECKOUT

FOLDER = Path(__file__).parent / "fairseq"
WORDS = [f"w{i}" for i in range(8)]
_CAUSAL = (
    "--decoder-layers 1 --decoder-embed-dim 8 --decoder-input-dim 8 --decoder-output-dim 8 --decoder-ffn-embed-dim 16 "
    "--decoder-attention-heads 2 --share-decoder-input-output-embed"
).split()
_MASKED = "--encoder-layers 1 --encoder-embed-dim 8 --encoder-ffn-embed-dim 16 --encoder-attention-heads 2".split()
_FURTHER: dict[str, list[str]] = {
    "flowformer_lm": ["--flow-chunk-size", "4"],
    "linear_lm": ["--linear-chunk-size", "4"],
    "flash_lm": ["--flash-chunk-size", "4", "--flash-query-dim", "4", "--decoder-attention-heads", "1"],
    "flash_quad_lm": ["--flash-query-dim", "4", "--decoder-attention-heads", "1"],
    "mc_transformer_pp_lm": ["--flash-chunk-size", "4"],
    "combiner_lm": ["--flash-row-length", "4"],
    "flash_mlm": ["--flash-chunk-size", "4", "--flash-query-dim", "4", "--encoder-attention-heads", "1"],
    "flash_quad_mlm": ["--flash-query-dim", "4", "--encoder-attention-heads", "1"],
    "mc_transformer_pp_mlm": ["--flash-chunk-size", "4"],
    "combiner_mlm": ["--flash-row-length", "4"],
    "daft_full_lm": ["--daft-bias-dim", "4"],
    "daft_conv_lm": ["--daft-window", "4"],
}
#: Named sizes store their options in another kind of configuration; one is listed for each way in which a host does so.
NAMED_SIZES = {
    "flowformer_lm_wiki103": "flowformer_lm",
    "flash_lm_base": "flash_lm",
    "flash_mlm_base": "flash_mlm",
    "daft_full_lm_enwik8": "daft_full_lm",
    "daft_conv_lm_enwik8": "daft_conv_lm",  # of width 16, created without a number of heads when the default was 8
}


def registered() -> list[str]:
    """Every language model and masked model that is a separate class, and the named sizes.

    Models of audio are not among them: their tests compare them with fairseq's own.
    """
    derived = ("attention", "decision", "decision_baselines", "encoder_decoder", "time_series", "time_series_baselines")
    derived += ("long_range_arena", "hybrid", "_audio", "audio", "_data2vec_audio", "speech_to_text")
    derived += ("_decision", "_time_series")
    others = tuple(f"fairseq_plugin.models.{name}" for name in derived)
    modules = {name: model.__module__ for name, model in MODEL_REGISTRY.items()}
    registered_names = [
        name for name, module in modules.items() if module.startswith("fairseq_plugin.") and module not in others
    ]
    return [*registered_names, *NAMED_SIZES]


def load(arch: str, folder: Path = FOLDER) -> nn.Module:
    """The model in FOLDER/ARCH.pt, loaded as a user does, in evaluation mode."""
    hub = ARCH_MODEL_REGISTRY[arch].from_pretrained(str(folder), f"{arch}.pt", data_name_or_path=str(FOLDER))
    model = hub.models[0] if hasattr(hub, "models") else hub.model
    model.eval()
    return model


def _training(arch: str, data: str, save_dir: str) -> list[str]:
    kind = "masked_lm" if "_mlm" in arch else "language_modeling"
    words = ["--task", kind, "--criterion", "masked_lm" if "_mlm" in arch else "cross_entropy", "--arch", arch]
    words += [*(_MASKED if "_mlm" in arch else _CAUSAL), *_FURTHER.get(NAMED_SIZES.get(arch, arch), ())]
    # Without a reader thread, which may abort when training ends.
    words += "--tokens-per-sample 16 --max-tokens 64 --cpu --optimizer adam --lr 0.001 --max-update 1".split()
    words += "--no-epoch-checkpoints --no-save-optimizer-state --num-workers 0 --data-buffer-size 0".split()
    return [data, "--user-dir", USER_DIR, *words, "--disable-validation", "--save-dir", save_dir]


def _train(architectures: Sequence[str], folder: Path) -> None:
    lines = [" ".join(WORDS[(3 * i + j) % 8] for j in range(9)) for i in range(8)]
    (folder / "text").write_text("\n".join(lines) + "\n")
    preprocessing = f"--only-source --trainpref {folder / 'text'} --srcdict {FOLDER / 'dict.txt'} --workers 1"
    preprocessing = [*preprocessing.split(), "--destdir", str(folder / "bin")]
    trainings = (_training(arch, str(folder / "bin"), str(folder / arch)) for arch in architectures)
    commands = [("fairseq_cli.train", training, "") for training in trainings]
    run_in_turn(("fairseq_cli.preprocess", preprocessing, ""), *commands)


def _shown(model: nn.Module) -> nn.Module:
    """Give ``model`` weights for which its logits depend on every part of it."""
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(
                1.5 * parameter.shape[-1] ** -0.5 * noise if parameter.dim() > 1 else parameter + 0.3 * noise
            )
    return model


def other_first_token(tokens: Tensor) -> Tensor:
    """tokens (B, T) with a different first token."""
    other = tokens.clone()
    other[:, 0] = 4 + (tokens[:, 0] - 3) % len(WORDS)
    return other


def _relative(stored: Any, folder: Path) -> Any:
    """Options without machine-specific paths."""
    if isinstance(stored, dict):
        return {name: _relative(value, folder) for name, value in stored.items()}
    if isinstance(stored, argparse.Namespace):
        return argparse.Namespace(**_relative(vars(stored), folder))
    if isinstance(stored, str):
        return stored.replace(f"{folder}/", "").replace(f"{CHECKOUT}/", "")
    return stored


def main(architectures: Sequence[str]) -> None:
    """Train each for one update, set weights for which every part matters, and store the logits with the checkpoint."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "dict.txt").write_text("".join(f"{word} 1\n" for word in WORDS))
    sequence = torch.randint(4, 12, (2, 15))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _train(architectures, folder)
        for arch in architectures:
            state = torch.load(folder / arch / "checkpoint_last.pt")
            torch.save(state, folder / f"{arch}.pt")
            model = _shown(load(arch, folder))
            state["model"], state["cfg"] = model.state_dict(), _relative(state["cfg"], folder)
            with torch.no_grad():
                state["golden"] = {"tokens": sequence, "logits": model(sequence)[0]}
            torch.save(state, FOLDER / f"{arch}.pt")


if __name__ == "__main__":
    torch.manual_seed(0)
    main(sys.argv[1:])
