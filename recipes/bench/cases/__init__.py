"""The cases by name; a new one is a function that builds its forms and a line here."""

from ..work import Case
from . import daft, flow, images, language_models, packages, rates

CASES: dict[str, Case] = {
    case.name: case for module in (rates, flow, language_models, images, daft, packages) for case in module.CASES
}
