"""Tests of fairseq_plugin/optim."""
