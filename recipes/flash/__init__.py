"""The FLASH paper: its three corpora, its commands, and a comparison of its models on a CPU; see README.md."""
