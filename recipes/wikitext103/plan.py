"""A comparison of language models: one size and one budget for every causal mechanism."""

from dataclasses import dataclass
from pathlib import Path

from common.attention import ATTENTIONS

from ..shared.additions import addition_arguments, addition_notes, mechanism_of, with_additions
from ..shared.architectures import option_prefix
from ..shared.comparison import Budget

#: Architectures by mechanism, where it is not NAME_lm: the language model of the authors of Flow-Attention.
_ARCHITECTURES = {"flow": "flowformer_lm"}
#: Options that say how far a token sees, or sees in full.
_REACHES = ("window", "chunk_size")


def state_is_constant(name: str) -> bool:
    """Whether the decoding state of a model has the same size after any number of tokens."""
    return bool(ATTENTIONS[mechanism_of(name)].linear_cost)


def model_names() -> list[str]:
    """Every causal mechanism, and with the additions of ours that it can have."""
    causal = [name for name, attention in ATTENTIONS.items() if "causal" in attention.supports]
    named = [with_additions(name) for name in causal]
    return causal + [name for names in named for name in names[1:]]


def default_names() -> list[str]:
    """Softmax attention, every mechanism whose state is constant, and two of them with additions of ours."""
    plain = [name for name in model_names() if "+" not in name and state_is_constant(name)]
    added = [name + addition for name in ("flow", "linear") for addition in ("+forget", "+short_conv")]
    return ["softmax", *plain, *added]


@dataclass(frozen=True, kw_only=True)
class Plan(Budget):
    """The budget of language models."""

    batch_tokens: int  # of an update
    tokens_per_sample: int
    more: list[str]  # further arguments of fairseq-train

    def train_arguments(self, data: Path, name: str, seed: int) -> list[object]:
        """See ``Budget``."""
        return [
            data,
            *self.model_arguments(name),
            *self.update_arguments(seed),
            *("--weight-decay", "0.01", "--lr-scheduler", "cosine", "--warmup-updates", max(1, self.updates // 16)),
            *("--sample-break-mode", "none", "--max-tokens", self.batch_tokens),
            *("--valid-subset", "valid,test"),  # the first one selects
            *self.more,
        ]

    def model_arguments(self, name: str) -> list[object]:
        """The arguments that say how a model is built."""
        return [
            *("--user-dir", self.user_dir(name), "--task", "language_modeling"),
            *self.attention_arguments(name),
            *("--decoder-layers", self.layers, "--decoder-attention-heads", self.heads),
            *("--decoder-embed-dim", self.width, "--decoder-ffn-embed-dim", 4 * self.width),
            *("--decoder-input-dim", self.width, "--decoder-output-dim", self.width),
            *"--share-decoder-input-output-embed --dropout 0.0".split(),  # a short training repeats little
            *("--tokens-per-sample", self.tokens_per_sample),
        ]

    def user_dir(self, name: str) -> str:
        """Where fairseq finds the architecture of a model."""
        return "fairseq_plugin"

    def notes(self) -> list[str]:
        """Notes that explain the additions in the names of the models."""
        return addition_notes(self.models)

    def attention_arguments(self, name: str) -> list[object]:
        """The architecture of a model; its window or chunk, where it has one, is a quarter of a sequence."""
        attention = mechanism_of(name)
        architecture = _ARCHITECTURES.get(attention, f"{attention}_lm")
        prefix = option_prefix(architecture)
        arguments = ["--arch", architecture]
        described = ATTENTIONS[attention].Options.described()
        for option in _REACHES:
            if option in described and not described[option].speed_only:
                arguments += [prefix + option.replace("_", "-"), max(1, self.tokens_per_sample // 4)]
        return arguments + addition_arguments(name, prefix)
