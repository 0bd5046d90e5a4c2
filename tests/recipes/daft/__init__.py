"""Tests of recipes/daft."""
