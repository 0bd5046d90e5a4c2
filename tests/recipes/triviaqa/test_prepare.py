"""From TriviaQA's files to the task's folder: names, gold spans in any script, and missing files."""

import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from fairseq_plugin.data.span_answers import normalise_answer, spell
from fairseq_plugin.data.span_folder import read_span_split
from recipes.shared.documents import paragraphs
from recipes.triviaqa import generated, prepare
from recipes.triviaqa.gold_spans import SpelledDocument, answer_pattern
from recipes.triviaqa.questions import read_questions


def run(questions: Path, subwords: Path, out: Path, *arguments: str, domain: str = "wikipedia") -> int:
    folders = ["--file", str(questions), "--subwords", str(subwords), "--out", str(out), "--workers", "1"]
    return prepare.main([domain, *folders, *arguments])


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
    assert run(questions, subwords, tmp_path / "out") == 0
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
    assert run(questions, subwords, tmp_path / "out", "--limit", "5") == 0  # again: it may replace its own files
    assert len(read_span_split(data_bin, "train").questions) == 5


def test_the_same_seed_makes_the_same_questions(questions, tmp_path):
    for seed, equal in (("1", True), ("2", False)):
        out = tmp_path / seed
        assert (
            generated.main(["--out", str(out), "--train", "60", "--valid", "12", "--people", "4", "--seed", seed]) == 0
        )
        contents = [(folder / "qa" / "wikipedia-dev.json").read_bytes() for folder in (out, questions)]
        assert (contents[0] == contents[1]) == equal


def test_more_people_than_there_are(tmp_path, capsys):
    assert generated.main(["--out", str(tmp_path / "out"), "--people", "13"]) == 1
    assert "--people is 13; allowed: at most 12" in capsys.readouterr().err


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
        assert run(folder, subwords, tmp_path / f"{domain} out", domain=domain) == 0
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
    assert run(folder, subwords, tmp_path / "out") == 0
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
        (["the", ""], "the a an", []),
        ([], "anything", []),
    ],
)
def test_answers_are_found_as_the_official_normalisation_compares_them(answers, text, found):
    pattern = answer_pattern(answers)
    matches = [match[0] for match in pattern.finditer(text)] if pattern else []
    assert matches == found
    assert all(normalise_answer(match) in [normalise_answer(answer) for answer in answers] for match in matches)


def test_spans_of_subwords():
    """Characters to subwords, for pieces with spaces, several characters, or single bytes."""
    document = SpelledDocument(["▁on", "▁", "<0xC3>", "<0x89>", "mile", "▁Zola", "."])
    assert document.text == " on Émile Zola."
    assert document.find(answer_pattern(["émile zola"])).tolist() == [[2, 5]]
    assert document.find(answer_pattern(["on"])).tolist() == [[0, 0]]
    assert document.find(None).shape == (0, 2)
    late = SpelledDocument(["▁a", "<0xC3>", "<0x89>"])
    assert late.find(answer_pattern(["aé"])).tolist() == [[0, 2]]


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


# ---- What is missing or wrong


def fails(capsys, *arguments, **more) -> str:
    assert run(*arguments, **more) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "allowed" in message
    return message


def test_missing_files_say_how_to_get_them(questions, subwords, tmp_path, capsys):
    message = fails(capsys, tmp_path, subwords, tmp_path / "out")
    assert "no qa/wikipedia-train.json" in message and "triviaqa-rc.tar.gz" in message
    folder = write_data(tmp_path / "data", [entry(0, ["Ada"], [page("A.txt")])], {})
    message = fails(capsys, folder, subwords, tmp_path / "out")
    assert "no evidence/wikipedia/A.txt" in message and "triviaqa-rc.tar.gz" in message
    assert not (tmp_path / "out" / "data-bin").exists()
    message = fails(capsys, questions, tmp_path, tmp_path / "out")
    assert "--subwords" in message and "no sentencepiece.model" in message and "recipes.flash.prepare" in message
    assert "no qa/web-train.json" in fails(capsys, questions, subwords, tmp_path / "out", domain="web")


def test_documents_outside_of_the_folder(subwords, tmp_path, capsys):
    folder = write_data(tmp_path / "data", [entry(0, ["Ada"], [page("../../../secret.txt")])], {})
    (tmp_path / "secret.txt").write_text("Ada")
    assert "names the document wikipedia/../../../secret.txt" in fails(capsys, folder, subwords, tmp_path / "out")


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "cannot be read"),
        ("[]", "has no list Data"),
        ('{"Data": {}}', "has no list Data"),
        ('{"Data": []}', "has no question with a document"),
        ('{"Data": [3], "Domain": "Wikipedia"}', "as entry 0 of Data"),
        ('{"Data": [{"QuestionId": "x", "Question": "y"}]}', "as entry 0 of Data: KeyError('Answer')"),
        ('{"Data": [{"QuestionId": 1, "Question": "y", "Answer": {"NormalizedAliases": []}}]}', "a text is none"),
    ],
)
def test_files_that_are_none(content, message, subwords, tmp_path, capsys):
    folder = write_data(tmp_path / "data", [], {})
    (folder / "qa" / "wikipedia-train.json").write_text(content)
    error = fails(capsys, folder, subwords, tmp_path / "out")
    assert message in error and "wikipedia-train.json" in error


def test_texts_that_are_none(subwords, tmp_path, capsys):
    folder = write_data(tmp_path / "data", [entry(0, ["Ada"], [page("A.txt")])], {"wikipedia/A.txt": ""})
    assert "no document of train has an answer" in fails(capsys, folder, subwords, tmp_path / "out")
    (folder / "evidence" / "wikipedia" / "A.txt").write_bytes(b"Ada \xff")
    assert "A.txt is not text in UTF-8" in fails(capsys, folder, subwords, tmp_path / "out")


def test_all_subwords_are_known(subwords, questions, tmp_path):
    """A character unknown to the subwords becomes bytes, not <unk>."""
    entries = [entry(0, ["Ada"], [page("A.txt")])]
    folder = write_data(tmp_path / "data", entries, {"wikipedia/A.txt": "Ada ☃ 𝄞 ж"})
    assert run(folder, subwords, tmp_path / "out") == 0
    tokens = read_span_split(tmp_path / "out" / "data-bin", "train").document_tokens[0].numpy()
    assert not np.isin(tokens, [0, 1, 2, 3]).any()
    model = sentencepiece.SentencePieceProcessor(model_file=str(subwords / "sentencepiece.model"))
    assert len(tokens) == len(model.encode("Ada ☃ 𝄞 ж"))
