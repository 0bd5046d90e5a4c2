"""The Long Range Arena: classification of long sequences. See README.md."""
