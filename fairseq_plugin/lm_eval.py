"""``python -m fairseq_plugin.lm_eval --tasks TASK --model_args pretrained=FOLDER``: lm-evaluation-harness.

The same as ``python -m common.huggingface.lm_eval``, which does not need fairseq.
"""

import sys
from collections.abc import Sequence

from common.huggingface import lm_eval
from common.huggingface.lm_eval import parser  # noqa: F401  for readers of its help


def main(arguments: Sequence[str]) -> None:
    """Evaluate a model as the command line ``arguments`` says; an error exits with one line."""
    lm_eval.main(arguments, "python -m fairseq_plugin.lm_eval")


if __name__ == "__main__":
    main(sys.argv[1:])
