"""The model card of an exported folder: what the checkpoint says about the model, and how to load it."""

from typing import Any

from common.attention import VARIABLE
from common.huggingface import LineartimeConfig

from ..loading.mismatch_hints import layer_pattern
from .huggingface_checkpoint import Source

_PURPOSES = {
    "causal": "a language model",
    "masked": "a masked language model",
    "classifier": "a classifier of sequences",
    "encoder_decoder": "an encoder-decoder",
}
#: Criteria whose loss is the cross-entropy in bits per token, so that perplexity is 2 to its power.
_IN_BITS = ("cross_entropy", "masked_lm", "adaptive_loss")


def files_of_own(config: LineartimeConfig) -> dict[str, str]:
    """The file in a folder of each attention that is a user's own, which loading the folder does not import."""
    return {name: f"{module.rpartition('.')[2]}.py" for name, module in config.own_modules.items()}


def model_card(source: Source, config: LineartimeConfig, kind: str) -> str:
    """The text of README.md in an exported folder; ``kind`` is how its tokenizer forms symbols."""
    auto_class = next(name for name in config.auto_map if name != "AutoConfig")
    rows = {**_about(source, config, kind), **_training(source)}
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""---
library_name: transformers
tags:
- lineartime
---

# {source.architecture}

This is {_PURPOSES[source.kind]}, trained with fairseq and lineartime, in the format of transformers.

| | |
| --- | --- |
{table}

The table says what the checkpoint says; the texts of the training, its license and its limits are for the author to
add.

## Load it

lineartime must be installed with its extra `huggingface`; fairseq need not.{_how_to_import(config)}

```python
import common.huggingface  # registers the model; or pass trust_remote_code=True below
from transformers import AutoTokenizer, {auto_class}

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = {auto_class}.from_pretrained("FOLDER")
{_USES[source.kind]}
```
"""


def _how_to_import(config: LineartimeConfig) -> str:
    """The sentence about the files of a user's own attention."""
    files = ",".join(f"FOLDER/{file}" for file in sorted({*files_of_own(config).values()}))
    return files and (
        f" The model has an attention of its author's own, whose code is in the folder. Read it, and set\n`{VARIABLE}"
        f"={files}` in the environment: nothing imports it by itself."
    )


_USES = {
    "causal": """inputs = tokenizer(["a text to continue"], return_tensors="pt", padding=True)
print(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=50)))""",
    "masked": """inputs = tokenizer(f"a text with {tokenizer.mask_token} in it", return_tensors="pt")
print(model(**inputs).logits.shape)""",
    "classifier": """inputs = tokenizer(["a text to classify"], return_tensors="pt", padding=True)
print([model.config.id2label[i] for i in model(**inputs).logits.argmax(-1).tolist()])""",
    "encoder_decoder": """target_tokenizer = AutoTokenizer.from_pretrained("FOLDER/target_tokenizer")
inputs = tokenizer(["a text to translate"], return_tensors="pt", padding=True)
print(target_tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True))""",
}


def _about(source: Source, config: LineartimeConfig, kind: str) -> dict[str, Any]:
    parameters = sum(x.numel() for x in source.model.parameters())
    about = {"architecture": f"`{source.architecture}`", "attention": _pattern(config.attention)}
    if source.kind == "encoder_decoder":
        about["attention of the encoder"] = _pattern(config.encoder_attention)
        about["attention to the source"] = _pattern(config.cross_attention)
    return {**about, "parameters": f"{parameters:,}", "vocabulary": f"{config.vocab_size:,} ({kind})"}


def _pattern(entries: list[dict[str, Any]]) -> str:
    """Kinds of attention, layer by layer: ``flow*3, softmax``."""
    return layer_pattern(entry["kind"] for entry in entries).replace(",", ", ")


def _training(source: Source) -> dict[str, Any]:
    trained = source.trained
    metric, best = trained.get("metric", "loss"), trained.get("best")
    task = getattr(source.cfg.task, "_name", None)
    rows = {
        "task of fairseq": task,
        "criterion": trained.get("criterion"),
        "updates": f"{trained['updates']:,}" if "updates" in trained else None,
        "epoch": trained.get("epoch"),
        f"best {metric} on the validation data": best,
        "loss on the validation data": trained.get("validation_loss"),
    }
    if metric == "loss" and isinstance(best, (int, float)) and trained.get("criterion") in _IN_BITS:
        rows["perplexity for the best loss"] = f"{2.0**best:.2f}"
    return {name: value for name, value in rows.items() if value is not None}
