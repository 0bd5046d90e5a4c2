"""Checks that the configuration in a checkpoint is only data: no text that fairseq would run, resolve or open.

fairseq stores the options of a training in its checkpoints, and reads them to build task and model. It evaluates some
texts as Python, resolves interpolations, even of environment variables, and opens files and addresses. The check does
not depend on which options it evaluates: no text may be code, whatever the name of its option.
"""

import ast
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from fairseq.dataclass.configs import FairseqConfig
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer.transformer_config import DecoderConfig, EncDecBaseConfig
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY
from fairseq.utils import safe_getattr

from common.ops.shared.checks import shortened

from .known_options import model_options
from .stored_values import stored_options

#: Words, numbers, paths and symbols such as </s>. Such an expression calls nothing, since it has no brackets and no
#: quotes, for which Python allows no other characters of Unicode. Products, powers and shifts are excluded, since they
#: could use up all memory.
_WORDS = re.compile(r"(?!.*(?:<<|>>))[\w ?.,:;/@+=~|%#!&^<>$`\\\x80-\U0010ffff-]*")
#: Options of pretrained embeddings, which are not needed if weights are loaded.
EMBEDDING_FILES = ("encoder_embed_path", "decoder_embed_path")
#: Options of tasks and of generation that name a file even if their value has no separator, and options of
#: fairseq's tokenizers that do not name a file.
_FILES = {"fixed_dictionary", "load_state", "replace_unk", "save_state", "source_dict", "target_dict"}
_NO_FILES = {"bpe_separator", "source_lang", "target_lang", "_name"}
#: Options that may be any text, since none is evaluated: paths, the separator of subwords, and a pattern that this
#: plugin parses.
FREE_TEXTS = frozenset(
    """
    aim_repo bpe_codes bpe_merges bpe_separator bpe_vocab bpe_vocab_file checkpoint_suffix data distributed_init_method
    ema_seed_model eos_token finetune_from_model gpt2_encoder_json gpt2_vocab_bpe input lineartime_layers lm_path
    log_file path plasma_path quantization_config_path restore_file results_path save_dir sentencepiece_model
    sentencepiece_model_path teacher tensorboard_logdir user_dir wandb_project
    """.split()
).union(EMBEDDING_FILES, _FILES)
#: Options whose text is evaluated and may be a sum of lists, as in [(512, 10, 5)] + [(512, 3, 2)] * 4.
_CONVOLUTIONS = {"conv_feature_layers"}
#: The most convolutions of such a text; those of wav2vec 2.0 are 7.
_MOST_CONVOLUTIONS = 100
#: The largest number of channels, width or stride of a convolution.
_LARGEST_SIZE = 65_536
#: Files in the folder of a checkpoint with which fairseq's hub replaces an option.
_HUB_FILES = {
    "code": "bpe_codes",
    "bpecodes": "bpe_codes",
    "sentencepiece.bpe.model": "sentencepiece_model",
    "merges.txt": "bpe_merges",
    "vocab.json": "bpe_vocab",
}
#: Groups of options that are not read when a model is loaded.
_NOT_READ = ("criterion", "optimizer", "lr_scheduler", "scoring", "simul_type", "job_logging_cfg")
#: The most characters of a text that fairseq could evaluate. Python needs about a kilobyte per character to parse some.
_MOST_CHARACTERS = 1_000_000
#: A number of layers that is allowed whatever the weights, which may be those of a few layers that were kept.
_MOST_LAYERS = 1_000


def check_configuration(state: Mapping[str, Any], path: str) -> None:
    """Refuse what the configuration of the checkpoint ``state`` would make fairseq run, resolve, or build without end.

    O(number of options). ``path`` is for messages.

    Raises:
        ValueError: a text is neither words nor a literal, and its option is not in ``FREE_TEXTS``; an interpolation
            refers to anything but another option; the name of a tokenizer or of another part is a path; there are far
            more layers than the weights are for; or the configuration is malformed. The message names the file, the
            option and its value.
    """
    weights = state.get("model")
    most_layers = max(_MOST_LAYERS, len(weights) if isinstance(weights, Mapping) else 0)
    for name, value in stored_options(state, path, leave_out=("job_logging_cfg",)):
        if name in FREE_TEXTS:
            continue
        if not _is_allowed(name, value):
            raise ValueError(f"the checkpoint {path!r} has {_no_data(name, value)}")
        if name in REGISTRIES and isinstance(value, str) and os.sep in value:  # hydra would read a file of that name
            raise ValueError(f"the checkpoint {path!r} has {name} = {value!r}; allowed: a name, no path")
        if _layers(name, value) > most_layers:
            raise ValueError(
                f"the checkpoint {path!r} has {name} = {shortened(value)}; allowed: at most {most_layers:,}"
            )


def check_files(state: Mapping[str, Any], path: str, options: Mapping[str, Any]) -> None:
    """Refuse files and addresses in the configuration of ``state`` that loading would open, and unknown tasks.

    The user's ``options``, and files of fairseq's hub in the folder of ``path``, replace stored values.

    Raises:
        ValueError: there is one; the message names the file, the option and its value.
    """
    folder = os.path.dirname(path)
    replaced = {"data", *EMBEDDING_FILES, *options}
    replaced |= {option for file, option in _HUB_FILES.items() if os.path.exists(os.path.join(folder, file))}
    not_followed = replaced | _not_followed()
    tokenizer_options = list(_tokenizer_options())
    defaults = {field.default for field in tokenizer_options if isinstance(field.default, str)}
    files = _FILES.union(field.name for field in tokenizer_options) - _NO_FILES
    for name, value in stored_options(state, path, leave_out=_NOT_READ):
        if name in not_followed or not isinstance(value, str) or value in defaults:
            continue
        if os.sep in value or (value and name in files):
            raise ValueError(
                f"the checkpoint {path!r} has {name} = {value!r}; allowed: no path and no address, but yours: "
                f"from_pretrained(..., {name}=...)"
            )
    _check_task(state, path)


