"""The helpers under their former name, until the last test has moved on to ``helpers``."""

from .helpers.commands import masked_training_command  # noqa: F401
from .helpers.logs import *  # noqa: F403
from .helpers.masked_models import *  # noqa: F403
from .helpers.text import *  # noqa: F403
