"""From stock pretraining on audio to fine-tuning in linear time, by fairseq's commands, on recordings of noise.

fairseq's own tests of speech decode a manifest with released checkpoints and compare word errors; here small models
decode what they were trained on.
"""

import re
from copy import deepcopy
from functools import partial
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
from tests.common.refusals import refused
from tests.compare import assert_close, gradients, weights
from tests.fairseq_plugin.helpers.audio import FEATURES, HUBERT, LETTERS, PRETRAINED, SPEECH_TO_TEXT, letters_sample
from tests.fairseq_plugin.helpers.commands import USER_DIR, NamedRuns, run_named

RATE = 16_000
CRITERION = ("--criterion", "wav2vec", "--infonce", "--loss-weights", "[0.1, 10]")
#: Lengths of recordings in samples.
LENGTHS = (1700, 1500, 1600, 1400)
TRAINING = (
    "--optimizer adam --lr 0.003 --max-update 3 --log-format json --log-interval 1 --cpu --seed 1 --max-tokens 8000 "
    "--no-epoch-checkpoints --required-batch-size-multiple 1"
).split()
READING = "--cpu --num-workers 0 --max-tokens 8000 --required-batch-size-multiple 1".split()
CTC = ("--criterion", "ctc", "--post-process", "letter")
BEAM = "--gen-subset valid --beam 3 --max-len-b 5 --scoring wer".split()
#: fairseq's decoder reads 512 channels of any wav2vec 2.0, which it is projected to.
DECODER = "--decoder-embed-dim 512 --decoder-layers 1 --decoder-ffn-embed-dim 16".split()


def write_manifests(folder: Path) -> None:
    """Recordings, fairseq's lists of them, and transcripts of letters with their dictionary."""
    rng = np.random.default_rng(1)
    for i, length in enumerate(LENGTHS):
        soundfile.write(folder / f"{i}.wav", 0.1 * rng.standard_normal(length), RATE)
    rows = "".join(f"{i}.wav\t{length}\n" for i, length in enumerate(LENGTHS))
    for split in ("train", "valid"):
        (folder / f"{split}.tsv").write_text(f"{folder}\n{rows}")
        (folder / f"{split}.ltr").write_text("A B |\nB A |\nA |\nB |\n")
        (folder / f"{split}.km").write_text("".join(f"{' '.join(['0', '1'] * 120)}\n" for _ in LENGTHS))
    (folder / "dict.km.txt").write_text("0 1\n1 1\n")
    (folder / "dict.ltr.txt").write_text("| 4\nA 3\nB 3\n")


