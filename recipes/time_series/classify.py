"""Fit a method without attention to a data set, and log its accuracy as fairseq-train does: DTW, Rocket, boosted trees.

``python -m recipes.time_series.classify work/vowels rocket --seed 1``
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import RidgeClassifierCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sktime.transformations.panel.rocket import Rocket

from fairseq_plugin.data.series_folder import Split, read_description, read_split


@numba.njit
def warped(a: np.ndarray, b: np.ndarray) -> float:
    """The least sum of squared distances along a warping path, of all channels together and without a window."""
    sums = np.full(len(b) + 1, np.inf)
    sums[0] = 0.0
    for x in a:
        before, sums[0] = sums[0], np.inf
        for j in range(len(b)):
            above = sums[j + 1]
            sums[j + 1] = ((x - b[j]) ** 2).sum() + min(before, above, sums[j])
            before = above
    return sums[-1]


def dtw(train: Split, test: Split, seed: int) -> list:
    """The label of the nearest training series."""
    return [train.labels[int(np.argmin([warped(x, y) for y in train.series]))] for x in test.series]


def rocket(train: Split, test: Split, seed: int) -> list:
    """A ridge classifier on random convolutions; short series are filled up with zeros, and keep their level."""
    longest = max(map(len, train.series))
    learn, other = (padded(split, longest, 0.0).transpose(0, 2, 1) for split in (train, test))
    transform = Rocket(random_state=seed, normalise=False).fit(learn)
    model = make_pipeline(StandardScaler(with_mean=False), RidgeClassifierCV(np.logspace(-3, 3, 10)))
    return list(model.fit(transform.transform(learn), train.labels).predict(transform.transform(other)))


def hist_gradient_boosting(train: Split, test: Split, seed: int) -> list:
    """scikit-learn's boosted trees on all steps side by side, for the paper's XGBoost; missing steps are NaN."""
    longest = max(map(len, train.series))
    learn, other = (padded(split, longest, np.nan).reshape(len(split.series), -1) for split in (train, test))
    return list(HistGradientBoostingClassifier(random_state=seed).fit(learn, train.labels).predict(other))


METHODS: dict[str, Callable] = {"dtw": dtw, "rocket": rocket, "hist_gradient_boosting": hist_gradient_boosting}


def padded(split: Split, longest: int, value: float) -> np.ndarray:
    """Series as one array (N, T, C)."""
    filled = [np.pad(x, ((0, longest - len(x)), (0, 0)), constant_values=value) for x in split.series]
    return np.stack(filled)


def main(arguments: list[str] | None = None) -> None:
    """Fit and log."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="what recipes.time_series.data wrote")
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    described, splits = read_description(options.data), []
    for name in ("train", "test"):  # standardised and cut, as for the networks
        split = read_split(options.data, name)
        splits.append(Split([described.standardise(x[: described.longest], name) for x in split.series], split.labels))
    found = METHODS[options.method](*splits, options.seed)
    accuracy = 100.0 * np.mean([label == right for label, right in zip(found, splits[1].labels)])
    print("| test |", json.dumps({"epoch": 1, "test_accuracy": f"{accuracy:.1f}", "test_num_updates": 1}))


if __name__ == "__main__":
    main()
