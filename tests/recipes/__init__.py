"""Tests of the recipes: their own functions on small inputs, their commands where they are cheap."""
