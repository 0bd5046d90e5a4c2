"""Tests of recipes/time_series."""
