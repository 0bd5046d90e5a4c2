"""Train a language model with every causal attention on any text, with one budget; print perplexity, speed and memory.

Run ``python -m recipes.wikitext103.compare --file FILE --seeds 3`` from the checkout's root. Models are trained by
fairseq-train. Run it again to continue an interrupted comparison.
"""

import sys

from ..shared.comparison import MODEL, SEEDS, Column
from ..shared.experiment import MINUTES, PARAMETERS, PEAK, Experiment, Picture, Record, mean, median
from ..shared.language_models import WHOLE, LanguageModels, prepare, read_perplexity, state_is_constant
from ..shared.variants import variant_notes


def notes(options: LanguageModels, facts: Record) -> list[str]:
    """Notes below the table."""
    splits = ", ".join(f"{count:,} {split}" for split, count in facts["tokens"].items())
    return [
        f"perplexity of the test text ({facts['unit']}), mean ± standard deviation over seeds, of the checkpoint that "
        f"is best on the valid text; tokens: {splits}",
        f"{options.updates:,} updates of {options.batch_tokens:,} tokens in sequences of "
        f"{options.tokens_per_sample:,}, {options.layers} layers of width {options.width}, {options.heads} heads, "
        f"highest learning rate {options.lr:g} for all",
        f"windows and chunks, where a model has them, are {max(1, options.tokens_per_sample // 4)} tokens",
        *variant_notes(options.models),
        "tokens per second in training, and the largest memory of the process, libraries included: of fairseq-train on"
        " one thread of this machine, with whatever else it did",
    ]


EXPERIMENT = Experiment(
    command="recipes.wikitext103.compare",
    about=__doc__.splitlines()[0],
    options=LanguageModels,
    title="Language models with one budget",
    columns=(
        MODEL,
        PARAMETERS,
        Column("perplexity", mean("perplexity")),
        SEEDS,
        Column("tokens/s", median("tokens_per_second")),
        PEAK,
        Column("decoding state", known=lambda name: "constant" if state_is_constant(name) else "grows"),
        MINUTES,
    ),
    notes=notes,
    prepare=prepare,
    read=read_perplexity,
    picture=Picture(
        curve="curve",
        across="tokens_per_second",
        up="perplexity",
        filled=state_is_constant,
        curves={"ylabel": "perplexity, valid text", "yscale": "log", "title": "Mean over seeds"},
        dots={
            "xlabel": "training tokens per second, one thread",
            "ylabel": "perplexity, test text",
            "title": "Mean and deviation over seeds; filled: constant decoding state",
        },
    ),
    whole=WHOLE,
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
