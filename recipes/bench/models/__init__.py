"""Whole models as fairseq and timm build them, and what is run of them; importing a module here imports its host."""
