"""Running commands: printed, logged, watched, measured; failures name the command and the log."""

import sys
import time

import pytest

from recipes.shared import commands
from recipes.shared.commands import ROOT, CommandFailed, python_command, run, shown_path


def test_output_is_logged_and_watched(tmp_path, capsys):
    lines = []
    finished = run([sys.executable, "-c", "print('one'); print('two')"], tmp_path / "logs" / "x.log", lines.append)
    assert lines == ["one\n", "two\n"]
    assert (tmp_path / "logs" / "x.log").read_text().splitlines()[1:] == ["one", "two"]
    assert finished.seconds > 0
    assert capsys.readouterr().out.startswith(f"  $ {sys.executable} -c ")


def test_peak_memory_is_the_childs_own(tmp_path):
    memory = bytearray(300 * 2**20)  # of this process: must not be counted
    code = "import time; held = bytearray(100 * 2**20); held[::4096] = b'x' * len(held[::4096]); time.sleep(1)"
    peak = run([sys.executable, "-c", code], tmp_path / "x.log").peak_bytes
    assert len(memory) > peak > 100 * 2**20


def test_failure_shows_the_end_of_the_log(tmp_path):
    code = "import sys; [print('line', i) for i in range(100)]; sys.exit(3)"
    with pytest.raises(CommandFailed) as failure:
        run([sys.executable, "-c", code], tmp_path / "x.log")
    message = str(failure.value)
    assert "ended with exit status 3" in message
    assert str(tmp_path / "x.log") in message
    assert message.endswith("line 98\nline 99\n")
    assert "line 1\n" not in message


def test_missing_program(tmp_path):
    with pytest.raises(CommandFailed, match="could not be started"):
        run([str(tmp_path / "no-such-program")], tmp_path / "x.log")


def test_a_watcher_that_raises_ends_the_command(tmp_path):
    def refuse(line):
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run([sys.executable, "-u", "-c", "import time; print('x'); time.sleep(60)"], tmp_path / "x.log", refuse)
    assert time.monotonic() - started < 30


def test_paths_are_shown_relative_to_the_checkout(tmp_path):
    assert shown_path(ROOT / "work" / "demo") == "work/demo"
    assert shown_path(tmp_path) == str(tmp_path)
    assert python_command("-m", "x", ROOT / "a.txt", 3)[1:] == ["-m", "x", "a.txt", "3"]
    assert (commands.ROOT / "setup.cfg").is_file()
