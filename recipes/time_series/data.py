"""Write a data set of time series for fairseq: ``python -m recipes.time_series.data JapaneseVowels --out work/vowels``.

sktime has JapaneseVowels and BasicMotions, and downloads the others of the UEA archive. ``--file Mine_TRAIN.ts`` takes
your own, with ``Mine_TEST.ts`` beside it.
"""

import argparse
from pathlib import Path

import numpy as np
from sktime.datasets import load_from_tsfile, load_UCR_UEA_dataset

from fairseq_plugin.data.series_folder import fill_missing, write_folder


def write(name: str, out: Path, file: Path | None = None) -> None:
    """Write the splits of a data set to ``out``, unless it is there; series.json is written last."""
    if (out / "series.json").exists():
        return
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out} has other files, or was interrupted; allowed: a new folder")
    splits = {}
    for split in ("train", "test"):
        if file is None:
            frame, labels = load_UCR_UEA_dataset(name, split, return_type="nested_univ")  # kept in sktime's folder
        else:
            path = file.with_name(file.name.replace("TRAIN", split.upper()))
            frame, labels = load_from_tsfile(str(path), return_data_type="nested_univ")
        rows = frame.itertuples(index=False)
        series = [fill_missing(np.stack([channel.to_numpy(float) for channel in row], axis=1)) for row in rows]
        splits[split] = (series, list(map(str, labels)))
        lengths = [len(values) for values in series]
        print(f"  {split}: {len(lengths):,} series of {min(lengths)} to {max(lengths)} steps")
    write_folder(out, splits)


def main(arguments: list[str] | None = None) -> None:
    """Write a data set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the UEA archive, or of your own with --file")
    parser.add_argument("--out", type=Path, help="default: work/time_series/NAME")
    parser.add_argument("--file", type=Path, metavar="TS", help="..._TRAIN.ts, with ..._TEST.ts beside it")
    options = parser.parse_args(arguments)
    if options.file and "TRAIN" not in options.file.name:
        parser.error(f"--file is {options.file}; allowed: ..._TRAIN.ts, with ..._TEST.ts beside it")
    write(options.name, options.out or Path("work/time_series") / options.name, options.file)


if __name__ == "__main__":
    main()
