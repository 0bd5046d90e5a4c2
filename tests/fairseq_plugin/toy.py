"""Helpers of the fairseq tests: toy text, models built through fairseq's own parser, its commands as processes."""

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from fairseq import options, tasks
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from torch import Tensor, nn

import fairseq_plugin  # noqa: F401  registers the architectures
from common.attention import DaftConvAttention, DaftFullAttention, MixedChunkAttention
from common.modules.gated_attention_unit import GatedAttentionUnit

CHECKOUT = Path(__file__).resolve().parents[2]
USER_DIR = str(CHECKOUT / "fairseq_plugin")
FLASH_FAMILY = (
    "flash_lm",
    "flash_quad_lm",
    "transformer_plus_lm",
    "transformer_pp_lm",
    "mc_transformer_pp_lm",
    "performer_lm",
    "combiner_lm",
)
DAFT_FAMILY = ("daft_full_lm", "daft_conv_lm")
ARCHITECTURES = ("flowformer_lm", "flowformer_lm_wiki103", "linear_lm", "softmax_lm", *FLASH_FAMILY, *DAFT_FAMILY)
SMALL = (
    "--decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 "
    "--decoder-ffn-embed-dim 64 --decoder-attention-heads 4"
).split()
#: Chunks, rows and windows so short that toy sequences cross many of them.
CHUNKS = {
    "flowformer_lm": ("--flow-chunk-size", "16"),
    "linear_lm": ("--linear-chunk-size", "16"),
    "flash_lm": ("--flash-chunk-size", "16"),
    "mc_transformer_pp_lm": ("--flash-chunk-size", "16"),
    "combiner_lm": ("--flash-row-length", "8"),
    "daft_full_lm": ("--daft-bias-dim", "12"),
    "daft_conv_lm": ("--daft-window", "9"),
}
#: The training reads its batches itself. By default fairseq reads ahead in a daemon thread; where ``--max-update`` ends
#: a training while that thread is inside of torch, the process aborts: "terminate called without an active exception".
NO_READER_THREAD = ("--num-workers", "0", "--data-buffer-size", "0")


def small(arch: str) -> list[str]:
    """Options that make any architecture small."""
    return [*SMALL, *CHUNKS.get(arch, ())]


def dictionary(words: int = 60) -> Dictionary:
    """A dictionary of ``words`` made-up words beside fairseq's four special symbols."""
    symbols = Dictionary()
    for i in range(words):
        symbols.add_symbol(f"w{i}")
    return symbols


def build_model(arch: str, *arguments: str, seed: int = 1, sizes: Sequence[str] | None = None, words: int = 60):
    """The model that ``fairseq-train --arch ARCH SIZES ARGUMENTS`` builds, small unless told otherwise."""
    parser = options.get_training_parser()
    sizes = small(arch) if sizes is None else sizes
    command = ["data", "--task", "language_modeling", "--arch", arch, *sizes, "--tokens-per-sample", "256", *arguments]
    config = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, command))
    symbols = dictionary(words)
    task = SimpleNamespace(source_dictionary=symbols, target_dictionary=symbols)
    torch.manual_seed(seed)
    return tasks.FairseqTask.build_model(task, config.model)


def awake(model: nn.Module) -> nn.Module:
    """``model`` with weights under which attention shows in the logits.

    As initialised, that of FLASH is near zero, and so are the position biases of DAFT.
    """
    for module in model.modules():
        if isinstance(module, GatedAttentionUnit):
            nn.init.normal_(module.in_proj.weight, std=2.0 * module.dim**-0.5)
            nn.init.normal_(module.out_proj.weight, std=module.expanded_dim**-0.5)
            for parameter in module.bias.parameters() if module.bias is not None else ():
                nn.init.normal_(parameter, std=0.3)
        if isinstance(module, (GatedAttentionUnit, MixedChunkAttention)):
            nn.init.normal_(module.gamma)
            nn.init.normal_(module.beta)
        if isinstance(module, DaftFullAttention):  # biases of deviation 1
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=(module.options.bias_dim or 1) ** -0.25)
        if isinstance(module, DaftConvAttention):  # filters of deviation 1 to 2 about a mean of -2 to 2
            nn.init.normal_(module.r)
            for parameter, low, high in ((module.gamma, 1.0, 2.0), (module.beta, -2.0, 2.0)):
                if parameter is not None:
                    nn.init.uniform_(parameter, low, high)
    return model


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Random real tokens (batch, length)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 60, (batch, length), generator=generator)


