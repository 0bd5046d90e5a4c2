"""Options that users type keep their names, defaults and choices; update this file and CHANGELOG.md for a change."""

import json
from pathlib import Path

from common.attention import ATTENTIONS

#: Mechanism -> option -> (default, allowed names, whether it changes a result).
STORED = Path(__file__).parents[2] / "golden" / "attention_options.json"


def test_names_defaults_and_choices_are_the_stored_ones():
    stored = json.loads(STORED.read_text())
    assert set(stored) == set(ATTENTIONS)
    for name, kind in ATTENTIONS.items():
        defaults, described = kind.Options.defaults(), kind.Options.described()
        present = {
            option: {
                "default": defaults[option],
                "choices": None if description.choices is None else list(description.choices),
                "speed_only": description.speed_only,
            }
            for option, description in described.items()
        }
        assert present == stored[name], name
