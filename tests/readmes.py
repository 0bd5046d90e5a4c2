"""The READMEs as data: their code blocks, links and headings; and processes that run the blocks like a reader.

A block marked ``shell`` or ``python`` runs, unless a line like this is above it, with or without a blank line between::

    <!-- not run in tests: needs ImageNet -->
"""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

RUN = ("shell", "python")
SHOWN = ("text", "mermaid", "yaml", "toml", "bibtex")

_MARKER = re.compile(r"^ *<!-- not run in tests: (?P<reason>.+) -->$")
_FENCE = re.compile(r"^ *```(?P<language>\w*)$")

#: Prepended to every shell block: replaces commands that take too long or reach beyond the folder. In place of timm's
#: train.py, which would be downloaded, a loop runs that has options of the same names and meanings.
PRELUDE = """
set -euo pipefail
if [ -f .exported ]; then . ./.exported; fi  # by earlier blocks, as in a reader's shell
run_fairseq() { ${BEFORE_FAIRSEQ:-command} "$@"; }
fairseq-preprocess() { run_fairseq fairseq-preprocess "$@"; }
fairseq-train() {
  local layers=--decoder-layers
  case "$*" in *_mlm*|*_classifier*|*_time_series*) layers=--encoder-layers;; esac
  ${BEFORE_TRAIN:-command} fairseq-train "$@" --max-update 2 --max-tokens 1024 --max-valid-steps 1 $layers 1 \
    --no-epoch-checkpoints --data-buffer-size 0
}
fairseq-eval-lm() { run_fairseq fairseq-eval-lm "$@"; }
fairseq-generate() { run_fairseq fairseq-generate "$@" --max-len-b 4; }
fairseq-interactive() { run_fairseq fairseq-interactive "$@" --max-len-b 20; }  # "ROMEO:" in characters fits
python() {
  case "$*" in
    "-m timm_plugin work/timm-scripts/train.py "*)
      set -- -m recipes.demo.train_digits "${@:4}" --device-modules timm_plugin --epochs 1 --warmup-epochs 0
      run_fairseq python "$@";;
    "-m fairseq_plugin") run_fairseq python "$@" < /dev/null;;  # in $(...) of a command that reads a pipe
    "-m recipes.compare_text "*) run_fairseq python "$@" --quick;;
    "-m "*) run_fairseq python "$@";;
    *) command python "$@";;
  esac
}
sh() { case "$*" in "recipes/imagenet/scripts.sh") ;; *) command sh "$@";; esac; }
make() { command make --dry-run --directory "$CHECKOUT" "$@"; }
"""
#: Appended to every shell block: keeps what it exports about own mechanisms.
AFTERWARDS = "export -p | grep LINEARTIME_MECHANISMS > .exported || true\n"


@dataclass(frozen=True)
class Block:
    """One fenced code block; ``reason`` says why it is not run, and is None if it is run."""

    readme: str
    line: int
    language: str
    code: str
    reason: str | None

    @property
    def place(self) -> str:
        return f"{self.readme}:{self.line}"


def readmes() -> list[Path]:
    """Every Markdown file of the checkout."""
    top = list(ROOT.glob("*.md"))
    folders = ("common", "fairseq_plugin", "timm_plugin", "recipes", "tests")
    return sorted(top + [path for folder in folders for path in (ROOT / folder).rglob("*.md")])


def blocks(path: Path) -> list[Block]:
    """The code blocks of a Markdown file, in order. Raises ValueError if a marker is not followed by a block."""
    name, blocks_found, reason, opened, inside = str(path.relative_to(ROOT)), [], None, None, []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fence, marker = _FENCE.match(line), _MARKER.match(line)
        if opened is not None and fence:
            blocks_found.append(Block(name, opened[0], opened[1], "\n".join(inside) + "\n", reason))
            opened, reason, inside = None, None, []
        elif opened is not None:
            inside.append(line)
        elif fence:
            opened = number, fence["language"]
        elif marker:
            reason = marker["reason"]
        elif line.strip() and reason is not None:
            raise ValueError(f"{name}:{number}: the marker above stands above no block of code")
    if opened is not None or reason is not None:
        raise ValueError(f"{name}: ends inside of a block of code, or with a marker")
    return blocks_found


def commands(block: Block) -> list[list[str]]:
    """The commands of a shell block as words, with its variables filled in."""
    joined = block.code.replace("\\\n", " ").replace("$(python -m fairseq_plugin)", "fairseq_plugin")
    variables = dict(re.findall(r"^(?:for )?(\w+)(?:=| in )(\S+)", joined, flags=re.MULTILINE))
    filled = re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match[1], match[0]), joined)
    return [words for line in filled.splitlines() if (words := shlex.split(line, comments=True))]


def prose(path: Path) -> str:
    """The text of a Markdown file without its code blocks."""
    lines, inside = [], False
    for line in path.read_text().splitlines():
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            lines.append(line)
    return "\n".join(lines)


def links(path: Path) -> list[str]:
    """The targets of all links and images in a Markdown file that do not lead to another site."""
    text = re.sub(r"`[^`]*`", "", prose(path))
    targets = re.findall(r"\]\(([^)\s]+)[^)]*\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(path: Path) -> set[str]:
    """The valid ``#...`` targets in a Markdown file: its headings in lower case, words joined by hyphens."""
    headings = re.findall(r"^#+ (.+)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def run_blocks(wanted: list[Block], folder: Path, environment: dict[str, str], new: bool) -> tuple[int, str]:
    """Run blocks one after another in one process in ``folder``; returns its exit status and its output.

    Python blocks share their names. The process is a ``new`` interpreter or a fork of one that has imported fairseq.
    If ``BEFORE_FAIRSEQ`` is in the environment, its words prefix each command of fairseq and each ``python -m``;
    ``BEFORE_TRAIN`` prefixes fairseq-train.
    """
    from tests.processes import Command, Forked  # the program does not need it

    data = json.dumps([[block.place, block.language, block.code] for block in wanted])
    if not new:
        forked = Forked(Command(__file__, stdin=data), cwd=str(folder), environment=environment)
        return forked.wait(), "".join(forked.printed())
    command = [sys.executable, "-W", "ignore", __file__]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, input=data, cwd=folder, env=environment, **streams)
    return done.returncode, done.stdout


def _main() -> None:
    """Run the blocks on standard input. The first failure ends the process."""
    sys.path[0] = ""  # as in an interactive Python session in this folder
    names: dict[str, object] = {"__name__": "__main__"}
    for label, language, code in json.load(sys.stdin):
        print(f"--- {label}", flush=True)
        if language == "python":
            exec(compile(code, label, "exec"), names)
        else:
            done = subprocess.run(["bash", "-c", PRELUDE + code + AFTERWARDS], stdin=subprocess.DEVNULL)
            if done.returncode:
                sys.exit(f"{label} ended with exit status {done.returncode}")


if __name__ == "__main__":
    _main()
