"""Trainings of transformers' and of its relatives, compared with plain loops of torch."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer, TrainingArguments

from common.huggingface import LineartimeConfig, LineartimeForCausalLM, LineartimeForSequenceClassification
from common.huggingface import LineartimeForMaskedLM as MaskedLM
from common.huggingface import LineartimeForSeq2SeqLM as Seq2SeqLM
from tests.compare import assert_close

from .tiny_folders import language_model

LR, UPDATES, BATCH = 0.1, 20, 2


class Rows(IterableDataset):
    """Sequences of 12 tokens, always in the same order, with their labels."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(2)
        for _ in range(UPDATES * BATCH):
            tokens = torch.randint(4, 260, (12,), generator=generator)
            yield {"input_ids": tokens, "labels": tokens}


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    """Of a training without dropout, decay, clipping or logs."""
    chosen = {
        "max_steps": UPDATES,
        "per_device_train_batch_size": BATCH,
        "learning_rate": LR,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(output_dir=str(folder), **{**chosen, **options})


def plain_loop(model: nn.Module, updates: int = UPDATES) -> nn.Module:
    """Train with SGD as ``arguments`` says."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for batch, _ in zip(DataLoader(Rows(), batch_size=BATCH), range(updates)):
        model.train()(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def assert_equal_weights(model: nn.Module, expected: nn.Module, tolerance: float = 1e-6) -> None:
    """Of two models, by name."""
    weights = dict(expected.named_parameters())
    for name, x in model.named_parameters():
        assert_close(name, x.detach(), weights[name].detach(), tolerance=tolerance, floor=1e-3)


def gradients(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of the loss of one batch."""
    model.zero_grad()
    model.train()(**batch).loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters()}


