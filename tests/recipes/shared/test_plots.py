"""Pictures of comparisons: the content of their curves."""

from matplotlib import pyplot as plt

from recipes.shared.plots import STYLE, Series, curves_and_dots


def test_curves_are_means_where_every_seed_was_evaluated() -> None:
    """An interrupted training may have one more evaluation, at a later update than the others."""
    seeds = [[(1, 4.0), (2, 2.0), (3, 9.0)], [(1, 6.0), (2, 3.0)]]
    models = [Series("linear", seeds, 1.0, [2.0, 3.0], True), Series("flow", seeds[::-1], 2.0, [3.0], False)]
    with plt.rc_context(STYLE):
        figure, curves, _ = curves_and_dots(models)
    plt.close(figure)
    assert [line.get_xydata().tolist() for line in curves.lines] == [[[1.0, 5.0], [2.0, 2.5]]] * 2
