"""Messages that are logged while a checkpoint is loaded."""

import logging

import pytest


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of the logger ``timm_plugin`` only, since timm's loggers also write."""
    records = [record for record in caplog.records if record.name == "timm_plugin"]
    return [record.message for record in records if record.levelno >= logging.WARNING]
