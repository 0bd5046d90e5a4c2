"""``python -m fairseq_plugin --options ARCH`` prints every option of an architecture, with the defaults of its size."""

import argparse
import re

from fairseq.models import ARCH_MODEL_REGISTRY

from fairseq_plugin.__main__ import main, options_of
from fairseq_plugin.loading.known_options import declared_options


def test_the_options_of_every_architecture_are_printed():
    for architecture, model in ARCH_MODEL_REGISTRY.items():
        printed = options_of(architecture).format_help()
        for option in declared_options(model).values():
            shown = any(flag in printed for flag in option.option_strings)
            assert shown or option.help == argparse.SUPPRESS, (architecture, option.dest)


def test_a_default_is_that_of_the_named_size(capsys):
    main(["--options", "flash_lm_base"])
    sized = " ".join(capsys.readouterr().out.split())
    main(["--options", "flash_lm"])
    unsized = " ".join(capsys.readouterr().out.split())
    option = r"--decoder-embed-dim DECODER_EMBED_DIM .*?\(default: (\d+)\)"
    assert re.search(option, sized)[1] == "768"
    assert re.search(option, unsized)[1] == "512"
