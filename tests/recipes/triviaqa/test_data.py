"""From TriviaQA's files to the task's folder: names, gold spans in any script, and missing files."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from fairseq_plugin.data.span_answers import normalise_answer, spell
from fairseq_plugin.data.span_folder import read_span_split
from recipes.texts import paragraphs, train_sentencepiece, write_dictionary
from recipes.triviaqa import data, evaluate, generated
from recipes.triviaqa.questions import read_questions


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder laid out as triviaqa-rc."""
    folder = tmp_path_factory.mktemp("trivia") / "generated"
    generated.main(["--out", str(folder), "--train", "60", "--valid", "12", "--people", "4"])
    return folder


@pytest.fixture(scope="module")
def subwords(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the subwords as recipes.prepare_text writes them."""
    folder = tmp_path_factory.mktemp("subwords")
    with open(questions / "pages.txt", encoding="utf-8") as lines:
        model = train_sentencepiece(lines, folder / "sentencepiece.model", 380)
    write_dictionary(model, folder / "dict.txt")
    return folder


def run(questions: Path, subwords: Path, out: Path, *arguments: str, domain: str = "wikipedia") -> None:
    folders = ["--file", str(questions), "--subwords", str(subwords), "--out", str(out), "--workers", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["data", domain, *folders, *arguments])
        data.main()


def page(file: str, **more) -> dict:
    return {"Filename": file, "Title": "a page", **more}


def entry(number: int, aliases: list[str], entities: list[dict], results: list[dict] = (), **more) -> dict:
    answer = {"Aliases": aliases, "NormalizedAliases": [normalise_answer(x) for x in aliases], "Value": aliases[0]}
    named = {"QuestionId": f"q_{number}", "Question": f"Who is number {number}?", "Answer": answer}
    return {**named, "EntityPages": list(entities), "SearchResults": list(results), **more}


def write_data(folder: Path, entries: list[dict], texts: dict[str, str], domain: str = "Wikipedia", **more) -> Path:
    """Write the same entries as train and dev."""
    (folder / "qa").mkdir(parents=True)
    for split in ("train", "dev"):
        content = {"Data": entries, "Domain": domain, "VerifiedEval": False, "Version": 1.0, **more}
        (folder / "qa" / f"{domain.lower()}-{split}.json").write_text(json.dumps(content))
    for name, text in texts.items():
        (folder / "evidence" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "evidence" / name).write_text(text, encoding="utf-8")
    return folder


def spelled(data_bin: Path, split: str) -> list[tuple[str, str, list[str]]]:
    """Name, document and gold texts of each pair of a split."""
    words = ["<s>", "<pad>", "</s>", "<unk>"]
    words += [line.rpartition(" ")[0] for line in (data_bin / "dict.txt").read_text(encoding="utf-8").splitlines()]
    split_data = read_span_split(data_bin, split)
    pairs = []
    for pair, (question, document) in enumerate(split_data.pairs):
        pieces = [words[token] for token in split_data.document_tokens[int(document)].tolist()]
        spans = split_data.spans[split_data.ends[pair] : split_data.ends[pair + 1]]
        texts = ["".join(spell(pieces[first : last + 1])).strip() for first, last in spans]
        pairs.append((split_data.questions[question].name, "".join(spell(pieces)).strip(), texts))
    return pairs


def test_generated_questions(questions, subwords, tmp_path, capsys):
    """Each page has the name once; documents equal the pages, and questions are kept."""
    run(questions, subwords, tmp_path / "out")
    assert "60 questions" in capsys.readouterr().out
    data_bin = tmp_path / "out" / "data-bin"
    for split, name, count in (("train", "train", 60), ("valid", "dev", 12)):
        generated = read_questions(questions / "qa" / f"wikipedia-{name}.json")
        pairs = spelled(data_bin, split)
        assert len(pairs) == len(generated) == count
        for question, (key, document, gold) in zip(generated, pairs):
            assert key == question.name and question.answers[0].split()[-1] == question.answers[1]
            assert [normalise_answer(text) for text in gold] == [question.answers[0]]
            assert document == " ".join(paragraphs((questions / "evidence" / question.documents[0]).read_text()))
    run(questions, subwords, tmp_path / "less", "--limit", "5")
    assert len(read_span_split(tmp_path / "less" / "data-bin", "train").questions) == 5


def test_documents_of_several_questions_and_of_the_web(subwords, tmp_path):
    """Documents are stored once; names are official; training drops questions without answers."""
    texts = {"wikipedia/A.txt": "Ada Cole met Otto Hale.", "web/1/B.txt": "Only Otto Hale was there."}
    entries = [
        entry(0, ["Ada Cole"], [page("A.txt")], [page("1/B.txt", Rank=0)]),
        entry(1, ["Otto Hale", "Hale"], [page("A.txt")], [page("1/B.txt", Rank=0)]),
    ]
    for domain, names in (
        ("wikipedia", ["q_0", "q_1"]),
        ("web", ["q_0--A.txt", "q_0--1/B.txt", "q_1--A.txt", "q_1--1/B.txt"]),
    ):
        folder = write_data(tmp_path / domain, entries, texts, domain.capitalize())
        run(folder, subwords, tmp_path / f"{domain} out", domain=domain)
        for split, pairs in (("train", 3), ("valid", 4)):
            split_data = read_span_split(tmp_path / f"{domain} out" / "data-bin", split)
            assert [question.name for question in split_data.questions] == names
            assert len(split_data.pairs) == pairs and len(split_data.document_tokens) == 2
        gold = [texts for _, _, texts in spelled(tmp_path / f"{domain} out" / "data-bin", "train")]
        assert sorted(map(tuple, gold)) == [("Ada Cole",), ("Otto Hale",), ("Otto Hale",)]


def test_gold_spans_in_text_of_any_script(subwords, tmp_path):
    """Characters that are bytes of several subwords, and what sentencepiece's normalisation changes."""
    text = "€ 5 paid Zoë Ævarsdóttir 東京 in ①②.\nThe ＡＤＡ, “Zoë  Ævarsdóttir”; 東京タワー and Zoë\tÆvarsdóttir"
    entries = [entry(0, ["Zoë Ævarsdóttir"], [page("A.txt")]), entry(1, ["東京", "Ada"], [page("A.txt")])]
    folder = write_data(tmp_path / "data", entries, {"wikipedia/A.txt": text})
    run(folder, subwords, tmp_path / "out")
    (_, document, first), (_, _, second) = spelled(tmp_path / "out" / "data-bin", "train")
    assert "12" in document and "ADA" in document  # in NFKC
    assert [normalise_answer(text).strip("“”") for text in first] == ["zoë ævarsdóttir"] * 3
    assert [normalise_answer(text) for text in second] == ["東京", "ada"]  # not in 東京タワー, a longer word


@pytest.mark.parametrize(
    "answers, text, found",
    [
        (
            ["lord of rings"],
            "The Lord of the Rings; lord-of-a RINGS, overlord of rings",
            ["Lord of the Rings", "lord-of-a RINGS"],
        ),
        (["o neill"], "O'Neill, O’Neill and ONeill", ["O'Neill", "O’Neill"]),
        (["sunset", "sunset boulevard"], "Sunset Boulevard, Sunset.", ["Sunset Boulevard", "Sunset"]),
        (["c++ (x)"], "C++ X", ["C++ X"]),
        (["5"], "$5, 50, 5th and 5", ["5", "5"]),
        (["the", "", "ada"], "the a an Ada", ["Ada"]),
    ],
)
def test_answers_are_found_as_the_official_normalisation_compares_them(answers, text, found, subwords, tmp_path):
    """A subword may have what stands around an answer, too."""
    folder = write_data(tmp_path / "data", [entry(0, answers, [page("A.txt")])], {"wikipedia/A.txt": text})
    run(folder, subwords, tmp_path / "out")
    ((_, _, gold),) = spelled(tmp_path / "out" / "data-bin", "train")
    assert len(gold) == len(found) and all(right in span for right, span in zip(found, gold)), gold


def test_the_verified_part(tmp_path):
    """Questions that the official evaluation drops are dropped."""
    verified = {"QuestionPartOfVerifiedEval": True}
    pages = [page("A.txt", DocPartOfVerifiedEval=True), page("B.txt", DocPartOfVerifiedEval=False)]
    entries = [
        entry(0, ["Ada"], pages, **verified),
        entry(1, ["Ada"], pages, QuestionPartOfVerifiedEval=False),
    ]
    folder = write_data(tmp_path, entries, {}, VerifiedEval=True)
    (question,) = read_questions(folder / "qa" / "wikipedia-dev.json")
    assert question.name == "q_0" and question.documents == ["wikipedia/A.txt"]


def test_human_answers_are_gold(tmp_path):
    annotated = entry(0, ["Ada"], [page("A.txt")])
    annotated["Answer"]["HumanAnswers"] = ["The Ada!"]
    folder = write_data(tmp_path, [annotated], {})
    assert read_questions(folder / "qa" / "wikipedia-dev.json")[0].answers == ["ada", "ada"]


def refused(capsys, *arguments, **more) -> str:
    with pytest.raises(SystemExit) as ended:
        run(*arguments, **more)
    return f"{ended.value} {capsys.readouterr().err}"


def test_missing_files_say_how_to_get_them(questions, subwords, tmp_path, capsys):
    """And nothing is written."""
    out = tmp_path / "out"
    assert "triviaqa-rc.tar.gz" in refused(capsys, tmp_path, subwords, out)
    folder = write_data(tmp_path / "data", [entry(0, ["Ada"], [page("A.txt")])], {})
    message = refused(capsys, folder, subwords, out)
    assert "no evidence/wikipedia/A.txt" in message and "triviaqa-rc.tar.gz" in message
    assert "without sentencepiece.model" in refused(capsys, questions, tmp_path, out)
    assert "no qa/web-train.json" in refused(capsys, questions, subwords, out, domain="web")
    folder = write_data(tmp_path / "far", [entry(0, ["Ada"], [page("../../../secret.txt")])], {})
    assert "../secret.txt" in refused(capsys, folder, subwords, out) and not out.exists()


@pytest.mark.parametrize(
    "content", ["[]", '{"Data": []}', '{"Data": [{"QuestionId": "x", "Question": "y"}], "Domain": "Wikipedia"}']
)
def test_files_that_are_none(content, subwords, tmp_path, capsys):
    folder = write_data(tmp_path / "data", [], {})
    (folder / "qa" / "wikipedia-train.json").write_text(content)
    assert "wikipedia-train.json" in refused(capsys, folder, subwords, tmp_path / "out")


def test_all_subwords_are_known(subwords, questions, tmp_path):
    """A character unknown to the subwords becomes bytes, not <unk>."""
    entries = [entry(0, ["Ada"], [page("A.txt")])]
    folder = write_data(tmp_path / "data", entries, {"wikipedia/A.txt": "Ada ☃ 𝄞 ж"})
    run(folder, subwords, tmp_path / "out")
    tokens = read_span_split(tmp_path / "out" / "data-bin", "train").document_tokens[0].numpy()
    assert not np.isin(tokens, [0, 1, 2, 3]).any()
    model = sentencepiece.SentencePieceProcessor(model_file=str(subwords / "sentencepiece.model"))
    assert len(tokens) == len(model.encode("Ada ☃ 𝄞 ж"))


def test_evaluation_of_written_answers(questions, tmp_path, capsys):
    """All right, one wrong, one missing; questions that are not in the file do not count."""
    file = questions / "qa" / "wikipedia-dev.json"
    values = {entry["QuestionId"]: entry["Answer"]["Value"] for entry in json.loads(file.read_text())["Data"]}
    path = tmp_path / "answers.json"
    name, other = list(values)[:2]
    for changed, expected in (
        ({}, "exact match 100.00, F1 100.00: 12 questions, 0 unanswered"),
        ({name: "nobody", other: f"The {values[other].upper()}!"}, "exact match 91.67, F1 91.67: 12 questions, 0 unan"),
        ({name: f"{values[name]} Hill Top"}, "exact match 91.67, F1 97.22: 12"),  # 2 of 4 words: F1 2 / 3
        ({name: None, "another": "x"}, "exact match 91.67, F1 91.67: 12 questions, 1 unanswered"),
    ):
        answers = {name: text for name, text in {**values, **changed}.items() if text is not None}
        path.write_text(json.dumps(answers))
        evaluate.main([str(path), "--file", str(file)])
        assert capsys.readouterr().out.startswith(expected)
    path.write_text("[]")
    with pytest.raises(SystemExit, match="ANSWERS"):
        evaluate.main([str(path), "--file", str(file)])
