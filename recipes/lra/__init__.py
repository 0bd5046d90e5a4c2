"""The Long Range Arena: long sequences and their labels. See README.md."""
