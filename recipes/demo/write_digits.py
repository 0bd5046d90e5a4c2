"""Write scikit-learn's handwritten digits as a folder of images: ``python -m recipes.demo.write_digits --out DIR``."""

import argparse
from pathlib import Path

from ..images import write_digits


def main(arguments: list[str] | None = None) -> None:
    """Write train/ and validation/, each with a folder of images for every digit."""
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--out", type=Path, default=Path("work/digits"), help="default: %(default)s")
    out = parser.parse_args(arguments).out
    written = write_digits(out)
    print(f"{written['train']} digits to learn from and {written['validation']} held out are in {out}")


if __name__ == "__main__":
    main()
