"""Data that fairseq's own preprocessing made, once for all tests, and plain PyTorch for files that ask for it."""

from pathlib import Path

import pytest

import tests.config_store  # noqa: F401  configurations are made in half of the time
from tests.fairseq_plugin.helpers.commands import run_module
from tests.fairseq_plugin.helpers.text import write_sentence_pairs, write_text


@pytest.fixture(scope="module")
def plain_pytorch():
    """Turn kernels for CPUs off for a file, whose processes would each load them for a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LINEARTIME_CPU_KERNELS", "0")
        yield


@pytest.fixture(scope="session")
def data_bin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of binarised toy text, as ``fairseq-preprocess`` writes it."""
    folder: Path = tmp_path_factory.mktemp("text")
    write_text(folder)
    splits = [f"--{split}pref={folder / split}.txt" for split in ("train", "valid", "test")]
    run_module("fairseq_cli.preprocess", ["--only-source", *splits, "--destdir", str(folder / "bin"), "--workers", "1"])
    return str(folder / "bin")


@pytest.fixture(scope="session")
def pairs_bin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of binarised toy sentence pairs, as ``fairseq-preprocess`` writes it."""
    folder: Path = tmp_path_factory.mktemp("pairs")
    write_sentence_pairs(folder)
    splits = [f"--{split}pref={folder / split}" for split in ("train", "valid", "test")]
    languages = ["--source-lang", "in", "--target-lang", "out"]
    run_module("fairseq_cli.preprocess", [*languages, *splits, "--destdir", str(folder / "bin"), "--workers", "1"])
    return str(folder / "bin")
