"""PEFT, accelerate, pipelines and transformers' own classes find what they look for, in every class of model."""

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
from transformers import AutoModel, AutoModelForSequenceClassification, pipeline
from transformers.utils import ModelOutput, find_labels

from common.huggingface import (
    AUTO_CLASSES,
    LineartimeCache,
    LineartimeForCausalLM,
    LineartimeForMaskedLM,
    LineartimeForSeq2SeqLM,
    LineartimeForSequenceClassification,
    LineartimeModel,
)
from tests.compare import assert_close, assert_drawn_alike, weights

from .models import save_folder, small

#: The model for each type of task of PEFT that there is a model for.
TASKS = {
    "CAUSAL_LM": LineartimeForCausalLM,
    "SEQ_CLS": LineartimeForSequenceClassification,
    "SEQ_2_SEQ_LM": LineartimeForSeq2SeqLM,
    "FEATURE_EXTRACTION": LineartimeModel,
    None: LineartimeForMaskedLM,
}
#: The classes that share an encoder, and those that share the layers of a language model.
ENCODERS = (LineartimeForMaskedLM, LineartimeForSequenceClassification, LineartimeModel)
DECODERS = (LineartimeForCausalLM, LineartimeForSequenceClassification, LineartimeModel)
TIED = {"tie_word_embeddings": True}
PAIRS = [
    *((one, other, {}) for one in ENCODERS for other in ENCODERS if one is not other),
    *((one, other, {"is_decoder": True, **TIED}) for one in DECODERS for other in DECODERS if one is not other),
    (LineartimeForMaskedLM, LineartimeModel, TIED),
    (LineartimeForCausalLM, LineartimeModel, {"is_decoder": True, "embedding_dim": 48, "output_dim": 32}),
]
kinds = pytest.mark.parametrize("kind", AUTO_CLASSES.values())


def batch(kind: type[nn.Module]) -> dict[str, Tensor]:
    """Two rows, with labels where there is a loss."""
    ids = torch.randint(4, 300, (2, 6), generator=torch.Generator().manual_seed(1))
    if kind is LineartimeModel:
        return {"input_ids": ids}
    return {"input_ids": ids, "labels": torch.tensor([0, 1]) if kind is TASKS["SEQ_CLS"] else ids}


def result(output: ModelOutput) -> Tensor:
    """Scores, or else features."""
    return output["logits"] if "logits" in output else output.last_hidden_state


@pytest.mark.parametrize("task", TASKS)
def test_peft_trains_what_is_new(task: str | None, tmp_path: Path) -> None:
    """The low ranks and, without a word, a classifier's head; what it saves gives the same again."""
    kind = TASKS[task]
    model, config = small(kind), LoraConfig(task_type=task, r=2, target_modules="all-linear")
    adapted = get_peft_model(copy.deepcopy(model), config)
    adapted.train()(**batch(kind))[0].sum().backward()
    learns = {name for name, x in adapted.named_parameters() if x.requires_grad and x.grad is not None}
    assert learns == {name for name, x in adapted.named_parameters() if x.requires_grad}
    head = {name for name in learns if "lora_" not in name}
    assert {name.split(".modules_to_save.default")[0] for name in head} <= {"base_model.model.classifier"}
    assert len(head) == (4 if kind is LineartimeForSequenceClassification else 0)
    with torch.no_grad():
        for name, x in adapted.named_parameters():
            if name in learns:
                x.add_(0.1)
        expected = result(adapted.eval()(**batch(kind)))
        adapted.save_pretrained(tmp_path)
        again = PeftModel.from_pretrained(model, tmp_path).eval()
        assert torch.equal(result(again(**batch(kind))), expected)


def test_a_head_with_its_name_in_fairseq_is_loaded(tmp_path: Path) -> None:
    """By torch and by transformers, which saves the present names; other folders are as before."""
    model = small(LineartimeForSequenceClassification, classifier_head="topics").eval()
    model.save_pretrained(tmp_path / "new")
    model.save_pretrained(tmp_path / "old")
    names = load_file(tmp_path / "new" / "model.safetensors")

    def former(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.replace("classifier.", "classification_heads.topics."): x for name, x in state.items()}

    assert former(names).keys() != names.keys()
    save_file(former(names), tmp_path / "old" / "model.safetensors", {"format": "pt"})
    other = small(LineartimeForSequenceClassification, classifier_head="topics")
    nn.init.zeros_(other.classifier.dense.weight)
    other.load_state_dict(former(model.state_dict()))
    loaded = LineartimeForSequenceClassification.from_pretrained(tmp_path / "old")
    loaded.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == names.keys()
    again = LineartimeForSequenceClassification.from_pretrained(tmp_path / "again")
    with torch.no_grad():
        for each in (other, loaded, again, pickle.loads(pickle.dumps(loaded))):
            assert torch.equal(each.eval()(**batch(type(model))).logits, model(**batch(type(model))).logits)


