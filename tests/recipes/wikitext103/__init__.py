"""Tests of recipes/wikitext103."""