@pytest.fixture(autouse=True)
def _own_accelerator() -> None:
    """No settings of an earlier training: accelerate keeps those of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def model() -> LineartimeForCausalLM:
    """A new tiny model."""
    return language_model()


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """The first batch of ``Rows``."""
    return next(iter(DataLoader(Rows(), batch_size=BATCH)))


def test_trainer_is_a_plain_loop(model: LineartimeForCausalLM, tmp_path: Path) -> None:
    """20 updates; the weights that it saves are loaded."""
    expected = plain_loop(copy.deepcopy(model))
    before = copy.deepcopy(model)
    trainer = Trainer(model, arguments(tmp_path), train_dataset=Rows())
    trainer.train()
    assert trainer.state.global_step == UPDATES
    assert_equal_weights(model, expected)
    assert not torch.equal(before.decoder.layers[0].fc1.weight, model.decoder.layers[0].fc1.weight)
    trainer.save_model(str(tmp_path / "saved"))
    assert_equal_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), model)


def test_the_loss_is_that_of_the_next_token(model: LineartimeForCausalLM, batch: dict[str, Tensor]) -> None:
    """Labels are shifted here, and those of -100 have no loss; a given number of labels divides the sum."""
    labels = batch["labels"].clone()
    labels[0, 3:5] = -100
    with torch.no_grad():
        out = model(batch["input_ids"], labels=labels)
        total = model(batch["input_ids"], labels=labels, num_items_in_batch=torch.tensor(10)).loss
    log_probs = out.logits[:, :-1].log_softmax(-1)
    targets, counted = labels[:, 1:], labels[:, 1:] != -100
    losses = -log_probs.gather(2, targets.clamp(min=0)[..., None])[..., 0][counted]
    assert_close("loss", out.loss, losses.mean())
    assert_close("sum", total, losses.sum() / 10)


def test_gradient_checkpointing_changes_no_gradient(model: LineartimeForCausalLM, batch: dict[str, Tensor]) -> None:
    """And keeps fewer activations."""
    expected, kept = gradients(model, batch), activations(model, batch)
    model.gradient_checkpointing_enable()
    for name, grad in gradients(model, batch).items():
        assert_close(name, grad, expected[name], floor=1e-6)
    assert activations(model, batch) < 0.7 * kept


def activations(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """The numbers that a forward pass keeps for the backward pass."""
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x):
        model.train()(**batch)
    return sum(sizes)


def test_bfloat16(model: LineartimeForCausalLM, batch: dict[str, Tensor], tmp_path: Path) -> None:
    """Autocast in a training of two updates, and weights of half precision, whose loss is near."""
    with torch.no_grad():
        loss = float(model(**batch).loss)
        half = copy.deepcopy(model).to(torch.bfloat16)
        assert float(half(**batch).loss) == pytest.approx(loss, rel=0.05)
    expected = plain_loop(copy.deepcopy(model), updates=2)
    Trainer(model, arguments(tmp_path, bf16=True, max_steps=2), train_dataset=Rows()).train()
    assert all(torch.isfinite(x).all() and x.dtype == torch.float32 for x in model.parameters())
    with torch.no_grad():
        assert float(model.eval()(**batch).loss) == pytest.approx(float(expected(**batch).loss), rel=0.05)


def test_accelerate_is_a_plain_loop(model: LineartimeForCausalLM) -> None:
    expected = plain_loop(copy.deepcopy(model), updates=2)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Rows(), batch_size=BATCH))
    for batch, _ in zip(loader, range(2)):
        accelerator.backward(prepared.train()(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_weights(accelerator.unwrap_model(prepared), expected)


def test_lora_learns_its_own_parameters(model: LineartimeForCausalLM, batch: dict[str, Tensor]) -> None:
    """Merged, the model is what it was with them."""
    before = copy.deepcopy(model)
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    grads = {name: x.grad for name, x in _learned(adapted, batch).items()}
    assert grads and all("lora_" in name and grad is not None for name, grad in grads.items())
    with torch.no_grad():
        logits = adapted.eval()(batch["input_ids"]).logits
        merged = adapted.merge_and_unload()
        assert type(merged) is LineartimeForCausalLM
        assert_close("merged", merged(batch["input_ids"]).logits, logits)
        assert not torch.allclose(before(batch["input_ids"]).logits, logits)
    assert torch.equal(before.decoder.layers[0].fc1.weight, merged.decoder.layers[0].fc1.weight)


def _learned(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, nn.Parameter]:
    """The parameters that learn, after one backward pass."""
    model.train()(**batch).loss.backward()
    return {name: x for name, x in model.named_parameters() if x.requires_grad}


def test_torch_compile_changes_nothing(model: LineartimeForCausalLM, batch: dict[str, Tensor]) -> None:
    """Forward and backward."""
    expected = gradients(model, batch)
    torch._dynamo.reset()
    compiled = gradients(torch.compile(model, backend="aot_eager"), batch)
    for name, grad in compiled.items():
        assert_close(name, grad, expected[name.removeprefix("_orig_mod.")], floor=1e-6)


@pytest.mark.parametrize("kinds", [("linear", "flow"), ("gated_delta", "softmax")])
def test_packed_documents_do_not_see_each_other(kinds: tuple[str, str]) -> None:
    """Packed by ``DataCollatorWithFlattening``, each has the logits that it has by itself; the loss is theirs."""
    model = language_model([{"kind": kind} for kind in kinds])
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(4, 260, (length,), generator=generator) for length in (5, 9, 2)]
    packed = DataCollatorWithFlattening()([{"input_ids": x.tolist()} for x in documents])
    further = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    with torch.no_grad():
        same = model(**further([{"input_ids": x.tolist()} for x in documents])).logits
    assert packed["input_ids"].shape == (1, 16) and packed["position_ids"].eq(0).sum() == 3
    with torch.no_grad():
        out = model(**packed)
        alone = [model(x[None], labels=x[None]) for x in documents]
    assert torch.equal(same, out.logits)
    assert_close("logits", out.logits[0], torch.cat([x.logits[0] for x in alone]))
    losses = torch.stack([x.loss * (len(document) - 1) for x, document in zip(alone, documents)])
    assert_close("loss", out.loss, losses.sum() / (16 - 3))


def _tiny(kind: type, **fields: Any) -> nn.Module:
    """A model of ``kind`` with one layer of width 16."""
    sizes = {"vocab_size": 260, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    return kind(LineartimeConfig(attention=[{"kind": "flow"}], **sizes, **fields))


def test_options_that_are_no_dictionary_are_refused() -> None:
    with pytest.raises(ValueError, match=r"attention\[0\] has the options 3; allowed: a dictionary"):
        LineartimeForCausalLM(LineartimeConfig(attention=[{"kind": "flow", "options": 3}]))


def test_learned_positions_that_would_fill_all_memory_are_refused() -> None:
    with pytest.raises(ValueError, match="max_position_embeddings is 1,000,000,000, .*; allowed"):
        fields = {"positions": "learned", "max_position_embeddings": 10**9}
        LineartimeForCausalLM(LineartimeConfig(attention=[{"kind": "flow"}], **fields))


def test_a_classifier_is_trained_and_evaluated(tmp_path: Path) -> None:
    """``Trainer`` passes it nothing that it does not read."""
    rows = [{"input_ids": [4 + i] * 6, "attention_mask": [1] * 6, "labels": i % 3} for i in range(4)]
    model = _tiny(LineartimeForSequenceClassification, num_labels=3)
    trainer = Trainer(model, arguments(tmp_path, max_steps=2), train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0.0


def test_label_smoothing_is_of_the_next_token(model: LineartimeForCausalLM, tmp_path: Path) -> None:
    """transformers shifts the labels of the models that it knows as causal ones."""
    trainer = Trainer(model, arguments(tmp_path, label_smoothing_factor=1e-6), train_dataset=Rows())
    batch = next(iter(DataLoader(Rows(), batch_size=BATCH)))
    assert_close("loss", trainer.compute_loss(model, dict(batch)), model(**batch).loss, 1e-3)


def test_a_saved_folder_keeps_the_code_that_its_configuration_names(
    model: LineartimeForCausalLM, tmp_path: Path
) -> None:
    """``trust_remote_code=True`` needs it, also after a training."""
    model.config.auto_map = {"AutoModelForCausalLM": "modeling_lineartime.LineartimeForCausalLM"}
    model.save_pretrained(tmp_path)
    assert (tmp_path / "modeling_lineartime.py").is_file()


def test_a_table_alone_is_not_resized() -> None:
    """The other tables and the head would keep their size."""
    sides = {f"encoder_{name}": value for name, value in {"vocab_size": 260, "hidden_size": 16}.items()}
    sides |= {
        "encoder_num_attention_heads": 2,
        "encoder_intermediate_size": 16,
        "encoder_attention": [{"kind": "flow"}],
    }
    sides |= {"encoder_normalize_before": True, "encoder_final_norm": True, "encoder_positions": "sinusoidal"}
    sides |= {"encoder_max_position_embeddings": 64, "cross_attention": [{"kind": "softmax"}]}
    models = (_tiny(MaskedLM), _tiny(Seq2SeqLM, decoder_start_token_id=2, **sides))
    for model in models:
        with pytest.raises(ValueError, match="new_num_tokens is 300; allowed"):
            model.resize_token_embeddings(300)
    _tiny(MaskedLM, tie_word_embeddings=True).resize_token_embeddings(300)
