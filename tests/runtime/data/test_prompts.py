"""Prompt sources are pure functions of seed and index; data sets are read in the formats that they come in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given, strategies as st
from pyarrow import parquet

from hetrl.describe.experiment import Data
from hetrl.errors import UsageError
from hetrl.runtime.data.prompts import Prompt, arithmetic, larger_digit, open_source, read_prompts, shuffled

DATA = Path(__file__).parents[2] / "data"
GSM8K = ["17", "1080", "-3.50"]
MATH = [r"\frac{1}{2}", r"\left\{-3, 3\right\}", r"\pi"]
seeds = st.integers(0, 2**31)
indices = st.integers(0, 10**6)

# --- generated tasks --------------------------------------------------------------------------------------------------


@given(seeds, indices)
def test_larger_digit_has_the_larger_of_two_different_digits(seed: int, index: int) -> None:
    prompt = larger_digit(seed)(index)
    first, second = int(prompt.text[0]), int(prompt.text[2])
    assert first != second
    assert prompt.text == f"{first} {second}>"
    assert prompt.answer == str(max(first, second))
    assert prompt == larger_digit(seed)(index)


@given(seeds, indices)
def test_arithmetic_has_the_sum(seed: int, index: int) -> None:
    prompt = arithmetic(seed)(index)
    first, second = prompt.text.rstrip("=").split("+")
    assert int(first) + int(second) == int(prompt.answer)
    assert len(first) == len(second) == 2


def test_seeds_differ() -> None:
    assert [larger_digit(0)(n) for n in range(20)] != [larger_digit(1)(n) for n in range(20)]


# --- order ------------------------------------------------------------------------------------------------------------

ROWS = tuple(Prompt(f"q{n}", str(n)) for n in range(10))


@given(seeds, st.integers(0, 1000))
def test_every_pass_visits_every_row_once(seed: int, epoch: int) -> None:
    source = shuffled(ROWS, seed)
    assert {source(epoch * 10 + place) for place in range(10)} == set(ROWS)


def test_passes_and_seeds_have_other_orders() -> None:
    source = shuffled(ROWS, 3)
    orders = [[source(epoch * 10 + place) for place in range(10)] for epoch in range(5)]
    orders.append([shuffled(ROWS, 4)(place) for place in range(10)])
    assert len({tuple(order) for order in orders}) == len(orders)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=30))
def test_a_row_depends_on_seed_and_index_alone(asked: list[int]) -> None:
    source = shuffled(ROWS, 3)
    assert [source(index) for index in asked] == [shuffled(ROWS, 3)(index) for index in asked]


# --- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["gsm8k", "gsm8k/train.jsonl", "gsm8k-hub", "gsm8k-hub/main"])
def test_gsm8k_as_published_and_as_on_the_hub(path: str) -> None:
    prompts = read_prompts("gsm8k", DATA / path, "train")
    assert [prompt.answer for prompt in prompts] == GSM8K
    assert prompts[0].text.startswith("A baker fills 4 trays")


@pytest.mark.parametrize("path", ["gsm8k", "gsm8k-hub"])
def test_a_split_is_read_alone(path: str) -> None:
    assert [prompt.answer for prompt in read_prompts("gsm8k", DATA / path, "test")] == ["55"]


@pytest.mark.parametrize("path", ["math", "math-hub"])
def test_math_as_published_and_as_on_the_hub(path: str) -> None:
    prompts = read_prompts("math", DATA / path, "train")
    assert [prompt.answer for prompt in prompts] == MATH
    assert prompts[2].text == "What is the area of a disc of radius $1$?"


def test_math_500_gives_its_answers() -> None:
    assert read_prompts("math", DATA / "math-500", "test")[0].answer == r"\frac{1}{3}"


def test_a_file_for_all_goes_before_one_folder_per_subject(tmp_path: Path) -> None:
    shutil.copytree(DATA / "math-hub", tmp_path / "set")
    (tmp_path / "set/data").mkdir()
    shutil.copy(DATA / "math-hub/algebra/train-00000-of-00001.parquet", tmp_path / "set/data")
    assert len(read_prompts("math", tmp_path / "set", "train")) == 2


@given(st.lists(st.tuples(st.text(), st.text()).filter(lambda row: row[0].strip() and row[1].strip()), min_size=1))
def test_json_lines_keep_every_text(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [json.dumps({"prompt": text, "answer": answer}, ensure_ascii=False) for text, answer in rows]
    path.write_bytes(("\n".join(lines) + "\n").encode())
    assert read_prompts("jsonl", path, "train") == tuple(Prompt(*row) for row in rows)


def test_json_lines_take_numbers_a_byte_order_mark_and_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": 7}\r\n\r\n{"prompt": "b", "answer": 0.5}')
    assert read_prompts("jsonl", path, "train") == (Prompt("a", "7"), Prompt("b", "0.5"))


def test_the_digits_of_a_number_are_those_that_are_written(tmp_path: Path) -> None:
    path, numbers = tmp_path / "rows.jsonl", ["5.10", "0.00001", "1e16", "12345678901234567890.5", "-3"]
    path.write_text("".join(f'{{"prompt": "q", "answer": {number}}}\n' for number in numbers))
    assert [prompt.answer for prompt in read_prompts("jsonl", path, "train")] == numbers
    table = {"prompt": ["q", "q", "q"], "answer": [0.00001, 1e16, 0.5]}
    parquet.write_table(pyarrow.table(table), tmp_path / "rows.parquet")
    found = read_prompts("jsonl", tmp_path / "rows.parquet", "train")
    assert [prompt.answer for prompt in found] == ["0.00001", "10000000000000000", "0.5"]


# --- what is wrong with a file ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "line", "message"),
    [
        ("jsonl", "{", "expected a JSON object"),
        ("jsonl", "[1, 2]", "expected a JSON object, found list"),
        ("jsonl", "[" * 100_000, "expected a JSON object"),
        ("jsonl", '{"prompt": "q"}', 'expected a text under "answer"; its keys are: prompt'),
        ("jsonl", '{"prompt": "q", "answer": null}', 'expected a text under "answer"'),
        ("jsonl", '{"prompt": " ", "answer": "a"}', 'expected a text under "prompt"'),
        ("jsonl", '{"prompt": 3, "answer": true}', 'expected a text under "prompt"'),
        ("jsonl", '{"prompt": 3.5, "answer": 1}', 'expected a text under "prompt"'),
        ("jsonl", '{"prompt": "q", "answer": NaN}', "NaN is no number of JSON"),
        ("jsonl", '{"prompt": "\\ud83d", "answer": "a"}', '"prompt" has half of a pair of surrogates'),
        ("jsonl", b'{"prompt": "\xff", "answer": "a"}', "expected a JSON object"),
        ("gsm8k", '{"prompt": "q", "answer": "1"}', 'expected a text under "question"; its keys are: prompt, answer'),
        ("gsm8k", '{"question": "q", "answer": "it is 4"}', '"answer" has no "#### "'),
        ("gsm8k", '{"question": "q", "answer": "it is 4\\n#### "}', '"answer" has no "#### "'),
        ("math", '{"problem": "q", "solution": "$\\\\boxed{4$"}', '"solution" has no balanced'),
        ("math", '{"problem": "q", "level": "Level 1"}', 'expected a text under "solution"'),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, kind: str, line: str | bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    good = '{"prompt": "q", "question": "q", "problem": "q", "answer": "#### 1"}\n\n'
    path.write_bytes(good.encode() + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(UsageError) as raised:
        read_prompts(kind, path, "train")
    assert str(raised.value).startswith(f"{path}:3: ")
    assert message in str(raised.value)


def test_a_bad_row_of_parquet_and_of_a_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r'main/train-00000-of-00001\.parquet:1: expected a text under "problem"'):
        read_prompts("math", DATA / "gsm8k-hub", "train")
    shutil.copytree(DATA / "math", tmp_path / "math")
    (tmp_path / "math/train/geometry/1.json").write_text("{")
    with pytest.raises(UsageError, match=r"geometry/1\.json:1: expected a JSON object"):
        read_prompts("math", tmp_path / "math", "train")


def test_sources_that_cannot_be_read_say_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="kind jsonl needs the path"):
        open_source(Data(kind="jsonl"))
    with pytest.raises(UsageError, match="kind gsm8k needs a file of it"):
        open_source(Data(kind="gsm8k"))
    with pytest.raises(UsageError, match="No such file"):
        open_source(Data(kind="jsonl", path=str(tmp_path / "none.jsonl")))
    with pytest.raises(UsageError, match='no file of the split "validation" under .*/gsm8k/ or .*/gsm8k/main/'):
        open_source(Data(kind="gsm8k", path=str(DATA / "gsm8k"), split="validation"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="has no rows"):
        open_source(Data(kind="jsonl", path=str(tmp_path / "empty.jsonl")))
    (tmp_path / "pointer.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UsageError, match=r"pointer\.parquet: not parquet"):
        open_source(Data(kind="gsm8k", path=str(tmp_path / "pointer.parquet")))


def test_prompts_that_do_not_fit_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "{"x" * length}", "answer": "1"}}\n' for length in (3, 9, 4, 8)))
    data = Data(kind="jsonl", path=str(path))
    opened = open_source(data, lambda prompt: len(prompt.text) <= 4)
    assert (opened.prompts, opened.left_out) == (4, 2)
    assert {opened.source(index).text for index in range(10)} == {"xxx", "xxxx"}
    assert open_source(data).left_out == 0
    with pytest.raises(UsageError, match=r"all 4 prompts of .*rows\.jsonl are longer than batch\.prompt_tokens"):
        open_source(data, lambda prompt: False)


def test_an_experiment_opens_its_data_set() -> None:
    source = open_source(Data(kind="gsm8k", path=str(DATA / "gsm8k-hub"), seed=1)).source
    assert sorted(source(n).answer for n in range(3)) == sorted(GSM8K)
