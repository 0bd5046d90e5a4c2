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
_HOW = "allowed: a folder with qa and evidence, as triviaqa-rc.tar.gz of nlp.cs.washington.edu/triviaqa holds it"
#: A question's lists of documents -> the folders below evidence that hold them.
_PAGES = {"EntityPages": "wikipedia", "SearchResults": "web"}


class Asked(NamedTuple):
    """A question and the documents it is asked about: all of its documents (Wikipedia) or one of them (web)."""

    name: str  # the key of its answer in the official evaluation
    question: str
    answers: list[str]  # gold answers, officially normalised
    documents: list[str]  # paths below evidence


def find(folder: Path, name: str) -> Path:
    """The path of ``qa/DOMAIN-SPLIT.json`` or of a document ``evidence/NAME``, which must be below that folder."""
    path, root = folder / name, folder / name.partition("/")[0]
    if not path.resolve().is_relative_to(root.resolve()):
        raise SystemExit(f"a question names the document {name}; allowed: files below {root}")
    if not path.is_file():
        raise SystemExit(f"--file is {folder}, which has no {name}; {_HOW}")
    return path


def read_questions(path: Path) -> list[Asked]:
    """Read the questions of a file, named as in the official evaluation: ``ID`` (Wikipedia) or ``ID--FILE`` (web).

    From a file of the verified part only verified questions and documents are read, as the official evaluation does.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    try:
        wikipedia, verified = content["Domain"] == "Wikipedia", bool(content.get("VerifiedEval"))
        entries = [x for x in content["Data"] if not verified or x["QuestionPartOfVerifiedEval"]]
        questions = {asked.name: asked for entry in entries for asked in _read_entry(entry, wikipedia, verified)}
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
    if wikipedia:
        return [Asked(name, question, gold, list(files.values()))] if files else []
    return [Asked(f"{name}--{file}", question, gold, [path]) for file, path in files.items()]
