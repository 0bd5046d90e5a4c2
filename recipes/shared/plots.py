"""The common style of the recipes' pictures. They are written to files, so no display is needed."""

import matplotlib

matplotlib.use("Agg")

#: Options for matplotlib's ``rc_context``.
STYLE = {"font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False}
#: The colours of Okabe and Ito, which colour-blind readers can tell apart.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
#: Line styles, for readers in black and white.
DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
