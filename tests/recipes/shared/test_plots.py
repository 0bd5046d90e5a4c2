"""Pictures of comparisons: the content of their curves, and the labels of their axes."""

import pytest
from matplotlib import pyplot as plt

from recipes.shared.plots import STYLE, Series, curves_and_dots, label_upwards


def test_curves_are_means_where_every_seed_was_evaluated() -> None:
    """An interrupted training may have one more evaluation, at a later update than the others."""
    seeds = [[(1, 4.0), (2, 2.0), (3, 9.0)], [(1, 6.0), (2, 3.0)]]
    models = [Series("linear", seeds, 1.0, [2.0, 3.0], True), Series("flow", seeds[::-1], 2.0, [3.0], False)]
    with plt.rc_context(STYLE):
        figure, curves, _ = curves_and_dots(models)
    plt.close(figure)
    assert [line.get_xydata().tolist() for line in curves.lines] == [[[1.0, 5.0], [2.0, 2.5]]] * 2


@pytest.mark.parametrize("limits", [(60, 71), (6, 18), (5, 60), (40, 700), (2, 5000)])
def test_labels_of_a_logarithmic_axis_do_not_overlap(limits: tuple[float, float]) -> None:
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.5, 4.8), layout="constrained")
        axes.set(yscale="log", ylim=limits)
        label_upwards(axes)
        figure.draw_without_rendering()
    shown = [tick.label1 for tick in axes.yaxis.get_major_ticks() if limits[0] <= tick.get_loc() <= limits[1]]
    boxes = [label.get_window_extent() for label in shown]
    plt.close(figure)
    assert len(boxes) >= 3 and all(label.get_text() for label in shown) and not axes.yaxis.get_minorticklocs().size
    assert all(below.y1 < above.y0 for below, above in zip(boxes, boxes[1:]))
