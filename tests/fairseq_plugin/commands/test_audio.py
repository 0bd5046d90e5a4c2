"""From stock pretraining on audio to fine-tuning in linear time, by fairseq's commands, on recordings of noise.

fairseq's own tests of speech decode a manifest with released checkpoints and compare word errors; here small models
decode what they were trained on.
"""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.criterions.ctc import CtcCriterion, CtcCriterionConfig
from fairseq.data import Dictionary
from fairseq.tasks.audio_finetuning import AudioFinetuningTask
from fairseq.tasks.audio_pretraining import AudioPretrainingConfig, AudioPretrainingTask
from torch import nn

from fairseq_plugin.criterions.ctc_distillation import CtcDistillationConfig, CtcDistillationCriterion
from tests import compare
from tests.common.refusals import refused
from tests.fairseq_plugin.helpers.audio import FEATURES, HUBERT, LETTERS, PRETRAINED, SPEECH_TO_TEXT, letters_sample
from tests.fairseq_plugin.helpers.commands import USER_DIR, NamedRuns, run_named

#: Lengths of recordings in samples.
LENGTHS = (1700, 1500, 1600, 1400)
CRITERION = ("--criterion", "wav2vec", "--infonce", "--loss-weights", "[0.1, 10]")
TRAINING = (
    "--optimizer adam --lr 0.003 --max-update 3 --log-format json --log-interval 1 --cpu --seed 1 --max-tokens 8000 "
    "--no-epoch-checkpoints --required-batch-size-multiple 1"
).split()
READING = "--cpu --num-workers 0 --max-tokens 8000 --required-batch-size-multiple 1".split()
CTC = ("--criterion", "ctc", "--post-process", "letter")
BEAM = "--gen-subset valid --beam 3 --max-len-b 5 --scoring wer".split()
#: fairseq's decoder reads 512 channels of any wav2vec 2.0, which it is projected to.
DECODER = "--decoder-embed-dim 512 --decoder-layers 1 --decoder-ffn-embed-dim 16".split()
SEQUENCES = (*LETTERS, "--autoregressive")
UNITS = ("--task", "hubert_pretraining", "--labels", "['km']", "--label-rate", "2000", *HUBERT)
AVERAGE = (*PRETRAINED, "--criterion", "model", "--average-top-k-layers", "2", "--pos-conv-depth", "2")

pytestmark = pytest.mark.usefixtures("plain_pytorch")


