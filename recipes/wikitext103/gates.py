"""Compare gates that forget: train language models with gates that are fixed, learned, or read the token.

``python -m recipes.wikitext103.gates --file FILE`` from the checkout's root, with the options and the output of
``recipes.wikitext103.compare``.
"""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ..shared.language_models import GateVariants, models_option, names_with_gates
from ..shared.variants import NO_POSITIONS
from . import compare

#: Softmax attention, and ways to make sums over the past depend on the order of tokens.
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


@dataclass(frozen=True, kw_only=True)
class Gates(GateVariants):
    """Options of language models, including variants of their gates."""

    models: Sequence[str] = models_option(names_with_gates, DEFAULT_MODELS)


EXPERIMENT = dataclasses.replace(
    compare.EXPERIMENT, command="recipes.wikitext103.gates", about=__doc__.splitlines()[0], options=Gates
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
