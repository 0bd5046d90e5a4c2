"""``python -m common.mechanisms``: write the lists and tables of mechanisms in Markdown files again.

They show the declarations of the classes in ``common/attention``. A table stands between
``<!-- mechanisms: TABLE -->`` and ``<!-- end of mechanisms -->``, and a list of names in a sentence between
``<!-- mechanisms: names FACTS -->`` and the same end.
"""

import functools
import inspect
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from .attention import ATTENTIONS, InnerAttention, build_attention
from .command_parser import CommandParser

ROOT = Path(__file__).parents[1]
_FOLDERS = ("common", "fairseq_plugin", "timm_plugin")
_PART = re.compile(r"(<!-- mechanisms: (.+?) -->).*?(<!-- end of mechanisms -->)", re.DOTALL)
#: Channels of a head, and the number of tokens, for the sizes of states in a table.
_CHANNELS, _TOKENS = 64, 4096


def readmes() -> list[Path]:
    """The Markdown files that have such lists or tables."""
    paths = (path for folder in _FOLDERS for path in sorted((ROOT / folder).glob("*.md")))
    return [path for path in paths if _PART.search(path.read_text(encoding="utf-8"))]


def rewritten_readme(path: Path) -> str:
    """The text of a Markdown file with its lists and tables of mechanisms made again.

    Raises:
        ValueError: a marker names a table or a fact that does not exist.
    """
    make = functools.partial(_part, path.parent)
    return _PART.sub(lambda part: part[1] + make(*part[2].split()) + part[3], path.read_text(encoding="utf-8"))


def _part(folder: Path, what: str, *facts: str) -> str:
    """A list or a table for a file in ``folder``."""
    if what == "names":
        names = [name for name in ATTENTIONS if all(_has(name, fact) for fact in facts)]
        if not names:
            raise ValueError(f"a marker names {' '.join(facts)}; allowed: facts that some mechanism has")
        return _names(names)
    if what not in _TABLES:
        raise ValueError(f"a marker names {what}; allowed: names FACTS, {', '.join(_TABLES)}")
    return f"\n\n{_TABLES[what](folder)}\n\n"


def _has(name: str, fact: str) -> bool:
    """Whether a mechanism declares a fact: in supports or needs, as an attribute, or by how it reads an image."""
    kind = ATTENTIONS[name]
    if fact not in ("grid", "order") or "bidirectional" not in kind.supports:
        return fact in kind.supports | kind.needs or getattr(kind, fact, False) is True
    image = build_attention(name, num_heads=1, head_dim=8, max_tokens=8, spatial_dims=2)
    if "spatial_shape" in image.needs or fact == "grid":
        return "spatial_shape" in image.needs and fact == "grid"
    return not kind.permutation_equivariant and "max_tokens" not in kind.needs


def _list(folder: Path) -> str:
    rows = []
    for name, kind in ATTENTIONS.items():
        forms = [form for form in ("causal", "bidirectional", "cross") if form in kind.supports]
        paper = f"[{kind.about.paper}]({kind.about.url})" if kind.about.url else kind.about.paper
        linear = "yes" if kind.linear_cost else "no"
        rows.append([f"`{name}`", _summary(kind), ", ".join(forms), linear, paper, _code(kind, folder)])
    return _table("name", "what it computes", "forms", "linear time", "paper", "code", rows=rows)


def _costs(folder: Path) -> str:
    rows = []
    for name, kind in ATTENTIONS.items():
        defaults = kind.Options.defaults()
        sizes = [f"{letter} `{x}` {defaults[x] or ''}".strip() for letter, x in kind.about.sizes.items()]
        causal = "causal" in kind.supports
        state = [kind.about.state, f"{_kibibytes(name, _TOKENS):,}"] if causal else ["-", "-"]
        rows.append([f"`{name}`", kind.about.cost, ", ".join(sizes) or "-", *state])
    return _table("name", "cost", "sizes", "state", "KiB", rows=rows)


def _maps(folder: Path) -> str:
    names: dict[str, list[str]] = {}
    for name, kind in ATTENTIONS.items():
        names.setdefault(kind.about.map or "the weights", []).append(name)
    return _table("mechanism", "its map", rows=[[_names(mechanisms), text] for text, mechanisms in names.items()])


_TABLES = {"list": _list, "costs": _costs, "maps": _maps}


def _table(*header: str, rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def _names(names: Iterable[str]) -> str:
    *others, last = [f"`{name}`" for name in names]
    return f"{', '.join(others)} and {last}" if others else last


def _code(kind: type[InnerAttention], folder: Path) -> str:
    """The function with a link to its folder, and one to the derivation if there is one."""
    operation = ROOT.joinpath(*kind.op.__module__.split(".")[:-1])
    place = os.path.relpath(operation, folder)
    derivation = f", [derivation]({place}/README.md)" if (operation / "README.md").exists() else ""
    return f"[`{kind.op.__name__}`]({place}/){derivation}"


def _summary(kind: type[InnerAttention]) -> str:
    """The first line of the docstring."""
    return inspect.getdoc(kind).splitlines()[0].removesuffix(".").replace("``", "`")


@torch.no_grad()
def _kibibytes(name: str, n: int) -> int:
    """KiB of the float32 state of one head after n tokens, rounded up."""
    attention = build_attention(name, True, num_heads=1, head_dim=_CHANNELS, max_tokens=n).eval()
    widths = attention.projections(_CHANNELS)
    projected = {x: torch.ones(1, 1, n, widths[x]) if x in widths else None for x in ("q", "k", "v")}
    _, state = attention.extend(**projected, **attention.inputs(x=torch.ones(1, n, _CHANNELS)))
    return math.ceil(sum(x.nbytes for x in state.values()) / 1024)


def main(arguments: Iterable[str] | None = None) -> None:
    """Write the files, and print those that changed."""
    CommandParser(prog="python -m common.mechanisms", description=__doc__.split("\n")[0]).parse_args(arguments)
    for path in readmes():
        text = rewritten_readme(path)
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
