"""The wheel and the source archive: their description, and a command that builds both and tries them."""