def write_features(folder: Path) -> None:
    """Features of recordings, and what the task ``speech_to_text`` reads beside them, for letters A and B."""
    folder.mkdir()
    rows = ["id\taudio\tn_frames\ttgt_text\tspeaker"]
    for i, length in enumerate(LENGTHS):
        frames = length // 40
        np.save(folder / f"{i}.npy", np.random.default_rng(i).standard_normal((frames, FEATURES)).astype(np.float32))
        rows.append(f"{i}\t{folder / str(i)}.npy\t{frames}\t{'A B' if i % 2 else 'B'}\tnobody")
    for split in ("train", "valid"):
        (folder / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    (folder / "dict.txt").write_text("A 3\nB 3\n")
    (folder / "config.yaml").write_text(f"vocab_filename: dict.txt\ninput_feat_per_channel: {FEATURES}\n")


def training(folder: Path, name: str, *arguments: str, data: Path | None = None) -> tuple[str, list[str], str]:
    """A short ``fairseq-train`` on ``data``, by default ``folder``, into the folder ``name`` in it."""
    command = [str(data or folder), "--user-dir", USER_DIR, *TRAINING, *arguments, "--save-dir", str(folder / name)]
    return "fairseq_cli.train", command, ""


def decoding(folder: Path, pretrained: str) -> dict[str, tuple[str, list[str], str]]:
    """Trainings of models that write text, and what they make of the recordings; "ctc" is trained before."""
    features = folder / "features"
    write_features(features)

    def read(program: str, name: str, data: Path, *arguments: str) -> tuple[str, list[str], str]:
        command = [str(data), "--user-dir", USER_DIR, "--path", str(folder / name / "checkpoint_last.pt"), *READING]
        return f"fairseq_cli.{program}", [*command, *arguments], ""

    sequence = (*LETTERS, "--autoregressive")
    tuned = (*sequence, "--arch", "wav2vec_seq2seq", "--w2v-path", pretrained, "--criterion", "cross_entropy", *DECODER)
    return {
        "ctc errors": read("validate", "ctc", folder, *LETTERS, *CTC),
        "seq2seq": training(folder, "seq2seq", *tuned),
        "seq2seq decoded": read("generate", "seq2seq", folder, *sequence, *BEAM),
        "s2t": training(folder, "s2t", "--arch", "s2t_flow", *SPEECH_TO_TEXT, data=features),
        "s2t decoded": read("generate", "s2t", features, "--task", "speech_to_text", *BEAM),
        **transferring(folder, features),
    }


def transferring(folder: Path, features: Path) -> dict[str, tuple[str, list[str], str]]:
    """A stock model from speech to text, its conversion, and attention transfer."""
    stock, start = str(folder / "stock s2t" / "checkpoint_last.pt"), str(folder / "start s2t.pt")
    begun = ("--finetune-from-model", start, "--teacher", stock, "--lineartime-trained-parameters", "attention")
    begun = (*SPEECH_TO_TEXT, *begun, "--criterion", "attention_transfer")
    return {
        "stock s2t": training(folder, "stock s2t", "--arch", "s2t_transformer", *SPEECH_TO_TEXT, data=features),
        "convert s2t": ("fairseq_plugin.convert", [stock, start, "--arch", "s2t_hedgehog"], ""),
        "transfer s2t": training(folder, "transfer s2t", "--arch", "s2t_hedgehog", *begun, data=features),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> NamedRuns:
    """A stock model, its conversion, attention transfer, and fine-tuning of the result with CTC, in one process."""
    folder = tmp_path_factory.mktemp("audio")
    write_manifests(folder)
    stock, start = str(folder / "stock" / "checkpoint_last.pt"), str(folder / "start.pt")
    transferred = str(folder / "transferred" / "checkpoint_last.pt")

    train = partial(training, folder)
    begun = ("--finetune-from-model", start, "--teacher", stock, "--criterion", "attention_transfer")
    units, to = str(folder / "units.pt"), ("--arch", "t2r_hubert")
    hubert = ("--task", "hubert_pretraining", "--labels", "['km']", "--label-rate", "2000", *HUBERT)
    from_units = ("--finetune-from-model", units, "--teacher", str(folder / "hubert" / "checkpoint_last.pt"))
    from_units = (*from_units, "--criterion", "attention_transfer")
    fine_tuning = (*LETTERS, "--arch", "wav2vec_ctc", "--w2v-path", transferred)
    begun_average = ("--finetune-from-model", str(folder / "average.pt"))
    data2vec = (*PRETRAINED, "--criterion", "model", "--average-top-k-layers", "2", "--pos-conv-depth", "2")
    average_tuning = (*LETTERS, "--arch", "wav2vec_ctc", "--w2v-path", str(folder / "data2vec" / "checkpoint_last.pt"))
    stock_average, to_average = str(folder / "stock average" / "checkpoint_last.pt"), ("--arch", "t2r_data2vec_audio")
    from_stock = (*LETTERS, "--arch", "wav2vec_ctc", "--w2v-path", stock)
    learning = ("--criterion", "ctc_distillation", "--teacher", str(folder / "teacher" / "checkpoint_last.pt"))
    commands = {
        "stock": train("stock", "--arch", "wav2vec2", *PRETRAINED, *CRITERION),
        "convert": ("fairseq_plugin.convert", [stock, start, "--arch", "hedgehog_wav2vec2"], ""),
        "transfer": train("transferred", "--arch", "hedgehog_wav2vec2", *PRETRAINED, *begun),
        "ctc": train("ctc", *fine_tuning, *CTC),
        "resumed": train("ctc", *fine_tuning, *CTC, "--max-update", "4"),
        "teacher": train("teacher", *from_stock, *CTC),
        "distilled": train("distilled", *fine_tuning, *learning, "--post-process", "letter"),
        **decoding(folder, transferred),
        "hubert": train("hubert", "--arch", "hubert", *hubert),
        "convert hubert": ("fairseq_plugin.convert", [str(folder / "hubert" / "checkpoint_last.pt"), units, *to], ""),
        "transfer hubert": train("units", "--arch", "t2r_hubert", *hubert, *from_units),
        "stock average": train("stock average", "--arch", "data2vec_audio", *data2vec),
        "convert average": ("fairseq_plugin.convert", [stock_average, str(folder / "average.pt"), *to_average], ""),
        "data2vec": train("data2vec", *to_average, *data2vec, *begun_average),
        "resumed data2vec": train("data2vec", *to_average, *data2vec, *begun_average, "--max-update", "4"),
        "ctc of data2vec": train("ctc of data2vec", *average_tuning, *CTC),
    }
    return run_named(folder, commands)


def _weights(runs: NamedRuns, name: str) -> dict[str, torch.Tensor]:
    path = runs.folder / (f"{name}.pt" if name == "start" else f"{name}/checkpoint_last.pt")
    return weights(torch.load(path, weights_only=False)["model"])


def test_the_stock_weights_are_the_start(runs: NamedRuns) -> None:
    """All of them are taken; the feature maps are new, and alone learn in the transfer."""
    stock, start, transferred = (_weights(runs, name) for name in ("stock", "start", "transferred"))
    assert all(torch.equal(start[name], x) for name, x in stock.items())
    new = start.keys() - stock.keys()
    assert new and all(".inner." in name for name in new)
    assert {name for name in start if not torch.equal(start[name], transferred[name])} == new


def test_fine_tuning_starts_from_the_transferred_model(runs: NamedRuns) -> None:
    """fairseq's ``wav2vec_ctc`` builds the model that the checkpoint names, and all of it learns."""
    transferred, tuned = _weights(runs, "transferred"), _weights(runs, "ctc")
    maps = [name for name in transferred if ".inner." in name]
    assert maps and all(f"w2v_encoder.w2v_model.{name}" in tuned for name in maps)
    assert any(not torch.equal(tuned[f"w2v_encoder.w2v_model.{name}"], transferred[name]) for name in maps)
    assert "HedgehogWav2vec2Model" in runs.outputs["ctc"]


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
    frames = [((300 - 18) // 8 + 1, 0), ((200 - 18) // 8 + 1, 1)]
    divergence, count = 0.0, 0
    for length, row in frames:
        for t in range(length):
            p, q = ((x[t, row] / 1.5).softmax(0) for x in (wanted.detach(), ours))
            divergence, count = divergence + (p * (p / q).log()).sum(), count + 1
    expected = 0.7 * own + 0.3 * 1.5**2 * divergence
    total, sample_size, logged = criterion(student, sample)
    assert_close("loss", total, expected, 1e-5)
    assert (sample_size, logged["teacher_kl_tokens"]) == (size, count)
    assert_close("logged divergence", logged["teacher_kl_sum"], divergence.detach(), 1e-4)
    parameters = [x for x in student.parameters() if x.requires_grad]
    for actual, literal in zip(gradients(total, parameters), gradients(expected, parameters), strict=True):
        assert_close("gradient", actual, literal, 1e-3, floor=1e-3)
    student.eval()
    assert_close("loss in evaluation", criterion(student, sample)[0], own, 1e-5)
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
    pretrained = str(runs.folder / "stock" / "checkpoint_last.pt")
    with refused("--teacher", "Wav2Vec2Model", "wav2vec_ctc"):
        _distillation(runs, task, teacher=pretrained).train()
    with refused("--arch", "HedgehogWav2vec2Model", "wav2vec_ctc"):
        _distillation(runs, task)(student.w2v_encoder.w2v_model, letters_sample(padding=100))
    monkeypatch.setattr(student.w2v_encoder, "proj", nn.Linear(16, 9))
    with refused("--teacher", "7 letters", "9"):
        _distillation(runs, task)(student, letters_sample(padding=100))


def test_checkpoints_with_dictionaries_are_read_again(runs: NamedRuns) -> None:
    """Tasks of audio store their dictionaries: a training goes on, and a HuBERT is converted and transferred."""
    assert "num_updates: 3" in runs.outputs["resumed"] or "@ 3 updates" in runs.outputs["resumed"]
    assert torch.load(runs.folder / "ctc" / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == 4
    stock, start, transferred = (
        weights(torch.load(runs.folder / path)["model"])
        for path in ("hubert/checkpoint_last.pt", "units.pt", "units/checkpoint_last.pt")
    )
    assert all(torch.equal(start[name], x) for name, x in stock.items())
    changed = {name for name in start if not torch.equal(start[name], transferred[name])}
    assert changed and all(".inner." in name for name in changed)


def test_data2vec_learns_from_its_own_average(runs: NamedRuns) -> None:
    """A stock model is the start; the average of the weights has the new attention, and a training goes on with it."""
    stock, start, trained = (
        torch.load(runs.folder / path)["model"]
        for path in ("stock average/checkpoint_last.pt", "average.pt", "data2vec/checkpoint_last.pt")
    )
    averages = [model.pop("_ema") for model in (stock, start, trained)]
    assert all(torch.equal(weights(start)[name], x) for name, x in weights(stock).items())
    new = {name.removeprefix("encoder.") for name in weights(start).keys() - stock.keys()}
    assert new and all(".inner." in name for name in new)
    assert new <= averages[2].keys() and not new & averages[0].keys()
    assert all(torch.isfinite(x).all() for x in averages[2].values())
    assert any(not torch.equal(averages[2][name], trained[f"encoder.{name}"]) for name in new)
    assert "T2rData2vecAudioModel" in runs.outputs["ctc of data2vec"]
    updates = torch.load(runs.folder / "data2vec" / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"]
    assert updates == 4, "resumed"


@pytest.mark.parametrize("name", ["seq2seq", "s2t"])
def test_beam_search_decodes_every_recording(runs: NamedRuns, name: str) -> None:
    """Each has a hypothesis, and the word error is computed."""
    output = runs.outputs[f"{name} decoded"]
    assert sorted(re.findall(r"^H-(\d+)\t\S+\t\S", output, flags=re.MULTILINE)) == ["0", "1", "2", "3"]
    assert re.search(r"WER: \d", output)


def test_attention_transfer_of_speech_to_text(runs: NamedRuns) -> None:
    """The attentions of the encoder and of the decoder learn, and nothing else."""
    start = weights(torch.load(runs.folder / "start s2t.pt")["model"])
    learned = _weights(runs, "transfer s2t")
    changed = {name for name in start if not torch.equal(start[name], learned[name])}
    assert {name.split(".")[0] for name in changed if ".inner." in name} == {"encoder", "decoder"}
    assert all(".self_attn." in name for name in changed)


def test_ctc_reports_word_errors(runs: NamedRuns) -> None:
    """fairseq decodes by the best label of each frame."""
    assert re.search(r"\| wer \d", runs.outputs["ctc errors"])
