"""The case of the guide's first mechanism: an option beside those that the contract tries by itself."""

VARIANTS = {"higher": {"temperature": 3.0}}
