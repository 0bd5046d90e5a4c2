"""Tests of recipes/offline_rl."""
