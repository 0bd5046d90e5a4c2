"""The benchmark: every case equals its reference, a wrong candidate is not timed, and what is measured is right."""

import json
import re
import time
from functools import partial

import pytest
import torch

from common.attention import ATTENTIONS, import_own
from common.ops import mixed_chunk
from recipes.bench import __main__ as command
from recipes.bench import compile_time, images, language_models, measure, translation
from recipes.bench.gated_attention_unit import units
from recipes.bench.measure import Candidate, Case, Place

HERE = Place()
#: Smaller models than those of the cases.
NARROW = {"embed_dims": (48, 96, 144, 192), "depths": (1, 2, 1, 1)}
FORGETTING = ("linear_lm", "flowformer_lm --flow-forget channel", "gla_lm")
assert {*FORGETTING} <= {*language_models.FORGETTING}
SMALL = {
    "flash_lm_256": partial(language_models.training, language_models.TRAINED, 64, 1, 300),
    "forgetting": partial(language_models.training, FORGETTING, 64, 1, 80),
    "forgetting_decoding": partial(language_models.decoding, FORGETTING, 0, 1, 64, 1, 12),
    "decoding": partial(language_models.decoding, language_models.DECODED, 30, 1, 64, 1, 300),
    "beam_decoding": partial(language_models.decoding, language_models.DECODED, 0, 5, 64, 1, 40),
    "beam_generation": partial(language_models.beam_generation, 7),
    "prompts": partial(language_models.prompts, 300),
    "audio": partial(language_models.audio, 1, width=128, layers=1),
    "translation_decoding": partial(translation.decoding, 200, width=64, layers=1, positions=(20, 45)),
    "hier": partial(images.hierarchical, 32, batch=1, **NARROW),
    "deit": partial(images.deit, 32, depth=2),
}
#: The same as another one in size alone, or for GPUs.
LEFT_OUT = (
    *("flash_lm_512", "flash_lm_cuda", "causal_flow_cuda", "causal_flow_batch", "short_inputs_batch"),
    *("gpu_sequences", "gpu_reduce_overhead", "gpu_training", "gpu_hier"),
)
CASES = {name: case for name, case in command.cases().items() if name not in LEFT_OUT}