@kinds
def test_libraries_find_what_they_look_for(kind: type[nn.Module]) -> None:
    """Labels, embeddings, the input, the class of outputs, and numbers of parameters."""
    model = small(kind)
    assert find_labels(kind) == [name for name in batch(kind) if name == "labels"]
    assert model.main_input_name == "input_ids" and model.base_model is model
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding) and embeddings.num_embeddings == 300
    assert (model.get_output_embeddings() is not None) == hasattr(kind, "generate")
    assert model.num_parameters() == sum(x.numel() for x in model.parameters())
    assert model.num_parameters(exclude_embeddings=True) < model.num_parameters()
    returned = [x for x in get_args(get_type_hints(kind.forward)["return"]) if issubclass(x, ModelOutput)]
    output = model(**batch(kind))
    assert returned == [type(output)]
    assert output.keys() >= ({"loss", "logits"} if "labels" in batch(kind) else {"last_hidden_state"})
    assert torch.equal(model(**batch(kind), return_dict=False)[0], output[0])
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    json.dumps(model.config.to_dict())


def test_a_saved_folder_keeps_the_code_that_its_configuration_names(tmp_path: Path) -> None:
    """``trust_remote_code=True`` needs it, also after a training."""
    model = small(LineartimeForCausalLM)
    model.config.auto_map = {"AutoModelForCausalLM": "modeling_lineartime.LineartimeForCausalLM"}
    model.save_pretrained(tmp_path)
    assert (tmp_path / "modeling_lineartime.py").is_file()


@kinds
def test_layers_are_not_split_between_devices(kind: type[nn.Module], tmp_path: Path) -> None:
    """accelerate puts whole layers into a part of the memory, and others on the disk; outputs stay."""
    model = small(kind).eval()
    model.save_pretrained(tmp_path / "model")
    for share in (0.7, 0.9):
        places = {"device_map": "auto", "max_memory": {"cpu": int(4 * share * model.num_parameters()), "disk": 10**9}}
        parts = kind.from_pretrained(tmp_path / "model", **places, offload_folder=tmp_path / "disk").eval()
        assert set(parts.hf_device_map.values()) == {"cpu", "disk"}
        assert not any(re.search(r"layers\.\d+\.", place) for place in parts.hf_device_map)
        with torch.no_grad():
            assert torch.equal(result(parts(**batch(kind))), result(model(**batch(kind))))


@pytest.mark.parametrize(("stored", "kind", "fields"), PAIRS)
@torch.no_grad()
def test_a_head_is_left_out_or_begins_anew(
    stored: type[nn.Module], kind: type[nn.Module], fields: dict[str, Any], tmp_path: Path
) -> None:
    """In a folder of another class; all other weights are loaded, and give the same features."""
    model = small(stored, **fields).eval()
    model.save_pretrained(tmp_path)
    auto = next(auto for auto, own in AUTO_CLASSES.items() if own is kind)
    options = {} if stored is LineartimeForSequenceClassification else {"num_labels": 3}
    loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True, **options)
    assert type(loaded) is kind
    before, after = model.state_dict(), loaded.state_dict()
    body = before.keys() & after.keys()
    tied = {"encoder.lm_head.weight", "decoder.output_projection.weight"} if "tie_word_embeddings" in fields else set()
    assert set(info["missing_keys"]) == after.keys() - body - tied
    assert set(info["unexpected_keys"]) == before.keys() - body - tied
    assert_drawn_alike(loaded, kind(loaded.config))
    assert all(torch.equal(after[name], x) for name, x in weights(before).items() if name in body)
    inputs = {**batch(LineartimeModel), "output_hidden_states": True}
    assert torch.equal(loaded(**inputs).hidden_states[-1], model(**inputs).hidden_states[-1])


