"""The helpers under their former name, until the last test has moved on to ``helpers``."""

from tests.processes import CHECKOUT, run_program  # noqa: F401

from .helpers.commands import *  # noqa: F403
from .helpers.language_models import *  # noqa: F403
from .helpers.text import *  # noqa: F403
