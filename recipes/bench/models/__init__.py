"""Models as fairseq and timm build them, and their training and decoding steps. Each file imports its host."""
