"""Time training steps of the models of the paper's Table 11 in turns, and show them over those of Transformer++.

``python -m recipes.flash.speed``; with ``LINEARTIME_CPU_KERNELS=0`` in front of it, sums of Performer-Matmul are
products of matrices on a CPU, too.
"""

import itertools
from collections.abc import Sequence

import pandas as pd
import torch
from tqdm import tqdm

from .. import runs
from .compare import by_length
from .models import FUSED, MODELS, SHAPE, Shape, build, equal_widths

#: The rows of Table 11: Performer and Performer-Matmul are one model.
TABLE_11 = (FUSED, "performer_lm.scan", "performer_lm", "flash_lm")


def main(arguments: Sequence[str] | None = None) -> None:
    """Time and print."""
    parser = runs.parser(__doc__.splitlines()[0], "work/flash/speed")
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="NAME", default=list(TABLE_11))
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048], help="of sequences")
    sizes = {"tokens": 2048, "width": SHAPE.width, "layers": SHAPE.layers, "heads": SHAPE.heads, "vocabulary": 2000}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="of every step or model")
    options = parser.parse_args(arguments)
    if FUSED not in options.models:
        parser.error(f"--models is {' '.join(options.models)}; allowed: {FUSED}, and others beside it")
    if options.quick:
        options.lengths, options.tokens, options.width = [64, 128], 128, 32
    options.out.mkdir(parents=True, exist_ok=True)
    shape = Shape(options.width, options.layers, options.heads)
    widths, rows = equal_widths(options.models, options.lengths[0], shape, options.vocabulary), []
    for seed, length in tqdm([*itertools.product(range(1, options.seeds + 1), options.lengths)]):
        torch.manual_seed(seed)
        built = {x: build(shape, x, widths.get(x), length, options.vocabulary) for x in options.models}
        count = max(1, options.tokens // length)
        tokens = torch.randint(4, options.vocabulary, (count, length + 1))
        times = runs.in_turns({name: runs.training_step(model, tokens) for name, model in built.items()})
        for name, model in built.items():
            parameters = sum(weight.numel() for weight in model.parameters())
            measured = {"seconds": times[name], "ratio": times[name] / times[FUSED]}
            measured["tokens_per_second"] = count * length / times[name]
            rows.append({"model": name, "seed": seed, "length": length, "parameters": parameters, **measured})
    found = pd.DataFrame(rows)
    ratios = by_length(found, "ratio", runs.spread(2))
    ratios.insert(2, "parameters", found.groupby("model", sort=False).parameters.first().map("{:,}".format).values)
    notes = [
        f"time of loss and gradients of {options.tokens:,} tokens, without an update, over Transformer++'s; models "
        f"take turns; mean ± standard deviation; runs: {options.seeds}",
        "Table 11 has Performer (scan) as Performer, and Performer as Performer-Matmul",
        f"{options.layers} layers (FLASH twice as many units) of width {options.width}, {options.heads} heads, "
        f"{options.vocabulary:,} subwords, which are random; threads: {torch.get_num_threads()}",
    ]
    shown = {
        "Time of a training step over Transformer++'s, by sequence length": ratios,
        f"Seconds per step of {options.tokens:,} tokens": by_length(found, "seconds", runs.spread(3)),
    }
    runs.report(options.out, shown, notes, found)


if __name__ == "__main__":
    main()