@pytest.fixture(autouse=True)
def run_as_it_is_written():
    """torch.compile returns the function unchanged; compiling one backward pass would take half a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("name", CASES)
def test_every_candidate_equals_its_reference_and_runs(name):
    case = CASES[name]
    built = SMALL[name](HERE) if name in SMALL else case.build(64, HERE)
    present = [candidate for candidate in built if not candidate.absent]
    assert present and all("not installed" in candidate.absent for candidate in built if candidate not in present)
    assert not case.base or case.base in {candidate.name for candidate in built}
    assert {candidate.name: measure.differs(candidate, HERE.dtype) for candidate in present} == dict.fromkeys(
        (candidate.name for candidate in present), ""
    )
    for candidate in present:
        for run in candidate.runs.values():
            assert all(isinstance(x, torch.Tensor) for x in run())
        if measure.DECODING in candidate.runs:
            assert measure.differs(candidate, HERE.dtype) == "", f"{candidate.name}, after a step"


@pytest.mark.parametrize("name, wrong", [("flash_lm_256", "flash_lm"), ("flash_pytorch", "GatedAttentionUnit")])
def test_a_wrong_model_is_noticed(name, wrong, monkeypatch):
    """Wrong by 5 %, in the layers that compute their output again in the backward pass."""
    monkeypatch.setattr("common.modules.gated_attention_unit.RECOMPUTED_FROM", 0)
    right = mixed_chunk.mixed_chunk_attention
    monkeypatch.setattr(mixed_chunk, "mixed_chunk_attention", lambda *x, **options: 1.05 * right(*x, **options))
    built = SMALL[name](HERE) if name in SMALL else units(300, HERE)
    for candidate in built:
        if not candidate.absent:
            assert ("differs" in measure.differs(candidate, HERE.dtype)) == (candidate.name == wrong)


MODULE = '''
from common.attention import FlowAttention, register_attention

@register_attention("mine")
class Mine(FlowAttention):
    """A mechanism of a user."""

@register_attention("mine_wrong")
class Wrong(FlowAttention):
    """Wrong by 5 %."""

    def forward(self, *arguments, **options):
        return 1.05 * super().forward(*arguments, **options)
'''


def test_the_command_measures_ones_own_mechanism_goes_on_and_refuses_what_is_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(ATTENTIONS, "mine", None)  # both are forgotten afterwards
    monkeypatch.setitem(ATTENTIONS, "mine_wrong", None)
    del ATTENTIONS["mine"], ATTENTIONS["mine_wrong"]
    (tmp_path / "my_idea_to_measure.py").write_text(MODULE)
    import_own(str(tmp_path / "my_idea_to_measure.py"))
    words = "--quick --threads 1 --out out --only attention_mine".split()
    assert command.main(words) == 0
    results = (tmp_path / "out" / "results.md").read_text()
    assert results.strip() in capsys.readouterr().out and " mine |" in results
    records = json.loads((tmp_path / "out" / "records.json").read_text())
    assert [(x["candidate"], x["run"]) for x in records] == [
        (name, run) for run in ("forward", "forward + backward") for name in ("mine", "softmax")
    ]
    assert all(x["ms"] > 0 and x["MiB"] > 0 and x["per second"] == pytest.approx(256e3 / x["ms"]) for x in records)
    assert command.main(words) == 0 and json.loads((tmp_path / "out" / "records.json").read_text()) == records
    with pytest.raises(SystemExit, match="out was begun with"):
        command.main([*words, "attention_linear"])
    assert command.main([*words[:-3], "wrong", "--only", "attention_mine_wrong"]) == 1
    assert re.search("mine_wrong: .* differs", capsys.readouterr().err)
    assert " mine_wrong |" not in (tmp_path / "wrong" / "results.md").read_text().partition("Not timed")[0]
    with pytest.raises(SystemExit):
        command.main(["--only", "casual_flow"])
    assert "casual_flow; allowed: causal_flow" in capsys.readouterr().err


def test_times_are_compared_in_the_same_rounds_and_memory_is_beyond_what_is_returned():
    def candidate(name, seconds):
        def run():
            time.sleep(seconds)
            large = torch.zeros(2**21)
            kept = large[: 2**18].clone()
            return [kept[:9], kept[9:]]  # of one storage

        return Candidate(name, 10, {"run": run}, lambda: {"output": 0.0})

    built = [candidate("slow", 0.06), candidate("fast", 0.02), Candidate("none", absent="not here")]
    rows = measure.measure(Case("", (1,), lambda size, place: built, "fast"), 1, HERE, quick=True)
    assert rows[0] == {"candidate": "none", "size": 1, "reason": "not here"}
    assert rows[1]["times"] == pytest.approx(3, rel=0.3) and rows[2]["times"] == 1
    assert rows[1]["ms"] >= 60 and rows[1]["per second"] == pytest.approx(1e4 / rows[1]["ms"])
    assert [row["MiB"] for row in rows[1:]] == [8, 8]


@pytest.mark.parametrize("wrong", [False, True])
def test_compile_time_compares_what_it_compiled(wrong, monkeypatch, capsys):
    """A stand-in for torch.compile, which takes half a minute."""
    stand_in = lambda model: lambda words: (model(words)[0] * (1.05 if wrong else 1.0),)
    monkeypatch.setattr(torch, "compile", stand_in)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    if wrong:
        with pytest.raises(SystemExit, match="linear_lm differs"):
            compile_time.main(["linear_lm"])
    else:
        assert compile_time.main(["linear_lm"]) == 0
        assert capsys.readouterr().out.startswith("linear_lm ")
