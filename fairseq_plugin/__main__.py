"""``python -m fairseq_plugin`` prints this folder, for ``fairseq-train --user-dir $(python -m fairseq_plugin)``."""

from pathlib import Path

print(Path(__file__).resolve().parent)
