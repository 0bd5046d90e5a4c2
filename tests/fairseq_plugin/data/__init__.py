"""Tests of fairseq_plugin/data."""
