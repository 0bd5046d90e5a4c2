"""fairseq's tasks as a command line sets them up, in this process."""

from pathlib import Path
from typing import Any

from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks import FairseqTask

import fairseq_plugin  # noqa: F401  registers the tasks


def set_up(data: Path | str, *arguments: str) -> tuple[FairseqTask, Any]:
    """The task of ``fairseq-train DATA ARGUMENTS``, and the configuration."""
    args = options.parse_args_and_arch(options.get_training_parser(), [str(data), *arguments])
    config = convert_namespace_to_omegaconf(args)
    return tasks.setup_task(config.task), config
