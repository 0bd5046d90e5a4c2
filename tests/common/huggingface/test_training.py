"""Trainings of transformers and its relatives, which mean what they mean on a stock model: plain loops of torch."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer, TrainingArguments

from common.huggingface import LineartimeForSequenceClassification
from tests.compare import assert_close

from .models import language_model, small, stock_model, texts

LR, UPDATES, BATCH, STEPS = 0.1, 4, 2, 2
MODELS = {"lineartime": language_model, "stock": stock_model}


class Rows(IterableDataset):
    """Sequences of 12 tokens, always in the same order, with their labels, of which some rows have fewer."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(2)
        for i in range(UPDATES * STEPS * BATCH):
            tokens = torch.randint(4, 260, (12,), generator=generator)
            yield {"input_ids": tokens, "labels": tokens.where(torch.arange(12) < 12 - 2 * (i % 4), -100)}


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    """A training without dropout, decay, clipping or logs."""
    chosen = {"max_steps": UPDATES, "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": STEPS}
    chosen |= {"learning_rate": LR, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    chosen |= {"save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    return TrainingArguments(output_dir=str(folder), **{**chosen, **options})


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of the next token, where there is a label."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def plain_loop(model: nn.Module, rows: int, updates: int = UPDATES) -> nn.Module:
    """Train with SGD on so many rows an update, all at once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for batch, _ in zip(DataLoader(Rows(), batch_size=rows), range(updates)):
        loss_of(model.train()(batch["input_ids"]).logits, batch["labels"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def assert_equal_weights(model: nn.Module, expected: nn.Module) -> None:
    """Compare two models by name."""
    weights = dict(expected.named_parameters())
    for name, x in model.named_parameters():
        assert_close(name, x.detach(), weights[name].detach(), tolerance=2e-6, floor=1e-3)


def gradients(model: nn.Module, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """The gradients of the loss of one batch, and how many numbers were kept for the backward pass."""
    sizes: list[int] = []
    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x):
        loss = model.train()(**batch).loss
    loss.backward()
    return {name.removeprefix("_orig_mod."): x.grad.clone() for name, x in model.named_parameters()}, sum(sizes)


@pytest.fixture(autouse=True)
def _own_accelerator() -> None:
    """Forget the settings of an earlier training: accelerate keeps those of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    """A new tiny language model: ours, and one of transformers' own, with which the same calls mean the same."""
    return MODELS[request.param]()


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """The first batch of ``Rows``."""
    return next(iter(DataLoader(Rows(), batch_size=BATCH)))


def test_trainer_is_a_plain_loop(model: nn.Module, tmp_path: Path) -> None:
    """Several batches an update are one large batch; the weights that it saves are loaded."""
    expected, before = plain_loop(copy.deepcopy(model), BATCH * STEPS), copy.deepcopy(model)
    trainer = Trainer(model, arguments(tmp_path), train_dataset=Rows())
    trainer.train()
    assert trainer.state.global_step == UPDATES
    assert_equal_weights(model, expected)
    assert not torch.equal(before.get_input_embeddings().weight, model.get_input_embeddings().weight)
    trainer.save_model(str(tmp_path / "saved"))
    assert_equal_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), model)


def test_the_loss_is_that_of_the_next_token(model: nn.Module, tmp_path: Path) -> None:
    """Labels are shifted here; a number of labels divides the sum, and Trainer's smoothing shifts them too."""
    rows = list(Rows())[2:4]  # whose labels end early
    ids, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    out = model(ids, labels=labels)
    assert_close("loss", out.loss, loss_of(out.logits, labels))
    total = model(ids, labels=labels, num_items_in_batch=torch.tensor(10)).loss
    assert_close("sum", total, out.loss * (labels[:, 1:] != -100).sum() / 10)
    trainer = Trainer(model, arguments(tmp_path, label_smoothing_factor=1e-6), train_dataset=Rows())
    assert_close("smoothed", trainer.compute_loss(model, {"input_ids": ids, "labels": labels}), out.loss, 1e-3)


