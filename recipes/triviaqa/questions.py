"""The files of TriviaQA's reading comprehension: questions, gold answers, and which documents belong to them.

``qa/wikipedia-train.json`` and its like name files below ``evidence/wikipedia`` and ``evidence/web``.
"""

from pathlib import Path
from typing import Any, NamedTuple

from common.json_files import read
from fairseq_plugin.data.span_answers import normalise_answer

DOMAINS = ("wikipedia", "web")
#: fairseq's names of the splits, and the data set's.
SPLITS = {"train": "train", "valid": "dev"}
SOURCE = "https://nlp.cs.washington.edu/triviaqa/data/triviaqa-rc.tar.gz"
_HOW = f"allowed: a folder with qa and evidence, as {SOURCE} holds it, 2.5 GB"
#: Lists of documents of a question, and the folders they are in.
_PAGES = {"EntityPages": "wikipedia", "SearchResults": "web"}


class Asked(NamedTuple):
    """A question as it is asked: of all of its documents (Wikipedia), or of one of them (web)."""

    name: str  # under which the official evaluation looks for its answer
    question: str
    answers: list[str]  # gold, in the official normalisation
    documents: list[str]  # files below evidence


def find_questions(folder: Path, domain: str, split: str) -> Path:
    """The file of questions of a split, fairseq's ``train`` or ``valid``.

    Raises:
        ValueError: it is not there; the message says where to get it.
    """
    path = folder / "qa" / f"{domain}-{SPLITS[split]}.json"
    if not path.is_file():
        raise ValueError(f"--file is {folder}, which has no {path.relative_to(folder)}; {_HOW}")
    return path


def find_document(folder: Path, name: str) -> Path:
    """The file of a document.

    Raises:
        ValueError: it is not there, or not below ``folder``/evidence.
    """
    root = (folder / "evidence").resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise ValueError(f"a question names the document {name}; allowed: files below {root}")
    if not path.is_file():
        raise ValueError(f"--file is {folder}, which has no evidence/{name}; {_HOW}")
    return path


def read_questions(path: Path) -> list[Asked]:
    """The questions of a file, each under the name of the official evaluation, which is ``ID`` or ``ID--FILE``.

    Of a file of the verified part, only what is verified, as there.

    Raises:
        ValueError: it is no such file; the message names the entry.
    """
    found = _read(path)
    wikipedia, verified = found.get("Domain") == "Wikipedia", bool(found.get("VerifiedEval"))
    asked: dict[str, Asked] = {}
    for number, entry in enumerate(found["Data"]):
        try:
            if verified and not entry["QuestionPartOfVerifiedEval"]:
                continue
            for one in _read_entry(entry, wikipedia, verified):
                asked[one.name] = one
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} has no TriviaQA question as entry {number} of Data: {error!r}; allowed: a file of TriviaQA's "
                "qa, with Question, QuestionId, Answer and files in EntityPages or SearchResults"
            ) from error
    if not asked:
        raise ValueError(f"{path} has no question with a document; allowed: at least one")
    return list(asked.values())


def _read(path: Path) -> dict[str, Any]:
    found = read(path, "a JSON file of TriviaQA's qa")
    if not isinstance(found, dict) or not isinstance(found.get("Data"), list):
        raise ValueError(f"{path} has no list Data; allowed: a JSON file of TriviaQA's qa")
    return found


def _read_entry(entry: dict[str, Any], wikipedia: bool, verified: bool) -> list[Asked]:
    name, question, answer = entry["QuestionId"], entry["Question"], entry["Answer"]
    gold = [*answer["NormalizedAliases"], *map(normalise_answer, answer.get("HumanAnswers", []))]
    files = {
        page["Filename"]: f"{folder}/{page['Filename']}"
        for kind, folder in _PAGES.items()
        for page in entry.get(kind, [])
        if not (verified and wikipedia) or page["DocPartOfVerifiedEval"]
    }
    if not all(isinstance(text, str) for text in (name, question, *gold, *files)):
        raise TypeError("a text is none")
    if wikipedia:
        return [Asked(name, question, gold, list(files.values()))] if files else []
    return [Asked(f"{name}--{file}", question, gold, [path]) for file, path in files.items()]
