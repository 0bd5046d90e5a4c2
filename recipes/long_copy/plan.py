"""A comparison of encoder-decoders: one size and one budget for every attention and cross-attention."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fairseq.models import ARCH_MODEL_REGISTRY

from common.attention import ATTENTIONS
from fairseq_plugin import LinearTimeTransformer

from ..shared.additions import addition_arguments, mechanism_of, with_additions
from ..shared.architectures import option_prefix
from ..shared.commands import python_command
from ..shared.comparison import NO_READER, Budget
from .passages import Layout
from .prepare import SOURCE, TARGET

#: fairseq's own model; all others are called NAME/CROSS.
STOCK = "transformer"
CROSS_ATTENTIONS = ("softmax", *(name for name, one in ATTENTIONS.items() if "source" in one.supports))
DEFAULT_MODELS = (
    STOCK,
    "flow/softmax",
    "flow/linear",
    "flow/cosformer",
    "flow/flow_source",
    "linear/softmax",
    "linear/linear",
    "cosformer/cosformer",
)


class Model(NamedTuple):
    """The mechanisms in the name of a model, see ``parse``."""

    attention: str  # of the encoder and of the decoder to itself
    cross: str  # of the decoder to the encoder
    decoder: str  # the same with additions of ours, which the decoder's attention to itself has


def attentions() -> list[str]:
    """The mechanisms that can be an encoder, by the architectures that fairseq knows."""
    kinds = ((name, ARCH_MODEL_REGISTRY.get(name)) for name in ATTENTIONS)
    return [name for name, kind in kinds if kind is not None and issubclass(kind, LinearTimeTransformer)]


def parse(name: str) -> Model:
    """The parts of NAME/CROSS, or NAME+forget/CROSS and so on.

    Raises:
        ValueError: there is no such model.
    """
    decoder, slash, cross = name.partition("/")
    plain = mechanism_of(decoder)
    if not slash or plain not in attentions() or cross not in CROSS_ATTENTIONS:
        raise ValueError(
            f"{name}; allowed: {STOCK}, and NAME/CROSS with NAME of {', '.join(attentions())} and CROSS of "
            f"{', '.join(CROSS_ATTENTIONS)}"
        )
    if decoder not in with_additions(plain):
        allowed = ", ".join(f"{one}/{cross}" for one in with_additions(plain))
        raise ValueError(f"{name}; allowed: {allowed}")
    return Model(plain, cross, decoder)


def reads_source_in_one_state(name: str) -> bool:
    """Whether what a model keeps of a source while it decodes has the same size for any source."""
    return name != STOCK and parse(name).cross != "softmax"


@dataclass(frozen=True, kw_only=True)
class Plan(Budget):
    """The budget of encoder-decoders; ``layers`` are those of the encoder, and as many of the decoder."""

    layout: Layout
    batch_size: int  # sources of an update
    beam: int  # of generation
    more: list[str]  # further arguments of fairseq-train

    def train_arguments(self, data: Path, name: str, seed: int) -> list[object]:
        """See ``Budget``."""
        return [
            data,
            *self.model_arguments(name),
            *self.update_arguments(seed),
            *"--criterion label_smoothed_cross_entropy --label-smoothing 0.0 --report-accuracy".split(),
            *("--lr-scheduler", "cosine", "--warmup-updates", max(1, self.updates // 16)),
            *("--batch-size", self.batch_size),
            *self.more,
        ]

    def model_arguments(self, name: str) -> list[object]:
        """The arguments that say how a model is built."""
        arguments = [
            *"--user-dir fairseq_plugin --task translation".split(),
            *("--source-lang", SOURCE, "--target-lang", TARGET, *attention_arguments(name)),
        ]
        for side in ("encoder", "decoder"):
            arguments += [f"--{side}-layers", self.layers, f"--{side}-attention-heads", self.heads]
            arguments += [f"--{side}-embed-dim", self.width, f"--{side}-ffn-embed-dim", 2 * self.width]
            arguments += [f"--{side}-normalize-before"]
        # A short training repeats little, so nothing is dropped.
        return [*arguments, *self.longest_arguments(), *"--share-all-embeddings --dropout 0.0".split()]

    def longest_arguments(self) -> list[object]:
        """The longest source and target, each with </s>. fairseq-generate must be told too: its own is 1,024."""
        longest = (self.layout.source_tokens + 1, self.layout.target_tokens + 1)
        return ["--max-source-positions", longest[0], "--max-target-positions", longest[1]]

    def generate_command(self, data: Path, checkpoint: Path) -> list[str]:
        """fairseq-generate of the test split, one source at a time; no target is longer than the right one."""
        return python_command(
            *("-m", "fairseq_cli.generate", data, "--user-dir", "fairseq_plugin", "--path", checkpoint),
            *("--gen-subset", "test", "--batch-size", 1, "--required-batch-size-multiple", 1, "--beam", self.beam),
            *("--max-len-a", 0, "--max-len-b", self.layout.target_tokens),
            *self.longest_arguments(),
            *(*NO_READER, "--log-format", "none"),
        )


def attention_arguments(name: str) -> list[object]:
    """The architecture of a model, with its cross-attention."""
    if name == STOCK:
        return ["--arch", STOCK]
    model = parse(name)
    prefix = option_prefix(model.attention)
    arguments = ["--arch", model.attention, "--lineartime-cross-attention", model.cross]
    return [*arguments, *addition_arguments(model.decoder, prefix)]
