"""Read TriviaQA's reading comprehension files: questions, gold answers, and the documents of each question.

Files such as ``qa/wikipedia-train.json`` name documents below ``evidence/wikipedia`` and ``evidence/web``.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_plugin.data.span_answers import normalise_answer

DOMAINS = ("wikipedia", "web")
#: fairseq's name of a split -> the data set's.
SPLITS = {"train": "train", "valid": "dev"}
SOURCE = "https://nlp.cs.washington.edu/triviaqa/data/triviaqa-rc.tar.gz"
_HOW = f"allowed: a folder with qa and evidence, as {SOURCE} holds it, 2.5 GB"
#: A question's lists of documents -> the folders below evidence that hold them.
_PAGES = {"EntityPages": "wikipedia", "SearchResults": "web"}


class Asked(NamedTuple):
    """A question and the documents it is asked about: all of its documents (Wikipedia) or one of them (web)."""

    name: str  # the key of its answer in the official evaluation
    question: str
    answers: list[str]  # gold answers, officially normalised
    documents: list[str]  # paths below evidence


def find_questions(folder: Path, domain: str, split: str) -> Path:
    """The path of a split's questions; ``split`` is fairseq's name, ``train`` or ``valid``."""
    path = folder / "qa" / f"{domain}-{SPLITS[split]}.json"
    if not path.is_file():
        raise SystemExit(f"--file is {folder}, which has no {path.relative_to(folder)}; {_HOW}")
    return path


def find_document(folder: Path, name: str) -> Path:
    """The path of a document, which must be below ``folder``/evidence."""
    root = (folder / "evidence").resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise SystemExit(f"a question names the document {name}; allowed: files below {root}")
    if not path.is_file():
        raise SystemExit(f"--file is {folder}, which has no evidence/{name}; {_HOW}")
    return path


def read_questions(path: Path) -> list[Asked]:
    """Read the questions of a file, named as in the official evaluation: ``ID`` (Wikipedia) or ``ID--FILE`` (web).

    From a file of the verified part only verified questions and documents are read, as the official evaluation does.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    questions: dict[str, Asked] = {}
    try:
        wikipedia, verified = content["Domain"] == "Wikipedia", bool(content.get("VerifiedEval"))
        for entry in content["Data"]:
            if not verified or entry["QuestionPartOfVerifiedEval"]:
                questions |= {question.name: question for question in _read_entry(entry, wikipedia, verified)}
    except (KeyError, TypeError, AttributeError) as error:
        raise SystemExit(f"{path} is no file of TriviaQA's qa: {error!r}") from error
    if not questions:
        raise SystemExit(f"{path} has no question with a document; allowed: at least one")
    return list(questions.values())


def _read_entry(entry: dict[str, Any], wikipedia: bool, verified: bool) -> list[Asked]:
    name, question, answer = entry["QuestionId"], entry["Question"], entry["Answer"]
    gold = [*answer["NormalizedAliases"], *map(normalise_answer, answer.get("HumanAnswers", []))]
    files = {
        page["Filename"]: f"{folder}/{page['Filename']}"
        for kind, folder in _PAGES.items()
        for page in entry.get(kind, [])
        if not (verified and wikipedia) or page["DocPartOfVerifiedEval"]
    }
    if not all(isinstance(text, str) and text for text in (name, question, *files)):
        raise TypeError(f"{name}: a text is none")
    if wikipedia:
        return [Asked(name, question, gold, list(files.values()))] if files else []
    return [Asked(f"{name}--{file}", question, gold, [path]) for file, path in files.items()]
