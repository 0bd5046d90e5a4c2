"""The command that draws each figure of the papers, or why there is none."""

_DIAGRAM = "a diagram of the method; nothing is measured in it"
_FOUR = "softmax linear cosformer flowformer"
_MAPS = (
    "python -m recipes.imagenet.pictures --output pictures --image cat.jpg dog.jpg --checkpoint "
    + " ".join(f"output/train/{name}_hier_s/model_best.pth.tar" for name in _FOUR.split())
    + f" --names {_FOUR}"
)
_VOWELS = (
    "python -m recipes.time_series.pictures --data work/time_series/SpokenArabicDigits --series 0 1 2 "
    "--output side_by_side.png --checkpoint "
    + " ".join(f"checkpoints/time_series/{name}.SpokenArabicDigits/checkpoint_last.pt" for name in _FOUR.split())
)
_CURVES = "python -m recipes.daft.curves --runs"
_FLASH = "python -m recipes.flash.compare --file TEXT --figure {}"
_COMPLETED = (
    "python -m recipes.cifar10_pixels.complete --checkpoint checkpoints/daft_conv_lm_cifar10/checkpoint_best.pt "
    "--data work/cifar10_pixels/data-bin --output completed.png"
)
_DAFT = "python -m recipes.daft.pictures --checkpoint output/train/RUN/model_best.pth.tar"
#: Paper -> figure -> a command, which begins with "python", or a reason.
_DRAWN = {
    "flowformer": {
        "1": _DIAGRAM,
        "2": _DIAGRAM,
        "3": _DIAGRAM,
        "4": _MAPS,
        "5": _MAPS,
        "6": "pictures of the environments of D4RL, which gymnasium draws with render_mode='rgb_array'",
        "7": _MAPS,
        "8": _VOWELS,
        "9": _MAPS,
    },
    "flash": {
        "1": _FLASH.format(6),
        "2": _DIAGRAM,
        "4": _DIAGRAM,
        **{number: _FLASH.format(number) for number in ("3", "5", "6", "7", "8")},
    },
    "daft": {
        "1": _DAFT,
        "2": f"{_CURVES} work/daft/kernel/* --across kernel_size --output kernels.png",
        "3": _DAFT,
        "4": _COMPLETED,
        "5": f"{_CURVES} output/train/daft_* output/train/deit_*",
        "6": f"{_CURVES} output/train/daft_conv_b_384*",
        "7": f"{_CURVES} work/daft/width/* --across width --output widths.png",
        "8": _DAFT,
        "9": _DAFT,
        "10": _DAFT,
        **dict.fromkeys(("11", "12", "13", "14"), f"{_DAFT} --image IMAGE"),
    },
}


def command_of(paper: str, number: str) -> str:
    """The command that draws a figure, which begins with "python", or the reason why there is none."""
    return _DRAWN[paper][number]
