"""Tests of recipes/enwik8."""
