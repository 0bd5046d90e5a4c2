"""Write enwik8, a token for each byte, for fairseq: ``python -m recipes.enwik8.data``, or ``--file`` for a copy.

The split is the usual one: 90 million bytes, 5 million, and the last 5. Any other file:
``python -m recipes.prepare_text bytes --file any.txt``.
"""

import argparse
import hashlib
import zipfile
from pathlib import Path

from .. import prepare_text, texts

_ADDRESS = "http://mattmahoney.net/dc/enwik8.zip"
#: Of the archive, in Hugging Face's datasets/enwik8/dataset_infos.json.
_SHA256 = "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"
#: Of the file, on its publisher's page, http://mattmahoney.net/dc/textdata.html.
_MD5 = "a1fa5ffddb56f4953e226637dabbb36a"


def main() -> None:
    """Write the data."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("work/enwik8"))
    parser.add_argument("--file", type=Path, help="enwik8, or enwik8.zip")
    options = parser.parse_args()
    file = options.file or texts.download(_ADDRESS, options.out / "enwik8.zip", _SHA256)
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            file = options.out / "enwik8"
            if not file.exists():
                archive.extract("enwik8", options.out)
    digest = hashlib.md5(file.read_bytes()).hexdigest()
    if digest != _MD5:
        raise SystemExit(f"{file} has the MD5 {digest}; enwik8 has {_MD5}")
    print(f"tokens in {options.out / 'data-bin'}:", prepare_text.byte_data(file, options.out))


if __name__ == "__main__":
    main()
