"""How comparisons name models with a short convolution, and how long that is."""

#: What follows the name of a mechanism with a short convolution in front of it.
SHORT_CONV = "+short_conv"
#: Taps of that convolution, as today's layers of linear attention have.
TAPS = 4
