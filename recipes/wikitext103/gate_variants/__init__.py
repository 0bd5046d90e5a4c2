"""A --user-dir for fairseq: our plugin, and language models with --gates, whose gates do not depend on the token."""

import fairseq_plugin  # noqa: F401  registers the architectures

from . import models  # noqa: F401  registers the variants
