"""A --user-dir for fairseq: our plugin, and --gates for language models whose gates do not read the token."""

import fairseq_plugin  # noqa: F401  registers the architectures

from . import models  # noqa: F401  registers the variants
