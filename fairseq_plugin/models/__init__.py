"""Architectures, registered with fairseq; fairseq itself imports every file here that does not begin with _."""
