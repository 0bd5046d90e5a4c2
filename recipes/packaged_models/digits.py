"""Train flowformer_hier_digits on scikit-learn's digits with several seeds; write the weights that the package has.

Run ``python -m recipes.packaged_models.digits`` from the checkout's root. Each seed has the demo's training, and its
last checkpoint is taken. Run the command again to go on with the seeds that are missing.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import timm

import timm_plugin  # noqa: F401  (registers the model)
from common.files.tensor_files import save_safetensors
from timm_plugin.convert import read_weights

from .. import runs
from ..images import loaders, validate, write_digits

MODEL = "flowformer_hier_digits"
#: The weights of the package are those of this seed, whatever the others reach.
CHOSEN_SEED = 1


def train_command(digits: Path, epochs: int, seed: int, output: Path) -> list[object]:
    """Python's arguments that train as the demo does."""
    return [
        *("-m", "recipes.demo.train_digits", "--data-dir", digits, "--device-modules", "timm_plugin"),
        *("--model", MODEL, "--num-classes", 10, "--epochs", epochs, "--warmup-epochs", min(2, epochs - 1)),
        *"--batch-size 64 --opt adamw --lr 2e-3 --weight-decay 0.05 --sched cosine --smoothing 0.1".split(),
        *"--scale 0.7 1.0 --hflip 0 --color-jitter 0 --workers 0 --checkpoint-hist 1".split(),
        *("--seed", seed, "--output", output, "--experiment", f"seed-{seed}"),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, write the weights, and print how many of the held-out digits are right with them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("work/packaged_digits"), help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="train with seeds 1 to N (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=30, help="of each training (default: %(default)s)")
    options = parser.parse_args(arguments)
    runs.begin(options.out, ["epochs", options.epochs])
    digits = options.out / "digits"
    write_digits(digits)
    for seed in range(1, options.seeds + 1):
        target = options.out / f"{MODEL}-{seed}.safetensors"
        if not target.exists():
            runs.run(train_command(digits, options.epochs, seed, options.out), options.out / f"seed-{seed}.log")
            weights = read_weights(options.out / f"seed-{seed}" / "last.pth.tar")
            save_safetensors(
                {name: x.half() if x.is_floating_point() else x for name, x in weights.items()}, target, {}
            )
        model = timm.create_model(MODEL, pretrained=True, pretrained_cfg_overlay={"file": str(target)})
        chosen = ", the one in the package" if seed == CHOSEN_SEED else ""
        top1 = validate(model, loaders(digits, model)[1])["top1"]
        print(f"seed {seed}{chosen}: {top1:.2f} % of the held-out digits right")


if __name__ == "__main__":
    main()
