"""Messages that are logged when a checkpoint is loaded."""

import logging

import pytest


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of the logger ``timm_plugin`` alone: timm's own speak too."""
    records = [record for record in caplog.records if record.name == "timm_plugin"]
    return [record.message for record in records if record.levelno >= logging.WARNING]
