"""The models that documents train with fairseq, in small: the same options, but few and narrow layers."""

from pathlib import Path
from typing import NamedTuple

from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.options import get_training_parser, parse_args_and_arch

from fairseq_plugin.models._configuration import read_stored
from recipes.demo import text as demo
from recipes.models import model_options
from tests.trainings import Training, trainings

from .episodes import write_episodes
from .pixels import SHAPE, write_pixels
from .series import write_waves
from .text import dictionary

#: Widths are divided by this, so that equal ones stay equal, and others are still projected.
_NARROWER = 8
_WIDTHS = ("embed_dim", "input_dim", "output_dim", "ffn_embed_dim")
_LENGTHS = ("tokens_per_sample", "max_positions", "max_source_positions", "max_target_positions")
_LONGEST = 96
#: Options of files that would be read.
_FILES = ("--user-dir", "--finetune-from-model", "--teacher")


class Shown(NamedTuple):
    """A model of the plugin that documents train."""

    arch: str
    task: str
    arguments: tuple[str, ...]  # of fairseq-train, in small, without the data
    places: list[str]  # that show it


def shown_models() -> list[Shown]:
    """Each model once, without fairseq's own."""
    found: dict[str, Shown] = {}
    data = ("data", "--task", "language_modeling")
    demos = [
        Training("recipes/demo", "fairseq", (*data, *map(str, demo.model_arguments(arch, 64))))
        for arch in demo.ARCHITECTURES
    ]
    for place, host, words in [*trainings(), *demos]:
        arguments = [word for word in words[1:] if word != "..."]
        arch, task = _value(arguments, "--arch"), _value(arguments, "--task", "translation")
        model = ARCH_MODEL_REGISTRY.get(arch)  # None for the example of CONTRIBUTING.md
        if host == "fairseq" and model is not None and model.__module__.startswith("fairseq_plugin."):
            shown = Shown(arch, task, _small(arguments), [])
            options = read_stored(arch, vars(model_options(["data", *shown.arguments])))
            found.setdefault(f"{arch} {task} {sorted(options.items())}", shown).places.append(place)
    return list(found.values())


def _value(arguments: list[str], option: str, default: str = "") -> str:
    return arguments[arguments.index(option) + 1] if option in arguments else default


def _small(arguments: list[str]) -> tuple[str, ...]:
    """``arguments`` with smaller sizes, and without files to read."""
    for option in _FILES:
        if option in arguments:
            place = arguments.index(option)
            arguments = arguments[:place] + arguments[place + 2 :]
    options = {name: x for name, x in vars(model_options(["data", *arguments])).items() if isinstance(x, int)}
    longest = SHAPE.length if "pixel_modeling" in arguments else _LONGEST
    sizes = {name: longest for name in _LENGTHS if options.get(name)}
    for side in ("encoder", "decoder"):
        widths = {f"{side}_{name}": options.get(f"{side}_{name}") for name in _WIDTHS}
        sizes |= {name: width // _NARROWER for name, width in widths.items() if width}
        layers, heads = (options.get(f"{side}_{name}") for name in ("layers", "attention_heads"))
        if layers:
            sizes[f"{side}_layers"] = min(layers, 4 if "--lineartime-layers" in arguments else 2)
        if heads:
            sizes[f"{side}_attention_heads"] = min(heads, sizes[f"{side}_embed_dim"])
    words = [word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    _, unknown = parse_args_and_arch(get_training_parser(), ["data", *arguments, *words], parse_known=True)
    flags = [flag for flag in words[::2] if flag not in unknown]
    return (*arguments, *(word for flag in flags for word in (flag, words[words.index(flag) + 1])))


def write_data(shown: Shown, folder: Path) -> Path:
    """A new ``folder`` with what the task of ``shown`` reads before it builds a model."""
    folder.mkdir()
    if shown.task in _WRITERS:
        _WRITERS[shown.task](folder)
        return folder
    languages = [_value(list(shown.arguments), f"--{side}-lang") for side in ("source", "target")]
    if "" in languages:  # fairseq infers them from the names of files
        languages = ["de", "en"]
        (folder / "train.de-en.de.idx").touch()
    labels = Dictionary()
    for label in range(10):
        labels.add_symbol(str(label))
    sides = ("dict.txt", "input0/dict.txt", "input1/dict.txt", *(f"dict.{language}.txt" for language in languages))
    for name, symbols in {**dict.fromkeys(sides, dictionary()), "label/dict.txt": labels}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        symbols.save(str(folder / name))
    return folder


_WRITERS = {
    "offline_rl": write_episodes,
    "pixel_modeling": write_pixels,
    "time_series_classification": write_waves,
}