def run_program(arguments: Sequence[str], stdin: str = "", cwd: str = "") -> str:
    """Run ``python ARGUMENTS`` in a new process and return its output, stderr included; it must succeed."""
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        cwd=cwd or None,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert finished.returncode == 0, f"{' '.join(arguments)}\n{finished.stdout[-3000:]}"
    return finished.stdout


def run_module(module: str, arguments: Sequence[str], stdin: str = "", cwd: str = "") -> str:
    """Run ``python -m MODULE ARGUMENTS`` in a new process and return its output, stderr included; it must succeed."""
    return run_program(["-m", module, *_arguments(module, arguments)], stdin, cwd)


def _arguments(module: str, arguments: Sequence[str]) -> list[str]:
    return [*arguments, *(NO_READER_THREAD if module == "fairseq_cli.train" else ())]


# One process that runs several commands, each as ``python -m`` would: importing fairseq takes longer than most of them.
_IN_TURN = """
import io, json, runpy, sys
for module, arguments, stdin in json.loads(sys.argv[1]):
    print("\\nNEXT COMMAND", flush=True)
    sys.argv, sys.stdin = [module, *arguments], io.StringIO(stdin)
    run = runpy.run_path if module.endswith(".py") else runpy.run_module
    run(module, run_name="__main__")
"""


def run_in_turn(*commands: tuple[str, Sequence[str], str]) -> list[str]:
    """The outputs of ``commands``, each a module or a script, its arguments and its stdin, all in one new process."""
    complete = [(module, _arguments(module, arguments), stdin) for module, arguments, stdin in commands]
    outputs = run_program(["-c", _IN_TURN, json.dumps(complete)]).split("\nNEXT COMMAND\n")[1:]
    assert len(outputs) == len(commands)
    return outputs


def training_command(data: str, save_dir: str, arch: str, *arguments: str) -> list[str]:
    """Arguments of a short ``fairseq-train`` on the CPU; later ``arguments`` win."""
    return [
        data,
        "--user-dir",
        USER_DIR,
        "--task",
        "language_modeling",
        "--arch",
        arch,
        *small(arch),
        "--dropout",
        "0.1",
        "--tokens-per-sample",
        "48",
        "--max-tokens",
        "384",
        "--optimizer",
        "adam",
        "--lr",
        "3e-3",
        "--max-update",
        "6",
        "--save-dir",
        save_dir,
        "--log-format",
        "json",
        "--log-interval",
        "1",
        "--cpu",
        "--seed",
        "1",
        *arguments,
    ]


def run_two_processes(command: Sequence[str]) -> list[str]:
    """The outputs of ``fairseq-train COMMAND`` in two gloo processes that train together; both must succeed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    distributed = [
        "--distributed-no-spawn",
        "--distributed-world-size",
        "2",
        "--distributed-backend",
        "gloo",
        "--distributed-init-method",
        f"tcp://127.0.0.1:{port}",
        "--ddp-backend",
        "legacy_ddp",
        "--distributed-rank",
    ]
    program = [sys.executable, "-W", "ignore", "-m", "fairseq_cli.train", *command, *NO_READER_THREAD, *distributed]
    processes = [
        subprocess.Popen(
            [*program, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in (0, 1)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs[0][-2000:]
    return outputs


def write_text(folder: Path, seed: int = 0) -> None:
    """train.txt, valid.txt and test.txt of sentences with something to learn: a word foretells the next one."""
    rng = random.Random(seed)
    for split, lines in (("train", 300), ("valid", 40), ("test", 20)):
        sentences = []
        for _ in range(lines):
            word = rng.randrange(60)
            sentence = []
            for _ in range(rng.randrange(5, 12)):
                sentence.append(f"w{word}")
                word = (7 * word + rng.randrange(3)) % 60
            sentences.append(" ".join(sentence))
        (folder / f"{split}.txt").write_text("\n".join(sentences) + "\n")
