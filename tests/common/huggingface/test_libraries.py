"""Names by which PEFT, Trainer, accelerate and sentence-transformers find the parts of a model."""

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.utils import ModelOutput, find_labels

from common.huggingface import (
    AUTO_CLASSES,
    LineartimeForCausalLM,
    LineartimeForMaskedLM,
    LineartimeForSeq2SeqLM,
    LineartimeForSequenceClassification,
)

from .tiny_models import small

#: The model for each type of task of PEFT that there is a model for.
TASKS = {
    "CAUSAL_LM": LineartimeForCausalLM,
    "SEQ_CLS": LineartimeForSequenceClassification,
    "SEQ_2_SEQ_LM": LineartimeForSeq2SeqLM,
    "FEATURE_EXTRACTION": LineartimeForMaskedLM,
    None: LineartimeForMaskedLM,
}


def batch(kind: type[nn.Module]) -> dict[str, Tensor]:
    """Two rows with labels."""
    ids = torch.randint(4, 300, (2, 6), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": torch.tensor([0, 1]) if kind is TASKS["SEQ_CLS"] else ids}


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"])
@pytest.mark.parametrize("task", TASKS)
def test_peft_trains_what_is_new(task: str | None, targets: Any, tmp_path: Path) -> None:
    """The low ranks and, without a word, a classifier's head; what it saves gives the same again."""
    kind = TASKS[task]
    torch.manual_seed(0)
    model = small(kind)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(task_type=task, r=2, target_modules=targets))
    adapted.train()(**batch(kind)).loss.backward()
    learns = {name for name, x in adapted.named_parameters() if x.requires_grad and x.grad is not None}
    assert learns == {name for name, x in adapted.named_parameters() if x.requires_grad}
    head = {name for name in learns if "lora_" not in name}
    assert {name.split(".modules_to_save.default")[0] for name in head} <= {"base_model.model.classifier"}
    assert len(head) == (4 if kind is LineartimeForSequenceClassification else 0)
    with torch.no_grad():
        for name, x in adapted.named_parameters():
            if name in learns:
                x.add_(0.1)
        expected = adapted.eval()(**batch(kind)).logits
        adapted.save_pretrained(tmp_path)
        again = PeftModel.from_pretrained(model, tmp_path).eval()
        assert torch.equal(again(**batch(kind)).logits, expected)


def test_the_head_can_be_named() -> None:
    model = small(LineartimeForSequenceClassification)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["classifier"]))
    assert sum(x.requires_grad for name, x in adapted.named_parameters() if ".classifier." in name) == 4


def test_a_head_with_its_name_in_fairseq_is_loaded(tmp_path: Path) -> None:
    """By torch and by transformers, which saves the present names; other folders are as before."""
    torch.manual_seed(0)
    model = small(LineartimeForSequenceClassification, classifier_head="topics").eval()
    model.save_pretrained(tmp_path / "new")
    model.save_pretrained(tmp_path / "old")
    names = load_file(tmp_path / "new" / "model.safetensors")
    former = {name.replace("classifier.", "classification_heads.topics."): x for name, x in names.items()}
    assert former.keys() != names.keys()
    save_file(former, tmp_path / "old" / "model.safetensors", {"format": "pt"})
    other = small(LineartimeForSequenceClassification, classifier_head="topics")
    other.load_state_dict(
        {name.replace("classifier.", "classification_heads.topics."): x for name, x in model.state_dict().items()}
    )
    loaded = LineartimeForSequenceClassification.from_pretrained(tmp_path / "old")
    loaded.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == names.keys()
    again = LineartimeForSequenceClassification.from_pretrained(tmp_path / "again")
    with torch.no_grad():
        for each in (other, loaded, again, pickle.loads(pickle.dumps(loaded))):
            assert torch.equal(each.eval()(**batch(type(model))).logits, model(**batch(type(model))).logits)


@pytest.mark.parametrize("kind", AUTO_CLASSES.values())
def test_libraries_find_what_they_look_for(kind: type[nn.Module]) -> None:
    """Labels, embeddings, the input, the class of outputs, and numbers of parameters."""
    model = small(kind)
    assert find_labels(kind) == ["labels"]
    assert model.main_input_name == "input_ids"
    assert model.base_model is model
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding) and embeddings.num_embeddings == 300
    generates = hasattr(kind, "generate")
    assert (model.get_output_embeddings() is not None) == generates
    assert model.num_parameters() == sum(x.numel() for x in model.parameters())
    assert model.num_parameters(exclude_embeddings=True) < model.num_parameters()
    returned = [x for x in get_args(get_type_hints(kind.forward)["return"]) if issubclass(x, ModelOutput)]
    output = model(**batch(kind))
    assert returned == [type(output)]
    assert output.keys() & {"loss", "logits"} == {"loss", "logits"}
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    json.dumps(model.config.to_dict())


@pytest.mark.parametrize("kind", AUTO_CLASSES.values())
@pytest.mark.parametrize("share", [0.7, 0.9])
def test_layers_are_not_split_between_devices(share: float, kind: type[nn.Module], tmp_path: Path) -> None:
    """accelerate puts whole layers into a part of the memory, and others on the disk; outputs stay."""
    torch.manual_seed(0)
    model = small(kind).eval()
    model.save_pretrained(tmp_path / "model")
    places = {"device_map": "auto", "max_memory": {"cpu": int(4 * share * model.num_parameters()), "disk": 10**9}}
    parts = kind.from_pretrained(tmp_path / "model", **places, offload_folder=tmp_path / "disk").eval()
    assert set(parts.hf_device_map.values()) == {"cpu", "disk"}
    assert not any(re.search(r"layers\.\d+\.", place) for place in parts.hf_device_map)
    with torch.no_grad():
        assert torch.equal(parts(**batch(kind)).logits, model(**batch(kind)).logits)
