"""Tests of the translation of messages."""