@pytest.mark.parametrize("kind", (LineartimeForCausalLM, LineartimeForMaskedLM, LineartimeForSequenceClassification))
def test_nothing_but_a_whole_head_may_be_missing(kind: type[nn.Module], tmp_path: Path) -> None:
    """Nor may it be missing in a folder of the same class."""
    model = small(kind, **({"embedding_dim": 48, "output_dim": 32} if kind is LineartimeForCausalLM else {}))
    model.save_pretrained(tmp_path)
    headless = AutoModel.from_pretrained(tmp_path)
    state, body = model.state_dict(), headless.state_dict()
    last = max(name for name in weights(state).keys() - body.keys())
    layer = next(name for name in body if name.endswith("fc2.weight"))
    more = {**body, "more": torch.zeros(1)}
    for folder, (saved, tensors, error) in {
        "head": (model, {name: state[name] for name in body}, "missing"),
        "part": (headless, {name: x for name, x in state.items() if name != last}, f"1 missing .{last}"),
        "layer": (headless, {name: x for name, x in body.items() if name != layer}, rf"1 missing .{layer}\)"),
        "more": (headless, more, "1 not of this model .more.; allowed"),
    }.items():
        saved.save_pretrained(tmp_path / folder, state_dict=tensors)
        with pytest.raises(ValueError, match=error):
            kind.from_pretrained(tmp_path / folder)


@pytest.mark.parametrize(("kind", "side"), [(DECODERS[0], "left"), (DECODERS[0], "right"), (ENCODERS[0], "left")])
@torch.no_grad()
def test_features_are_those_that_heads_read(kind: type[nn.Module], side: str, tmp_path: Path) -> None:
    """They agree for padded rows, in parts with a cache, in pipelines, and for each text alone."""
    model = small(kind).eval()
    save_folder(tmp_path, model)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("is_decoder") is (kind is LineartimeForCausalLM)
    (tmp_path / "config.json").write_text(json.dumps(config))  # as in folders of earlier versions
    features, texts = AutoModel.from_pretrained(tmp_path), ["the first", "another and a longer one"]
    extract = pipeline("feature-extraction", model=str(tmp_path), device="cpu")
    inputs = extract.tokenizer(texts, padding=True, padding_side=side, return_tensors="pt")
    found = features(**inputs, output_hidden_states=True)
    expected = model(**inputs, output_hidden_states=True).hidden_states
    assert torch.equal(found.last_hidden_state, expected[-1]) and all(map(torch.equal, found.hidden_states, expected))
    for text, x, mask in zip(texts, expected[-1], inputs.attention_mask):
        assert_close(text, x[mask == 1][None], torch.tensor(extract(text)))
    if kind is not LineartimeForCausalLM:
        for refused in ({"position_ids": torch.zeros(2, 24)}, {"use_cache": True}):
            with pytest.raises(ValueError, match="is given; allowed"):
                features(**inputs, **refused)
        return
    caches = LineartimeCache(), LineartimeCache()
    for part in (slice(0, 10), slice(10, None)):
        given = {"input_ids": inputs.input_ids[:, part], "attention_mask": inputs.attention_mask[:, : part.stop]}
        x, other = (m(**given, cache=c, output_hidden_states=True) for m, c in zip((features, model), caches))
        assert torch.equal(x.last_hidden_state, other.hidden_states[-1])
    assert caches[0].columns == inputs.input_ids.shape[1]


@torch.no_grad()
def test_an_encoder_decoder_is_not_one_stack(tmp_path: Path) -> None:
    model, ids = small(LineartimeForSeq2SeqLM).eval(), batch(LineartimeModel)["input_ids"]
    model.save_pretrained(tmp_path)
    for auto in (AutoModel, AutoModelForSequenceClassification):
        with pytest.raises(ValueError, match="is_encoder_decoder is True; allowed"):
            auto.from_pretrained(tmp_path)
    features = model.get_encoder()(ids).last_hidden_state  # which the message names
    assert torch.equal(features, model(ids, decoder_input_ids=ids).encoder_last_hidden_state)


@torch.no_grad()
def test_a_language_model_is_classified_by_its_last_token(tmp_path: Path) -> None:
    """With padding on either side; its first token has seen no other."""
    small(LineartimeForCausalLM).save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    row = batch(LineartimeModel)["input_ids"][:1]
    features = LineartimeModel.from_pretrained(tmp_path)(row).last_hidden_state
    assert torch.equal(model(row).logits, model.classifier(features[:, -1]))
    for padding in ((2, 0), (0, 2)):
        assert_close("logits", model(nn.functional.pad(row, padding, value=1)).logits, model(row).logits)
    for pooling, folder in (("first", {"is_decoder": True}), ("last", {})):
        with pytest.raises(ValueError, match=f"pooling is '{pooling}'; allowed"):
            small(LineartimeForSequenceClassification, pooling=pooling, **folder)
