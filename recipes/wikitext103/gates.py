"""Take a gate that forgets apart: train language models with gates that are fixed, learned, or read the token.

``python -m recipes.wikitext103.gates --file FILE`` from the checkout's root, with the options and the output of
``recipes.wikitext103.compare``.
"""

import sys
from collections.abc import Sequence

from ..shared.additions import addition_arguments, mechanism_of
from ..shared.scripts import script
from .compare import compare, parser
from .gate_variants.models import GATES
from .plan import Plan, model_names

COMMAND = "recipes.wikitext103.gates"
#: After a model's name: it has no positions.
NO_POSITIONS = "+no_positions"
_NOTES = {
    "+fixed": "gates of each head that stay as they are at first: 32 to 1,024 tokens are remembered",
    "+learned": "gates of each head that are learned, the same for every token",
    NO_POSITIONS: "tokens have no positions; their order is in the sums alone",
}
#: What is compared: softmax attention, and the ways to give a sum over the past an order.
DEFAULT_MODELS = (
    "softmax",
    f"softmax{NO_POSITIONS}",
    "linear",
    "linear+fixed",
    "linear+learned",
    "linear+forget",
    "linear+forget_channel",
    "linear+short_conv",
    "linear+forget+short_conv",
    f"linear{NO_POSITIONS}",
    f"linear+forget{NO_POSITIONS}",
    "flow",
    "flow+fixed",
    "flow+forget",
    "flow+short_conv",
    "flow+forget+short_conv",
    "rfa",
    "rfa+forget",
    "rfa_gate",
    "rfa_gate+short_conv",
)


def names() -> list[str]:
    """The models of ``recipes.wikitext103.compare``, those with other gates, and all without positions."""
    plain = [*model_names(), *(f"{name}+{gates}" for name in ("linear", "flow") for gates in GATES)]
    return plain + [name + NO_POSITIONS for name in plain]


class GatePlan(Plan):
    """The budget of language models, with variants of their gates."""

    def model_arguments(self, name: str) -> list[object]:
        """The arguments that say how a model is built; those that are further named come last."""
        arguments = super().model_arguments(name.removesuffix(NO_POSITIONS))
        if name.endswith(NO_POSITIONS):
            arguments.append("--no-token-positional-embeddings")
        return arguments

    def user_dir(self, name: str) -> str:
        """The folder of our plugin, or ``gate_variants`` for a model with gates of its own."""
        return "recipes/wikitext103/gate_variants" if _gates(name) else super().user_dir(name)

    def notes(self) -> list[str]:
        """Notes that explain the additions and variants in the names of the models."""
        used = {f"+{part}" for name in self.models for part in name.split("+")[1:]}
        return super().notes() + [f"{part}: {note}" for part, note in _NOTES.items() if part in used]

    def attention_arguments(self, name: str) -> list[object]:
        """The architecture of a model."""
        mechanism, gates = mechanism_of(name), _gates(name)
        if gates is None:
            return super().attention_arguments(name)
        forget = addition_arguments(f"{mechanism}+forget", f"--{mechanism}-")
        return ["--arch", f"{mechanism}_gate_variant", *forget, "--gates", gates]


def _gates(name: str) -> str | None:
    """Which gates of ``gate_variants`` a model has; None for those of our plugin, or for none."""
    return next((gates for gates in GATES if gates in name.split("+")[1:]), None)


@script("gates")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser(COMMAND, __doc__.splitlines()[0], names(), DEFAULT_MODELS).parse_args(arguments)
    return compare(options, GatePlan, COMMAND, arguments)


if __name__ == "__main__":
    sys.exit(main())
