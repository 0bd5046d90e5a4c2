"""Choices of a user of ``export_hf``; apart from the rest, since transformers takes seconds to import."""

#: How a text becomes symbols of a dictionary, and the files that this needs, by the names of command-line options.
KINDS: dict[str, tuple[str, ...]] = {
    "words": (),
    "split": (),
    "characters": (),
    "bytes": (),
    "sentencepiece": ("sentencepiece_model",),
    "gpt2": ("gpt2_encoder_json", "gpt2_vocab_bpe"),
}
#: All of these files.
FILES = tuple(name for names in KINDS.values() for name in names)
