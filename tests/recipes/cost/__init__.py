"""Tests of recipes/cost."""
