"""Write WikiText-103 in words for fairseq: ``python -m recipes.wikitext103.data``, or ``--file`` for a copy you have.

The address in most scripts, research.metamind.io on S3, has answered 403 since 2024. Any other text:
``python -m recipes.prepare_text words --file any.txt``.
"""

import argparse
import zipfile
from pathlib import Path

from .. import texts

#: The site of the first author; the checksum is in Hugging Face's datasets/wikitext/dataset_infos.json.
_ADDRESS = "https://wikitext.smerity.com/wikitext-103-v1.zip"
_SHA256 = "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"
#: The same text as Parquet tables, by split.
_HUB = ("Salesforce/wikitext", "b08601e04326c79dfdd32d625aee71d232d685c3", "wikitext-103-v1/{}-*.parquet")
#: Words and line ends: Merity et al. (2017), table 1.
_TOKENS = {"train": 103_227_021, "valid": 217_646, "test": 245_569}


def fetch(out: Path) -> Path:
    """The three texts, from the first source that answers; the zip archive's folder, or one of the same form."""
    try:
        return unzipped(texts.download(_ADDRESS, out / "wikitext-103-v1.zip", _SHA256), out)
    except (OSError, RuntimeError) as error:
        print(f"{_ADDRESS}: {error}; trying {_HUB[0]}")
    folder = out / "wikitext-103"
    for split, name in {"train": "train", "valid": "validation", "test": "test"}.items():
        files = texts.hub_files(_HUB[0], _HUB[1], [_HUB[2].format(name)], out)
        rows = (row for file in files for row in texts.read_documents(file))
        texts.write_lines(folder / f"wiki.{split}.tokens", (row or " \n" for row in rows))  # blank lines are empty rows
    return folder


def unzipped(archive: Path, out: Path) -> Path:
    """The folder of an archive with wiki.{train,valid,test}.tokens, extracted unless it is there."""
    if not (out / "wikitext-103").exists():
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(out / "wikitext-103")
    return out / "wikitext-103"


def main() -> None:
    """Write the data."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("work/wikitext103"))
    parser.add_argument("--file", type=Path, help="wikitext-103-v1.zip, or a folder with wiki.train.tokens and so on")
    parser.add_argument("--workers", type=int, default=2, help="processes of fairseq-preprocess")
    options = parser.parse_args()
    folder = options.file or fetch(options.out)
    folder = folder if folder.is_dir() else unzipped(folder, options.out)
    tokens = texts.text_data(folder, options.out, "words", workers=options.workers)
    if tokens != _TOKENS:
        raise SystemExit(f"{folder} has {tokens} words and line ends; WikiText-103 has {_TOKENS}")
    print(f"Ready: {options.out / 'data-bin'}")


if __name__ == "__main__":
    main()
