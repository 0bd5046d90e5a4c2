"""Train flowformer_hier_digits on scikit-learn's digits with several seeds; write the weights that the package has.

Run ``python -m recipes.packaged_models.digits`` from the checkout's root. Each seed has the demo's training, and its
last checkpoint is taken. Run the command again to go on with the seeds that are missing.
"""

import sys
from pathlib import Path

import timm
from torch import nn

import timm_plugin  # noqa: F401  (registers the model)
from common.command_parser import CommandParser
from common.files.output_files import new_folder
from common.files.tensor_files import save_safetensors
from timm_plugin.convert import read_weights

from ..demo.images import MODEL, train_command
from ..shared.commands import run
from ..shared.digits import write_digits
from ..shared.image_training import loaders, validate
from ..shared.scripts import positive_int, script
from ..shared.settings import keep_settings
from ..shared.working_folder import atomic_write, working_folder

COMMAND = "recipes.packaged_models.digits"
#: The weights of the package are those of this seed, whatever the others reach.
CHOSEN_SEED = 1
_TRAINER = ["-m", "recipes.demo.train_digits"]


def train_seed(out: Path, seed: int, epochs: int) -> Path:
    """Train with ``seed`` unless ``out`` has the result; returns the folder of timm's files."""
    folder = out / f"seed-{seed}"
    if not folder.exists():
        with new_folder(folder, COMMAND) as unfinished:
            run(train_command(_TRAINER, out / "digits", epochs, unfinished, seed), out / "logs" / f"{folder.name}.log")
    return folder


def write_halved(checkpoint: Path, target: Path) -> None:
    """Write the weights in a checkpoint of timm to ``target``, as safetensors in half precision."""
    weights = {name: x.half() if x.is_floating_point() else x for name, x in read_weights(checkpoint).items()}
    with atomic_write(target) as part:
        save_safetensors(weights, part, {})


def held_out_accuracy(model: nn.Module, digits: Path) -> float:
    """The share of the held-out digits in the folder ``digits`` that ``model`` classifies correctly, in per cent."""
    return validate(model, loaders(digits, model)[1])["top1"]


def parser() -> CommandParser:
    """The options of the command."""
    parser = CommandParser(prog=f"python -m {COMMAND}", description=__doc__.splitlines()[0])
    out = Path("work/packaged_digits")
    parser.add_argument("--out", type=Path, default=out, help="folder for everything (default: %(default)s)")
    parser.add_argument("--seeds", type=positive_int, default=3, help="train with seeds 1 to N (default: %(default)s)")
    parser.add_argument("--epochs", type=positive_int, default=30, help="of each training (default: %(default)s)")
    return parser


@script("packaged_models.digits")
def main(arguments: list[str] | None = None) -> int:
    """Train and write the weights; returns 0."""
    options = parser().parse_args(arguments)
    out, seeds = options.out.absolute(), range(1, options.seeds + 1)
    whole = dict.fromkeys(("digits", *(f"seed-{seed}" for seed in seeds)), COMMAND)
    with working_folder(out, COMMAND, whole=whole):
        keep_settings(out / "settings.json", {"epochs": options.epochs})
        if not (out / "digits").exists():
            with new_folder(out / "digits", COMMAND) as unfinished:
                write_digits(unfinished)
        for seed in seeds:
            target = out / f"{MODEL}-{seed}.safetensors"
            write_halved(train_seed(out, seed, options.epochs) / "last.pth.tar", target)
            model = timm.create_model(MODEL, pretrained=True, pretrained_cfg_overlay={"file": str(target)})
            chosen = ", the one in the package" if seed == CHOSEN_SEED else ""
            print(f"seed {seed}{chosen}: {held_out_accuracy(model, out / 'digits'):.2f} % of the held-out digits right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