def write_recordings(folder: Path) -> None:
    """Recordings, fairseq's lists of them, and transcripts; in "features" what the task ``speech_to_text`` reads."""
    rng, features = np.random.default_rng(1), folder / "features"
    features.mkdir()
    rows = ["id\taudio\tn_frames\ttgt_text\tspeaker"]
    for i, length in enumerate(LENGTHS):
        soundfile.write(folder / f"{i}.wav", 0.1 * rng.standard_normal(length), 16_000)
        np.save(features / f"{i}.npy", rng.standard_normal((length // 40, FEATURES)).astype(np.float32))
        rows.append(f"{i}\t{features / str(i)}.npy\t{length // 40}\t{'A B' if i % 2 else 'B'}\tnobody")
    listed = "".join(f"{i}.wav\t{length}\n" for i, length in enumerate(LENGTHS))
    for split in ("train", "valid"):
        (folder / f"{split}.tsv").write_text(f"{folder}\n{listed}")
        (folder / f"{split}.ltr").write_text("A B |\nB A |\nA |\nB |\n")
        (folder / f"{split}.km").write_text("".join(f"{' '.join(['0', '1'] * 120)}\n" for _ in LENGTHS))
        (features / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    (folder / "dict.km.txt").write_text("0 1\n1 1\n")
    (folder / "dict.ltr.txt").write_text("| 4\nA 3\nB 3\n")
    (features / "dict.txt").write_text("A 3\nB 3\n")
    (features / "config.yaml").write_text(f"vocab_filename: dict.txt\ninput_feat_per_channel: {FEATURES}\n")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> NamedRuns:
    """Stock models, their conversions, attention transfer, fine-tuning of the results, and decoding, in one process."""
    folder = tmp_path_factory.mktemp("audio")
    write_recordings(folder)
    features = str(folder / "features")

    def last(name: str) -> str:
        return str(folder / name / "checkpoint_last.pt")

    def train(name: str, arch: str, *arguments: str, data: str = str(folder)) -> tuple[str, list[str], str]:
        begun = [data, "--user-dir", USER_DIR, *TRAINING, "--arch", arch, "--save-dir", f"{folder}/{name}"]
        return "fairseq_cli.train", [*begun, *arguments], ""

    def convert(stock: str, start: str, arch: str) -> tuple[str, list[str], str]:
        return "fairseq_plugin.convert", [last(stock), f"{folder}/{start}", "--arch", arch], ""

    def read(program: str, name: str, *arguments: str, data: str = str(folder)) -> tuple[str, list[str], str]:
        return f"fairseq_cli.{program}", [data, "--user-dir", USER_DIR, "--path", last(name), *READING, *arguments], ""

    def begun(start: str, teacher: str) -> tuple[str, ...]:
        transfer = ("--criterion", "attention_transfer", "--teacher", last(teacher))
        return ("--finetune-from-model", f"{folder}/{start}", *transfer)

    tuning, learning = (*LETTERS, "--w2v-path"), ("--criterion", "ctc_distillation", "--teacher", last("teacher"))
    average = (*AVERAGE, "--finetune-from-model", f"{folder}/average.pt")
    stage1 = (*SPEECH_TO_TEXT, *begun("start s2t.pt", "stock s2t"), "--lineartime-trained-parameters", "attention")
    commands = {
        "stock": train("stock", "wav2vec2", *PRETRAINED, *CRITERION),
        "convert": convert("stock", "start.pt", "hedgehog_wav2vec2"),
        "transfer": train("transferred", "hedgehog_wav2vec2", *PRETRAINED, *begun("start.pt", "stock")),
        "ctc": train("ctc", "wav2vec_ctc", *tuning, last("transferred"), *CTC),
        "ctc errors": read("validate", "ctc", *LETTERS, *CTC),
        "teacher": train("teacher", "wav2vec_ctc", *tuning, last("stock"), *CTC),
        "distilled": train("distilled", "wav2vec_ctc", *tuning, last("transferred"), *learning, *CTC[2:]),
        "seq2seq": train(
            "seq2seq",
            "wav2vec_seq2seq",
            *(*SEQUENCES, "--w2v-path", last("transferred"), "--criterion", "cross_entropy", *DECODER),
        ),
        "seq2seq decoded": read("generate", "seq2seq", *SEQUENCES, *BEAM),
        "s2t": train("s2t", "s2t_flow", *SPEECH_TO_TEXT, data=features),
        "s2t decoded": read("generate", "s2t", "--task", "speech_to_text", *BEAM, data=features),
        "stock s2t": train("stock s2t", "s2t_transformer", *SPEECH_TO_TEXT, data=features),
        "convert s2t": convert("stock s2t", "start s2t.pt", "s2t_hedgehog"),
        "transfer s2t": train("transferred s2t", "s2t_hedgehog", *stage1, data=features),
        "hubert": train("stock units", "hubert", *UNITS),
        "convert hubert": convert("stock units", "start units.pt", "t2r_hubert"),
        "transfer hubert": train("transferred units", "t2r_hubert", *UNITS, *begun("start units.pt", "stock units")),
        "stock average": train("stock average", "data2vec_audio", *AVERAGE),
        "convert average": convert("stock average", "average.pt", "t2r_data2vec_audio"),
        "data2vec": train("data2vec", "t2r_data2vec_audio", *average),
        "resumed data2vec": train("data2vec", "t2r_data2vec_audio", *average, "--max-update", "4"),
        "ctc of data2vec": train("ctc of data2vec", "wav2vec_ctc", *tuning, last("data2vec"), *CTC),
    }
    return run_named(folder, commands)


@pytest.mark.parametrize("kind", ["", " units", " s2t"])
def test_the_stock_weights_are_the_start_and_an_attention_learns(runs: NamedRuns, kind: str) -> None:
    """All of them are taken; the feature maps are new, and learn in the transfer, of a decoder too."""
    stock, start, learned = (
        runs.weights(f"{name}{kind}{end}") for name, end in (("stock", ""), ("start", ".pt"), ("transferred", ""))
    )
    assert all(torch.equal(start[name], x) for name, x in stock.items())
    new = start.keys() - stock.keys()
    assert new and all(".inner." in name for name in new)
    changed = {name for name in start if not torch.equal(start[name], learned[name])}
    if kind == " s2t":  # --lineartime-trained-parameters attention
        assert {name.split(".")[0] for name in changed & new} == {"encoder", "decoder"}
        assert all(".self_attn." in name for name in changed)
    else:
        assert changed == new


def test_fine_tuning_starts_from_the_transferred_model(runs: NamedRuns) -> None:
    """fairseq's ``wav2vec_ctc`` builds the model that the checkpoint names, and all of it learns."""
    transferred, tuned = runs.weights("transferred"), runs.weights("ctc")
    maps = [name for name in transferred if ".inner." in name]
    assert maps and all(f"w2v_encoder.w2v_model.{name}" in tuned for name in maps)
    assert any(not torch.equal(tuned[f"w2v_encoder.w2v_model.{name}"], transferred[name]) for name in maps)
    assert "HedgehogWav2vec2Model" in runs.outputs["ctc"] and "T2rData2vecAudioModel" in runs.outputs["ctc of data2vec"]
    assert re.search(r"\| wer \d", runs.outputs["ctc errors"])  # decoded by the best label of each frame


def test_data2vec_learns_from_its_own_average(runs: NamedRuns) -> None:
    """A stock model is the start; the average of the weights has the new attention, and a training goes on with it."""
    stock, start, trained = (runs.stored(x)["model"] for x in ("stock average", "average.pt", "data2vec"))
    assert all(torch.equal(start[name], x) for name, x in runs.weights("stock average").items())
    new = {name.removeprefix("encoder.") for name in runs.weights("average.pt").keys() - stock.keys()}
    assert new and all(".inner." in name for name in new)
    average = trained["_ema"]
    assert new <= average.keys() and not new & stock["_ema"].keys()
    assert all(torch.isfinite(x).all() for x in average.values())
    assert any(not torch.equal(average[name], trained[f"encoder.{name}"]) for name in new)
    assert runs.stored("data2vec")["optimizer_history"][-1]["num_updates"] == 4, "resumed"


@pytest.mark.parametrize("name", ["seq2seq", "s2t"])
def test_beam_search_decodes_every_recording(runs: NamedRuns, name: str) -> None:
    """Each has a hypothesis, and the word error is computed."""
    output = runs.outputs[f"{name} decoded"]
    assert sorted(re.findall(r"^H-(\d+)\t\S+\t\S", output, flags=re.MULTILINE)) == ["0", "1", "2", "3"]
    assert re.search(r"WER: \d", output)


# ---- The criterion that learns letters from a teacher


@pytest.fixture(scope="module")
def distilled(runs: NamedRuns) -> tuple[nn.Module, nn.Module, AudioFinetuningTask]:
    """A student, its teacher, and their task."""
    paths = [str(runs.folder / name / "checkpoint_last.pt") for name in ("distilled", "teacher")]
    (student, teacher), _, task = load_model_ensemble_and_task(paths, arg_overrides={"data": str(runs.folder)})
    return student.train(), teacher, task


def _distillation(runs: NamedRuns, task: AudioFinetuningTask, **options: Any) -> CtcDistillationCriterion:
    own = {"distillation_temperature": 1.5, "distillation_weight": 0.3, "sentence_avg": False, "ddp_backend": ""}
    own["teacher"] = str(runs.folder / "teacher" / "checkpoint_last.pt")
    return CtcDistillationCriterion(CtcDistillationConfig(**{**own, **options}), task)


def test_distillation_is_the_literal_loss(runs: NamedRuns, distilled: tuple) -> None:
    """CTC and, frame by frame without padding, the divergence from the teacher; gradients too; evaluation is CTC."""
    student, teacher, task = distilled
    sample, criterion = letters_sample(padding=100), _distillation(runs, task)
    own, size, _ = CtcCriterion(CtcCriterionConfig(sentence_avg=False), task)(student, sample)
    ours, wanted = (model(**sample["net_input"])["encoder_out"] for model in (student, teacher.eval()))
    divergence, count = 0.0, 0
    for row, samples in enumerate((300, 200)):
        for t in range((samples - 18) // 8 + 1):
            p, q = ((x[t, row] / 1.5).softmax(0) for x in (wanted.detach(), ours))
            divergence, count = divergence + (p * (p / q).log()).sum(), count + 1
    expected = 0.7 * own + 0.3 * 1.5**2 * divergence
    total, sample_size, logged = criterion(student, sample)
    compare.assert_close("loss", total, expected, 1e-5)
    assert (sample_size, logged["teacher_kl_tokens"]) == (size, count)
    compare.assert_close("logged divergence", logged["teacher_kl_sum"], divergence.detach(), 1e-4)
    parameters = [x for x in student.parameters() if x.requires_grad]
    both = (compare.gradients(x, parameters) for x in (total, expected))
    for actual, literal in zip(*both, strict=True):
        compare.assert_close("gradient", actual, literal, 1e-3, floor=1e-3)
    compare.assert_close("loss in evaluation", criterion(student.eval(), sample)[0], own, 1e-5)
    student.train()
    assert '"train_teacher_kl"' in runs.outputs["distilled"]


def test_teachers_that_do_not_fit(runs: NamedRuns, distilled: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    student, _, task = distilled
    with refused("--distillation-weight", "2", "0 to 1"):
        _distillation(runs, task, distillation_weight=2.0)
    with refused("--task", "AudioPretrainingTask", "audio_finetuning"):
        _distillation(runs, AudioPretrainingTask(AudioPretrainingConfig()))
    normalized, reordered = (AudioFinetuningTask(deepcopy(task.cfg)) for _ in range(2))
    normalized.cfg.normalize = True
    with refused("--normalize", "True", "False"):
        _distillation(runs, normalized).train()
    symbols = Dictionary()
    for symbol in reversed(task.target_dictionary.symbols[task.target_dictionary.nspecial :]):
        symbols.add_symbol(symbol)
    reordered.state.merge_state_dict({"target_dictionary": symbols})
    with refused("--teacher", "dictionary", str(symbols.symbols)):
        _distillation(runs, reordered).train()
    with refused("--teacher", "Wav2Vec2Model", "wav2vec_ctc"):
        _distillation(runs, task, teacher=str(runs.folder / "stock" / "checkpoint_last.pt")).train()
    with refused("--arch", "HedgehogWav2vec2Model", "wav2vec_ctc"):
        _distillation(runs, task)(student.w2v_encoder.w2v_model, letters_sample(padding=100))
    monkeypatch.setattr(student.w2v_encoder, "proj", nn.Linear(16, 9))
    with refused("--teacher", "7 letters", "9"):
        _distillation(runs, task)(student, letters_sample(padding=100))
