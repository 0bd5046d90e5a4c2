"""Pictures of comparisons: what their curves show."""

from matplotlib import pyplot as plt

from recipes.shared.plots import STYLE, Drawn, curves_and_dots


def test_curves_are_means_where_every_seed_was_evaluated() -> None:
    """A training that was interrupted at its end is evaluated once more, at one update more than the others."""
    seeds = [[(1, 4.0), (2, 2.0), (3, 9.0)], [(1, 6.0), (2, 3.0)]]
    models = [Drawn("linear", seeds, 1.0, [2.0, 3.0], True), Drawn("flow", seeds[::-1], 2.0, [3.0], False)]
    with plt.rc_context(STYLE):
        figure, curves, _ = curves_and_dots(models)
    plt.close(figure)
    assert [line.get_xydata().tolist() for line in curves.lines] == [[[1.0, 5.0], [2.0, 2.5]]] * 2
