"""``python -m recipes.bench``: its options, its exit status and its files."""

import torch

from recipes.bench import __main__ as bench
from recipes.bench.cases import CASES, operations
from recipes.bench.harness import machine, packages, records
from recipes.bench.harness.records import UNEQUAL, Record
from recipes.bench.harness.work import BACKWARD, FORWARD, Settings


def small_daft(monkeypatch, *sizes, peer=None):
    """The case daft_conv at ``sizes`` with --quick, with its peer replaced."""
    (row,) = (operation for operation in operations.OPERATIONS if operation.name == "daft_conv")
    if peer is not None:
        function, direct = row.functions
        row = row._replace(functions=(function, direct._replace(call=peer)))
    monkeypatch.setitem(CASES, "daft_conv", row._replace(quick_sizes=sizes).case())


def test_unknown_names_are_refused_with_the_names_there_are(capsys):
    assert bench.main(["--only", "causal_flow", "casual_flow"]) == 1
    error = capsys.readouterr().err
    assert "--only" in error and "casual_flow" in error and all(name in error for name in CASES)


def test_cases_are_listed_with_their_sizes(capsys):
    assert bench.main(["--list", "--only", "deit", "daft_conv"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(lines) == {"deit", "daft_conv"} and "224, 512, 1,024" in lines["deit"]


def test_without_a_gpu_its_cases_are_named_and_its_device_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--device", "cuda"]) == 1
    assert "--device is cuda" in capsys.readouterr().err
    assert bench.main(["--only", "causal_flow_cuda", "flash_lm_cuda", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("no CUDA device") == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    nothing = records.Results(machine.describe("", Settings()), [])
    assert "--device cuda" in bench.run([CASES["flash_lm_cuda"]], Settings(), nothing, len).records[0].reason


def test_a_small_benchmark_from_end_to_end(monkeypatch, tmp_path, capsys):
    small_daft(monkeypatch, 40, 90)
    threads = torch.get_num_threads()
    arguments = ["--quick", "--only", "daft_conv", "--threads", "1", "--out", str(tmp_path / "out")]
    try:
        assert bench.main(arguments) == 0
    finally:
        torch.set_num_threads(threads)
    results = records.load(tmp_path / "out" / "results.json")
    assert results.machine.command == f"python -m recipes.bench {' '.join(arguments)}" and results.machine.threads == 1
    assert [(record.size, record.run, record.form) for record in results.records] == [
        (size, run, form)
        for size in (40, 90)
        for run in (FORWARD, BACKWARD)
        for form in (operations.DAFT, operations.DIRECT)
    ]
    assert (tmp_path / "out" / "results.txt").read_text().strip() in capsys.readouterr().out
    assert (tmp_path / "out" / "daft_conv.png").stat().st_size > 5000
    markdown = (tmp_path / "out" / "results.md").read_text()
    assert markdown.index("not measured") < markdown.index(CASES["daft_conv"].title), "targets come first in the file"


def test_a_candidate_that_differs_ends_with_status_1_and_without_a_time(monkeypatch, tmp_path, capsys):
    right = operations.direct_convolution.daft_conv
    small_daft(monkeypatch, 80, peer=lambda q, k, v, r: right(q, k, v, r.roll(1, 1)))
    assert bench.main(["--quick", "--only", "daft_conv", "--out", str(tmp_path)]) == 1
    assert operations.DIRECT in capsys.readouterr().err
    results = records.load(tmp_path / "results.json")
    assert {record.form for record in results.timed()} == {operations.DAFT}
    assert [record.status for record in results.records if record.form == operations.DIRECT] == [UNEQUAL]
    assert UNEQUAL in (tmp_path / "results.md").read_text()


def test_an_interrupted_run_goes_on(monkeypatch, tmp_path, capsys):
    measured = []

    def measure(case, size, settings):
        if case.name == "daft_conv":
            measured.append(case.name)
            if measured.count("daft_conv") == 2:
                raise KeyboardInterrupt
        return [Record(case.name, size, FORWARD, operations.DAFT, records.TIMED, "", (float(size),), 1.0)]

    monkeypatch.setattr(bench, "measure", measure)
    small_daft(monkeypatch, 40, 90, 130)
    command = ["--quick", "--only", "rates", "daft_conv", "--out", str(tmp_path)]
    assert bench.main(command) == 1 and measured == ["daft_conv"] * 2
    assert (tmp_path / "results.md").is_file(), "Ctrl-C still writes the report"
    before = records.load(tmp_path / "results.json")
    assert bench.main([*command, "--resume"]) == 0 and measured == ["daft_conv"] * 4  # the interrupted size, the last
    after = records.load(tmp_path / "results.json")
    assert [record.size for record in after.records if record.case == "daft_conv"] == [40, 90, 130]
    assert after.records[: len(before.timed())] == before.timed() and not after.faults()
    assert after.machine.command == before.machine.command and after.machine.minutes >= before.machine.minutes

    monkeypatch.setattr(bench.machine, "describe", lambda *given: before.machine._replace(versions="torch 3"))
    assert bench.main([*command, "--resume"]) == 1
    assert "versions is torch 3; allowed" in capsys.readouterr().err
    assert records.load(tmp_path / "results.json") == after
    assert bench.main(["--only", "rates", "--out", str(tmp_path / "new"), "--resume"]) == 1
    assert "--resume" in capsys.readouterr().err


def test_the_machine_is_described(monkeypatch):
    here = machine.describe("python -m recipes.bench", Settings(dtype=torch.bfloat16))
    assert here.threads == torch.get_num_threads() and here.cores >= 1 and here.memory_gib > 0.5 and here.processor
    assert (here.dtype, here.device) == ("bfloat16", "CPU")
    assert f"torch {torch.__version__.split('+')[0]}" in here.versions
    monkeypatch.setenv("PATH", "")  # no git
    assert machine.describe("x", Settings()).commit == "not a git checkout"


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    for module, command in packages.INSTALL.items():
        assert command in packages.missing(module)
    monkeypatch.undo()
    assert packages.missing("timm") is None
