"""The look of the recipes' pictures, which are written to files: no display is needed."""

import matplotlib

matplotlib.use("Agg")

#: Options of matplotlib.
STYLE = {"font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False}
#: Okabe and Ito's colours, told apart by every reader.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
#: Of lines, for readers in black and white.
DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