def check_texts(model: type, args: Any) -> None:
    """Refuse texts in the options ``args`` of a fairseq ``model`` that fairseq could run.

    So a checkpoint cannot run code when fairseq's own commands build one of our models from it, either.

    Raises:
        ValueError: there is one; the message names the option and its value.
    """
    sides = (("encoder", EncDecBaseConfig), ("decoder", DecoderConfig))
    names = {f"{side}_{name}" for side, config in sides for name in config.__dataclass_fields__}
    names |= {*TransformerConfig.__dataclass_fields__, *model_options(model)}
    for name in sorted(names - FREE_TEXTS):
        value = safe_getattr(args, name)
        if not _is_allowed(name, value):
            raise ValueError(_no_data(name, value))


def _is_data(value: Any) -> bool:
    """Whether evaluating ``value`` calls nothing: it is no text, or short words, or a short literal."""
    if not isinstance(value, (str, bytes, bytearray)):
        return True
    if len(value) > _MOST_CHARACTERS:
        return False
    if isinstance(value, str) and _WORDS.fullmatch(value):
        return True
    for parse in (ast.literal_eval, json.loads):
        try:
            content = parse(value)
            return not isinstance(content, (str, bytes)) or _is_data(content)  # fairseq may parse, then evaluate
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return False


def _is_allowed(name: str, value: Any) -> bool:
    """Whether evaluating the ``value`` of the option ``name`` calls nothing and needs little memory."""
    if name not in _CONVOLUTIONS or not isinstance(value, str) or len(value) > _MOST_CHARACTERS:
        return _is_data(value)
    try:
        _count_convolutions(ast.parse(value.strip(), mode="eval").body)
        return True
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False


def _count_convolutions(node: ast.expr) -> int:
    """The length of a sum of lists of tuples of integers, each perhaps times an integer.

    Raises:
        ValueError: it is anything else, or evaluating any part of it gives more than ``_MOST_CONVOLUTIONS``.
    """
    if isinstance(node, ast.List):
        if not all(isinstance(item, ast.Tuple) and all(map(_is_size, item.elts)) for item in node.elts):
            raise ValueError("an item is no tuple of integers")
        count = len(node.elts)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        count = _count_convolutions(node.left) + _count_convolutions(node.right)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and _is_size(node.right):
        count = _count_convolutions(node.left) * node.right.value
    else:
        raise ValueError("neither a list, nor a sum or a multiple of lists")
    if not 1 <= count <= _MOST_CONVOLUTIONS:
        raise ValueError(f"there are {count} convolutions")
    return count


def _is_size(node: ast.expr) -> bool:
    """Whether ``node`` is a number of channels, of samples or of repetitions."""
    return isinstance(node, ast.Constant) and type(node.value) is int and 1 <= node.value <= _LARGEST_SIZE


def _no_data(name: str, value: Any) -> str:
    if len(value) > _MOST_CHARACTERS:
        return f"{name} of {len(value):,} characters; allowed: at most {_MOST_CHARACTERS:,}"
    allowed = "numbers, words, and lists and dictionaries as Python writes them, no code"
    return f"{name} = {shortened(value)}; allowed: {allowed}"


def _layers(name: str, value: Any) -> float:
    """How many layers the option ``name`` asks for; 0 if it is no number of layers, and no list of layers to keep."""
    if name.endswith("layers_to_keep"):
        return value.count(",") + 1 if isinstance(value, str) else 0
    return _as_number(value) if name == "layers" or name.endswith("_layers") else 0


def _as_number(value: Any) -> float:
    """The number that fairseq may convert ``value`` to, which may be a text of it; 0 if it is none."""
    for parse in (float, ast.literal_eval):  # texts of numbers, and literals such as 0x10 or a quoted number
        try:
            number = parse(value)
            return number if isinstance(number, float) else _as_number(number)
        except OverflowError:
            return math.inf
        except (TypeError, ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return 0


def _not_followed() -> set[str]:
    """Names of options of commands, optimizers and criteria, which are not read when a model is loaded."""
    groups = [group for name, group in vars(FairseqConfig()).items() if is_dataclass(group) and name != "generation"]
    groups += [x for name in _NOT_READ if name in REGISTRIES for x in REGISTRIES[name]["dataclass_registry"].values()]
    return {name for group in groups for name in group.__dataclass_fields__} - {"_name"}


def _tokenizer_options() -> Iterator[Any]:
    """The option fields of fairseq's tokenizers, which name files and have addresses as defaults."""
    for name in ("bpe", "tokenizer"):
        for options in filter(is_dataclass, REGISTRIES[name]["dataclass_registry"].values()):
            yield from fields(options)


def _check_task(state: Mapping[str, Any], path: str) -> None:
    """ValueError for a task that is not registered."""
    if state.get("args") is not None:
        name = safe_getattr(state["args"], "task", "translation")  # fairseq's default for its oldest checkpoints
    else:
        task = state["cfg"].get("task")
        name = (task.get("_name") or task.get("task")) if hasattr(task, "get") else safe_getattr(task, "_name")
        name = name or safe_getattr(task, "task")
    if not isinstance(name, str) or name not in TASK_REGISTRY:
        raise ValueError(
            f"the checkpoint {path!r} is of the task {name!r}, which is not registered; allowed: "
            f"{', '.join(TASK_REGISTRY)}"
        )
