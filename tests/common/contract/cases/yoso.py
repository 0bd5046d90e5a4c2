"""YOSO-E."""

#: Promises that it cannot keep.
WITHOUT = {"differences": "the gradient of the paper is a bound of the derivative, by default"}
