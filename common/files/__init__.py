"""Files that commands read and write: whole or not at all, and never the files of others."""
