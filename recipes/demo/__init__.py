"""Four small language models with fairseq and an image model with timm, in minutes."""
