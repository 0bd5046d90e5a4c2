"""Table 7 of the Flowformer paper (Wu et al., ICML 2022): normalised scores on D4RL, mean and deviation over 3 seeds.

Which of the two targets, and whether the last or the best iteration is meant, the paper does not say.
"""

MODELS = ("DT", "Linear", "Reformer", "Performer", "cosFormer", "Flowformer")
#: Data set -> mean and deviation of each of ``MODELS``.
TABLE = {
    "halfcheetah-medium-expert-v2": ((83.8, 3.3), (78.2, 3.2), (81.5, 1.6), (85.1, 2.1), (85.5, 2.9), (90.8, 0.4)),
    "hopper-medium-expert-v2": ((104.0, 2.5), (107.2, 0.9), (104.2, 9.8), (93.5, 13.9), (98.1, 7.4), (109.9, 1.0)),
    "walker2d-medium-expert-v2": ((107.7, 0.6), (67.2, 27.3), (71.4, 1.8), (72.6, 2.4), (100.5, 14.5), (108.0, 0.4)),
    "halfcheetah-medium-v2": ((42.4, 0.1), (42.3, 0.2), (42.2, 0.1), (42.1, 0.2), (42.1, 0.3), (42.2, 0.2)),
    "hopper-medium-v2": ((64.2, 1.1), (58.7, 0.4), (59.9, 0.7), (59.7, 7.5), (59.8, 3.8), (66.9, 2.5)),
    "walker2d-medium-v2": ((70.6, 3.2), (57.9, 10.6), (65.8, 4.9), (63.3, 10.7), (71.4, 1.2), (71.7, 2.5)),
    "halfcheetah-medium-replay-v2": ((34.6, 0.6), (32.1, 1.5), (33.6, 0.7), (31.7, 0.9), (32.8, 3.6), (34.7, 1.5)),
    "hopper-medium-replay-v2": ((79.7, 7.4), (74.3, 7.0), (66.1, 2.6), (64.6, 24.2), (59.3, 16.5), (75.5, 14.5)),
    "walker2d-medium-replay-v2": ((62.9, 5.0), (62.1, 7.4), (50.1, 3.5), (61.3, 6.7), (60.5, 9.9), (62.0, 3.1)),
}


def published(dataset: str) -> str | None:
    """The row of a data set as text; None if the paper has none."""
    if dataset not in TABLE:
        return None
    return ", ".join(f"{model} {mean} ± {deviation}" for model, (mean, deviation) in zip(MODELS, TABLE[dataset]))
