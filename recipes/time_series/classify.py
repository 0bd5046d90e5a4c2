"""Fit one of the classical methods of the Flowformer paper's Table 6 to prepared series, and log its accuracy.

Run ``python -m recipes.time_series.classify work/vowels --model rocket --seed 1``; the log has fairseq-train's format.
``dtw`` is the nearest neighbour by dynamic time warping. ``rocket`` is a ridge classifier on random convolutions.
``hist_gradient_boosting`` is scikit-learn's gradient boosted trees, instead of the paper's XGBoost, on the concatenated
steps and channels; steps beyond the end of a shorter series are missing values.
"""

import datetime
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common.command_parser import CommandParser
from fairseq_plugin.data.series_folder import Label, Split, read_description, read_split

from ..shared.scripts import RecipeFailed, script
from . import dtw, rocket

Series = Sequence[np.ndarray]


def classify_by_dtw(train: Split, test: Series, seed: int) -> list[Label]:
    """Predict the label of the nearest training series; not random."""
    return [train.labels[i] for i in dtw.nearest(train.series, test, _progress)]


def classify_by_rocket(train: Split, test: Series, seed: int) -> list[Label]:
    """Fit a ridge classifier to features of random convolutions; leave-one-out selects the regularisation."""
    from sklearn.linear_model import RidgeClassifierCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    steps = max(map(len, train.series))
    kernels = rocket.draw_kernels(train.series[0].shape[1], steps, rocket.KERNELS, np.random.default_rng(seed))
    split_features = [
        rocket.features(rocket.together(split_series, steps), kernels, _progress)
        for split_series in (train.series, test)
    ]
    model = make_pipeline(StandardScaler(with_mean=False), RidgeClassifierCV(np.logspace(-3, 3, 10)))
    return list(model.fit(split_features[0], train.labels).predict(split_features[1]))


def classify_by_hist_gradient_boosting(train: Split, test: Series, seed: int) -> list[Label]:
    """Fit scikit-learn's histogram-based gradient boosting, with its defaults; not random below 10,000 series."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    steps = max(map(len, train.series))
    model = HistGradientBoostingClassifier(random_state=seed)
    model.fit(_flat(train.series, steps), np.array(train.labels))
    return list(model.predict(_flat(test, steps)))


#: The classical methods by name.
CLASSIFIERS: dict[str, Callable[[Split, Series, int], list[Label]]] = {
    "dtw": classify_by_dtw,
    "rocket": classify_by_rocket,
    "hist_gradient_boosting": classify_by_hist_gradient_boosting,
}
#: The methods that draw random numbers, so that results differ between seeds.
RANDOM = ("rocket",)


def accuracy(name: str, folder: Path, seed: int) -> float:
    """The accuracy of a method on the test series of a prepared ``folder``, in per cent.

    As for the networks, series are standardised, and test series are cut to the length of the longest training series.

    Raises:
        ValueError: the folder lacks the splits or is damaged, or series are too short for the method.
        RecipeFailed: scikit-learn is not installed.
    """
    description = read_description(folder)
    train, test = (_standardised(read_split(folder, split), description) for split in ("train", "test"))
    try:
        predictions = CLASSIFIERS[name](train, test.series, seed)
    except ModuleNotFoundError as error:
        raise RecipeFailed(f"--model {name} needs scikit-learn ({error}). Run: pip install '.[time_series]'") from error
    return 100.0 * float(np.mean([prediction == label for prediction, label in zip(predictions, test.labels)]))


def _standardised(split: Split, described) -> Split:
    series = [
        described.standardise(values[: described.longest], f"series {i}") for i, values in enumerate(split.series)
    ]
    return Split(series, split.labels)


def _flat(series: Series, steps: int) -> np.ndarray:
    """Series (T, C) as rows (N, steps C); steps that a series does not have are NaN."""
    padded = [np.pad(values, ((0, steps - len(values)), (0, 0)), constant_values=np.nan) for values in series]
    return np.stack(padded).reshape(len(series), -1)


_progress = partial(tqdm, leave=False, disable=None)


def log(name: str, message: str) -> None:
    """Print a line in the format of fairseq-train's log."""
    print(f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S} | INFO | {name} | {message}", flush=True)


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.time_series.classify", description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, metavar="DIR", help="folder that recipes.time_series.prepare has written")
    parser.add_argument("--model", choices=CLASSIFIERS, required=True, help="the method")
    parser.add_argument("--seed", type=int, default=1, help=f"of what is drawn by {', '.join(RANDOM)} (%(default)s)")
    return parser


@script("classify")
def main(arguments: Iterable[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    log("recipes.time_series.classify", f"fitting {options.model}, seed {options.seed}")
    test_accuracy = accuracy(options.model, options.data, options.seed)
    # As many digits as fairseq logs.
    log("test", json.dumps({"epoch": 1, "test_accuracy": f"{test_accuracy:.1f}", "test_num_updates": "1"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
