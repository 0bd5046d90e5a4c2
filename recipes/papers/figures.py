"""The command that draws each figure of the papers, or why there is none."""

_DIAGRAM = "a diagram of the method; nothing is measured in it"
_MAPS = "python -m recipes.imagenet.pictures --checkpoint output/train/RUN/model_best.pth.tar --image IMAGE"
_VOWELS = "python -m recipes.time_series.pictures --checkpoint checkpoints/RUN/checkpoint_last.pt --data FOLDER"
_RUNS = "a picture of trainings of ImageNet, which were not run here; their commands: python -m recipes.papers daft "
_SWEEP = f"{_RUNS}2 --row DAFT-conv, with other --model-kwargs window=N, and local_only=True for no global connectivity"
_CURVES = f"{_RUNS}2 and 3; timm writes the curve of each as summary.csv"
_WIDTHS = f"{_RUNS}2, with other --model-kwargs embed_dim=N"
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
        "2": _SWEEP,
        "3": _DAFT,
        "4": _COMPLETED,
        "5": _CURVES,
        "6": _CURVES,
        "7": _WIDTHS,
        "8": _DAFT,
        "9": _DAFT,
        "10": _DAFT,
        **dict.fromkeys(("11", "12", "13", "14"), f"{_DAFT} --image IMAGE"),
    },
}


def command_of(paper: str, number: str) -> str:
    """The command that draws a figure, which begins with "python", or the reason why there is none."""
    return _DRAWN[paper][number]
