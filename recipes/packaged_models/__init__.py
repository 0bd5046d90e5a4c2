"""Train the small models that are part of the packages: one of digits with timm, one of characters with fairseq."""
