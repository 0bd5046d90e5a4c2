"""``python -m timm_plugin SCRIPT ARGUMENTS...``: run one of timm's scripts, as it is, with the plugin imported.

For the scripts that cannot import a plugin themselves: validate.py, inference.py, benchmark.py, onnx_export.py.
(train.py can: ``--device-modules timm_plugin``.) Also ``torchrun --nproc_per_node 2 -m timm_plugin train.py ...``.
"""

import os
import runpy
import sys
from pathlib import Path
from typing import List

USAGE = "usage: python -m timm_plugin SCRIPT [ARGUMENTS...]"


def main(arguments: List[str]) -> None:
    """Run the script ``arguments[0]`` as ``__main__`` with the rest as its arguments, untouched.

    Raises:
        SystemExit: whatever the script exits with; 2 when no script is named or it is not a file.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        raise SystemExit(0 if arguments else 2)
    script = arguments[0]
    if not os.path.isfile(script):
        print(f"{USAGE}\ntimm_plugin: no such file: {script!r}", file=sys.stderr)
        raise SystemExit(2)
    sys.argv = arguments
    _set_import_path(script)
    runpy.run_path(script, run_name="__main__")


def _set_import_path(script: str) -> None:
    """sys.path as Python sets it for ``script``; where the plugin itself came from stays reachable, at the end."""
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    root = str(Path(__file__).resolve().parents[1])
    if root not in (os.path.realpath(entry) for entry in sys.path):
        sys.path.append(root)  # a dataloader's workers may be new interpreters, which take over this path


if __name__ == "__main__":
    main(sys.argv[1:])
