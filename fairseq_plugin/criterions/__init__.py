"""Losses, registered with fairseq."""
