"""Registering models in timm's registry, quietly when it is done again."""

import warnings
from typing import Callable

from timm.models import is_model, model_entrypoint, register_model


def register_once(entrypoint: Callable) -> Callable:
    """timm's ``register_model`` that does not warn when a reload registers the same function of the same module again.

    A name that somebody else has registered still gets timm's "Overwriting" warning.
    """
    name = entrypoint.__name__
    ours = is_model(name) and model_entrypoint(name).__module__ == entrypoint.__module__
    with warnings.catch_warnings():
        if ours:
            warnings.simplefilter("ignore")
        return register_model(entrypoint)
