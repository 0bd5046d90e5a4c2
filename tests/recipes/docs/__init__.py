"""Tests of recipes/docs."""
