"""What is evaluated on: forms of questions, errors by file and line, needles."""

import json
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

from mlx_moe.errors import BadData, InvalidArgument
from mlx_moe.evaluation_data import read_sources, tokenized
from mlx_moe.retrieval import NEEDLES, needle_questions

CHOICE = {"context": "In the", "choices": [" end", " beginning"], "answer": 1}
HELLASWAG = {"ctx": "A man", "endings": ["runs.", "sleeps well."], "label": "1"}
BOOLQ = {"passage": "Water is wet.", "question": "is water wet", "answer": True}


class Bytes:
    """A tokenizer of one token a byte, but for "ab", which is one."""

    bos_token = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.replace("ab", "\x01").encode())

    def decode(self, tokens: Any) -> str:
        return bytes(tokens).decode().replace("\x01", "ab")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = Path(__file__).parent.parent / "examples" / "tiny-qwen3-moe"
    return mlx_lm.load(str(path), lazy=True)[1]


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_forms_of_questions(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", CHOICE, HELLASWAG, BOOLQ)
    (source,) = read_sources([path], Bytes())
    choice, hellaswag, boolq = source.questions
    text = Bytes().decode
    assert (text(choice.context), [text(c) for c in choice.choices]) == (
        "In the",
        CHOICE["choices"],
    )
    assert (choice.answer, choice.divisors) == (1, (1.0, 1.0))
    assert [text(c) for c in hellaswag.choices] == [" runs.", " sleeps well."]
    assert (hellaswag.answer, hellaswag.divisors) == (1, (6.0, 13.0))  # by bytes
    assert text(boolq.context) == "Water is wet.\nQuestion: is water wet?\nAnswer:"
    assert [text(c) for c in boolq.choices] == [" no", " yes"] and boolq.answer == 1


def test_text_and_questions_of_a_directory(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", CHOICE)
    write(tmp_path / "a.jsonl", {"text": "one "}, {"prompt": "two"})
    (tmp_path / "c.txt").write_text("three four")
    found = read_sources([tmp_path], Bytes())
    assert [Path(s.name).name for s in found] == ["a.jsonl", "b.jsonl", "c.txt"]
    assert bytes(found[0].text) == b"one two" and bytes(found[2].text) == b"three four"
    assert len(found[1].questions) == 1 and not found[1].text


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ({**CHOICE, "context": 3}, '"context" is 3'),
        ({**CHOICE, "context": ""}, "no token of its own"),
        ({**CHOICE, "choices": [" one"]}, "1 entries"),
        ({**CHOICE, "choices": [" a", ""]}, "a choice has no token"),
        ({**CHOICE, "choices": " a"}, "expected a list of strings"),
        ({**CHOICE, "answer": 2}, "0 to 1"),
        ({**CHOICE, "answer": True}, "0 to 1"),
        ({**HELLASWAG, "label": ""}, "\"label\" is ''"),
        ({**BOOLQ, "answer": 1}, "expected a bool"),
        ({"question": "?"}, "found the keys 'question'"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, second: Any, message: str) -> None:
    path = tmp_path / "q.jsonl"
    text = second if isinstance(second, str) else json.dumps(second)
    path.write_text(f"{json.dumps(CHOICE)}\n\n{text}\n")
    with pytest.raises(BadData) as caught:
        read_sources([path], Bytes())
    assert f"{path}:3" in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(content)
    with pytest.raises(BadData, match="nothing in it"):
        read_sources([path], Bytes())
    with pytest.raises(BadData, match="no such file"):
        read_sources([tmp_path / "none.jsonl"], Bytes())


def test_a_choice_that_changes_the_last_token_of_the_context() -> None:
    question = tokenized("xa", ["b", "c"], 0, [1, 1], Bytes(), "here")
    assert question.context == (ord("x"),)
    assert question.choices == ((1,), (ord("a"), ord("c")))


def test_examples_have_equal_lengths(tokenizer: Any) -> None:
    data = Path(__file__).parent.parent / "examples" / "data"
    sources = read_sources(sorted(data.glob("*.choice.jsonl")), tokenizer)
    questions = [q for source in sources for q in source.questions]
    assert len(questions) >= 2000
    assert {len(q.context) for q in questions} == {32}
    assert {len(c) for q in questions for c in q.choices} == {8}
    assert all(len(set(q.choices)) == 4 for q in questions)
    assert sum(f.stat().st_size for f in data.iterdir()) < 1.5e6


def test_needles(tokenizer: Any) -> None:
    haystack = tokenizer.encode("And it came to pass in those days. " * 40)
    questions = needle_questions(haystack, tokenizer, length=400, count=5)
    assert questions == needle_questions(haystack, tokenizer, length=400, count=5)
    places = []
    for question in questions:
        text = tokenizer.decode(question.context)
        values = [tokenizer.decode(choice).strip() for choice in question.choices]
        assert len(question.context) == 400 and len(set(values)) == NEEDLES
        assert all(f" is {value}.\n" in text for value in values)
        asked = text.rpartition("The secret number of the ")[2].split()[0]
        true = values[question.answer]
        assert f"The secret number of the {asked} is {true}.\n" in text
        assert text.endswith(f"The secret number of the {asked} is")
        places.append(text.index(f" is {true}.") / len(text))
    assert places == sorted(places) and places[0] < 0.1 and places[-1] > 0.7


def test_needles_need_text_and_room(tokenizer: Any) -> None:
    with pytest.raises(InvalidArgument, match="no room"):
        needle_questions([5], tokenizer, length=40, count=1)
    with pytest.raises(InvalidArgument, match="hides its needles"):
        needle_questions([], tokenizer, length=400, count=1)
