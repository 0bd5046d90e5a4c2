"""Shared by the tests of the fairseq plugin: toy text and images, small models, commands, logs, checkpoints."""
