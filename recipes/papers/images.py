"""The rows of a table of image models in small: models of timm and their trainings on handwritten digits."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..shared.comparison import PlannedTraining, planned_trainings
from ..shared.digits import SIDE
from ..shared.experiment import Data, option
from ..shared.trainings import Training
from .building import timm_arguments
from .entries import entries_of
from .measured import value
from .small import IMAGE_TABLES, TableOptions, folder_of
from .tables import read_paper
from .trainings import Training as Row
from .trainings import trainings_of

TRAINER = ("-m", "recipes.demo.train_digits")
#: Side of a patch. Digits have 8 x 8 patches; the paper's images have 14 x 14, and its windows are for these.
PATCH, _GRID, _PUBLISHED_GRID = 4, 8, 14
#: DAFT in DeiT-S's shape: the rank of its position biases is a third of the width; its window, and its epochs.
_BIAS_SHARE, _WINDOW, _EPOCHS = 3, 11, 300


@dataclass(frozen=True, kw_only=True)
class ImageRows(TableOptions):
    """The options of a table's rows as models of images: the size and the budget of all rows."""

    quick: bool = False
    lr: float = option(2e-3, "highest learning rate, of all models (%(default)s)")
    width: int = option(48)
    layers: int = option(2)
    heads: int = option(4)
    epochs: int = option(10)

    def completed(self) -> "ImageRows":
        """The options with the names of the models, and their folder; ArgumentTypeError for an unknown table."""
        self.check_table(IMAGE_TABLES)
        return replace(self, models=list(self.models_by_name), out=self.folder())

    @property
    def models_by_name(self) -> dict[str, "Model"]:
        """The models of the table; see ``models_of``."""
        return models_of(self.paper, self.table)


class Model(NamedTuple):
    """A model of a table."""

    row: str
    column: str
    training: Row
    published: str  # its cell


def models_of(paper: str, table: str) -> dict[str, Model]:
    """The models of a table by their names, the best first as published."""
    columns, models, printed = IMAGE_TABLES[paper, table], {}, read_paper(paper).tables[table]
    for row, entry in entries_of(paper)[table].items():
        for column, training in zip(columns, trainings_of(entry)):
            name = row if len(columns) == 1 else f"{row}, {column}"
            models[name] = Model(row, column, training, printed.cell(row, column))
    return dict(sorted(models.items(), key=lambda item: -value(item[1].published)))


def small_model(model: str, size: ImageRows) -> tuple[str, dict[str, Any]]:
    """A model of timm in the shape of DeiT-S or of Flowformer's Table 5: name and arguments, for digits in ``size``."""
    name, kwargs = timm_arguments(model)
    if name.endswith("_hier_s"):  # two stages, the second of ``size.width``
        stages = {"embed_dims": (size.width // 2, size.width), "depths": (1, size.layers - 1)}
        return name, {"img_size": SIDE, "patch_size": PATCH, **stages, "num_heads": size.heads, **kwargs}
    small: dict[str, Any] = {"img_size": SIDE, "patch_size": PATCH, "embed_dim": size.width}
    if name.startswith("mixer"):
        return name, {**small, "num_blocks": size.layers, "mlp_ratio": (4 * _GRID**2 / size.width, 4.0), **kwargs}
    small |= {"depth": size.layers, "num_heads": size.width if name == "daft_conv_s" else size.heads}
    if name.startswith("daft_conv"):
        kwargs["window"] = _odd(kwargs.get("window", _WINDOW) * _GRID / _PUBLISHED_GRID)
    if name.startswith("daft_full"):
        small["bias_dim"] = size.width // _BIAS_SHARE
    return name, {**small, **kwargs}


def _odd(side: float) -> int:
    """The odd number nearest to ``side``."""
    return 2 * round((side - 1) / 2) + 1


def typed(kwargs: dict[str, Any]) -> list[str]:
    """Arguments of a model as they are typed on a command line."""
    return [f"{name}={setting}".replace(" ", "") for name, setting in kwargs.items()]


def epochs_of(training: Row, size: ImageRows) -> int:
    """``size.epochs``, scaled down for a row that the paper trains for fewer epochs."""
    train = next(words for words in training.commands() if "torchrun" in words)
    row_epochs = int(train[train.index("--epochs") + 1]) if "--epochs" in train else _EPOCHS
    return max(1, round(size.epochs * row_epochs / _EPOCHS))


def train_arguments(out: Path, data: Path, training: Row, size: ImageRows, seed: int) -> list[object]:
    """Arguments of the trainer: DeiT's optimiser with a rate for a short training, and crops that keep the digit."""
    name, kwargs = small_model(training.model, size)
    epochs = epochs_of(training, size)
    return [
        *("--data-dir", data, "--device-modules", "timm_plugin", "--model", name, "--num-classes", 10),
        *("--model-kwargs", *typed(kwargs), "--img-size", SIDE),
        *("--epochs", epochs, "--warmup-epochs", min(2, epochs - 1)),
        *("--batch-size", 64, "--opt", "adamw", "--lr", size.lr, "--weight-decay", 0.05, "--sched", "cosine"),
        *("--scale", 0.7, 1.0, "--hflip", 0, "--color-jitter", 0, "--workers", 0, "--checkpoint-hist", 1),
        *("--seed", seed, "--output", out, "--experiment", "timm"),
    ]


def planned_rows(options: ImageRows, data: Data) -> list[PlannedTraining]:
    """Every model with every seed."""
    models, plans = options.models_by_name, []
    for planned in planned_trainings(options.models, range(1, options.seeds + 1), lambda model, seed: []):
        name = f"{folder_of(planned.model)}.{planned.seed}"
        out, row = options.out / "runs" / name, models[planned.model].training
        arguments = train_arguments(out, data.folder, row, options, planned.seed)
        plans.append(planned._replace(training=Training(name, arguments, TRAINER)))
    return plans
