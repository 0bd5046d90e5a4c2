"""The entry point of every recipe: one line and an exit status instead of a traceback."""

import pytest

from recipes.shared.commands import CommandFailed
from recipes.shared.download import DownloadFailed
from recipes.shared.scripts import command_line, script


def run(error):
    @script("name")
    def main(arguments=None):
        if error is not None:
            raise error
        return arguments

    return main(7)


@pytest.mark.parametrize("error", [ValueError("--x is 1"), CommandFailed("--x is 1"), DownloadFailed("--x is 1")])
def test_errors_are_one_line_and_status_1(error, capsys):
    assert run(error) == 1
    assert capsys.readouterr().err == "name: --x is 1\n"


def test_faults_of_the_machine_are_one_line(capsys):
    """Errors of files name the file; lack of memory is reported as such."""
    for error, message in (
        (OSError(28, "No space left on device", "x/y"), "No space left on device: 'x/y'"),
        (PermissionError(13, "Permission denied", "x/y"), "Permission denied: 'x/y'"),
        (MemoryError("Unable to allocate 1.00 TiB"), "memory: Unable to allocate 1.00 TiB"),
    ):
        assert run(error) == 1
        printed = capsys.readouterr().err
        assert printed.startswith("name: ") and printed.endswith(f"{message}\n") and printed.count("\n") == 1


def test_ctrl_c_is_status_130_and_other_errors_keep_their_traceback(capsys):
    assert run(None) == 7
    assert run(KeyboardInterrupt()) == 130 and "name" in capsys.readouterr().err
    with pytest.raises(TypeError):
        run(TypeError("a mistake of ours"))


def test_the_command_is_shown_as_it_was_typed(monkeypatch):
    assert command_line("recipes.demo", ["--out", "a b"]) == "python -m recipes.demo --out 'a b'"
    monkeypatch.setattr("sys.argv", ["x", "--quick"])
    assert command_line("recipes.demo", None) == "python -m recipes.demo --quick"
