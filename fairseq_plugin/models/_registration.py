"""The registration of one model for each mechanism, whose class and options follow from the mechanism's declaration."""

import sys
from dataclasses import dataclass

from fairseq.models import register_model

from ._options import camel_case


def register_variant(prefix: str, kind: str, attention: str, base: type, options: type, further: type) -> None:
    """Register ``prefix``_``kind``, a subclass of ``base`` over the mechanism called ``attention``.

    Its options are the fields of ``options``, the mechanism's, and of ``further``. The file of ``base`` holds both
    classes under their names, so that pickle finds them: the last word of the class is that of ``base``.
    """
    name, held = f"{camel_case(prefix)}{camel_case(kind)}", {"__module__": base.__module__}
    config = dataclass(type(f"{name}Config", (options, further), held))
    attributes = {"attention_name": attention, "option_prefix": attention, "options_class": config}
    last_word = base.__name__.rpartition(camel_case(kind))[2]
    model = type(f"{name}{last_word}", (base,), {**held, "__doc__": base.__doc__, **attributes})
    for made in (config, model):
        setattr(sys.modules[base.__module__], made.__name__, made)
    register_model(f"{prefix}_{kind}", dataclass=config)(model)