def test_gradient_checkpointing_changes_no_gradient(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """It keeps fewer activations."""
    expected, kept = gradients(model, batch)
    model.gradient_checkpointing_enable()
    found, fewer = gradients(model, batch)
    for name, grad in found.items():
        assert_close(name, grad, expected[name], floor=1e-6)
    assert fewer < 0.7 * kept


def test_bfloat16(model: nn.Module, batch: dict[str, Tensor], tmp_path: Path) -> None:
    """Autocast in a training of two updates, and weights of half precision, whose loss is near."""
    with torch.no_grad():
        loss = float(model(**batch).loss)
        half = copy.deepcopy(model).to(torch.bfloat16)
        assert float(half(**batch).loss) == pytest.approx(loss, rel=0.05)
    expected = plain_loop(copy.deepcopy(model), BATCH * STEPS, updates=2)
    Trainer(model, arguments(tmp_path, bf16=True, max_steps=2), train_dataset=Rows()).train()
    assert all(torch.isfinite(x).all() and x.dtype == torch.float32 for x in model.parameters())
    with torch.no_grad():
        assert float(model.eval()(**batch).loss) == pytest.approx(float(expected(**batch).loss), rel=0.05)


def test_accelerate_is_a_plain_loop(model: nn.Module) -> None:
    expected = plain_loop(copy.deepcopy(model), BATCH, updates=2)
    accelerator, optimizer = Accelerator(cpu=True), torch.optim.SGD(model.parameters(), lr=LR)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Rows(), batch_size=BATCH))
    for batch, _ in zip(loader, range(2)):
        accelerator.backward(prepared.train()(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_weights(accelerator.unwrap_model(prepared), expected)


def test_lora_learns_its_own_parameters(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Merged, the model is what it was with them."""
    before = copy.deepcopy(model)
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    adapted.train()(**batch).loss.backward()
    learned = {name: x.grad for name, x in adapted.named_parameters() if x.requires_grad}
    assert learned and all("lora_" in name and grad is not None for name, grad in learned.items())
    with torch.no_grad():
        logits = adapted.eval()(batch["input_ids"]).logits
        merged = adapted.merge_and_unload()
        assert type(merged) is type(before)
        assert_close("merged", merged(batch["input_ids"]).logits, logits)
        assert not torch.allclose(before(batch["input_ids"]).logits, logits)


def test_torch_compile_changes_nothing(batch: dict[str, Tensor]) -> None:
    torch._dynamo.reset()
    model = language_model()
    (expected, _), (found, _) = (gradients(x, batch) for x in (model, torch.compile(model, backend="aot_eager")))
    for name, grad in found.items():
        assert_close(name, grad, expected[name], floor=1e-6)


@pytest.mark.parametrize("kinds", [("linear", "flow"), ("gated_delta", "softmax")])
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(kinds: tuple[str, str]) -> None:
    """Packed by ``DataCollatorWithFlattening``, each has the logits that it has by itself; the loss is theirs."""
    model, documents = language_model([{"kind": kind} for kind in kinds]), texts(5, 9, 2)
    rows = [{"input_ids": x.tolist()} for x in documents]
    packed = DataCollatorWithFlattening()(rows)
    assert packed["input_ids"].shape == (1, 16) and packed["position_ids"].eq(0).sum() == 3
    out, alone = model(**packed), [model(x[None], labels=x[None]) for x in documents]
    same = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(rows)
    assert torch.equal(model(**same).logits, out.logits)
    assert_close("logits", out.logits[0], torch.cat([x.logits[0] for x in alone]))
    losses = torch.stack([x.loss * (len(document) - 1) for x, document in zip(alone, documents)])
    assert_close("loss", out.loss, losses.sum() / (16 - 3))


def test_a_classifier_is_trained_and_evaluated(tmp_path: Path) -> None:
    """``Trainer`` passes it nothing that it does not read."""
    rows = [{"input_ids": [4 + i] * 6, "attention_mask": [1] * 6, "labels": i % 3} for i in range(4)]
    model = small(LineartimeForSequenceClassification, num_labels=3)
    trainer = Trainer(model, arguments(tmp_path, max_steps=2), train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0.0
