"""What loading a checkpoint says."""

from typing import List

import pytest


def said(caplog: pytest.LogCaptureFixture) -> List[str]:
    """Messages of ``timm_plugin.loading`` alone: other tests of a process may have let timm and all others speak."""
    return [record.message for record in caplog.records if record.name == "timm_plugin.loading"]
