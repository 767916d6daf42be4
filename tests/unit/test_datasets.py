from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ft_insight.demo.datasets import DatasetError, LoadedRows, load_rows

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"

PAIR = {"prompt": "1 + 1?", "completion": "2"}
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]


def _write(path: Path, rows: list[Any], form: str) -> Path:
    if form == "array":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _fails(path: Path, *parts: str, limit: int | None = None) -> str:
    with pytest.raises(DatasetError) as caught:
        load_rows(path, limit)
    message = str(caught.value)
    assert "\n" not in message
    for part in (path.name, *parts):
        assert part in message
    return message


@pytest.mark.parametrize("form", ["array", "jsonl"])
@pytest.mark.parametrize(
    ("raw", "shape", "expected"),
    [
        ({**PAIR, "id": 7}, "prompt/completion", PAIR),
        ({"text": "some words", "url": None}, "text", {"text": "some words"}),
        ({"messages": [{**turn, "name": "x"} for turn in TALK]}, "messages", {"messages": TALK}),
        ({"conversations": SHAREGPT, "id": "a"}, "conversations", {"messages": TALK}),
        (
            {"instruction": "Add.", "input": "1 and 1", "output": "2", "answer": "2.0"},
            "instruction/output",
            {"prompt": "Add.\n\n1 and 1", "completion": "2"},
        ),
        (
            {"instruction": "Sing.", "input": "", "response": "la"},
            "instruction/output",
            {"prompt": "Sing.", "completion": "la"},
        ),
        (
            {"instruction": "Sing.", "input": None, "output": "la"},
            "instruction/output",
            {"prompt": "Sing.", "completion": "la"},
        ),
        (
            {"instruction": "Sing.", "output": "la"},
            "instruction/output",
            {"prompt": "Sing.", "completion": "la"},
        ),
    ],
)
def test_shapes(tmp_path: Path, form: str, raw: dict[str, Any], shape: str, expected: dict[str, Any]) -> None:
    # The suffix lies on purpose: content decides.
    path = _write(tmp_path / ("rows.jsonl" if form == "array" else "rows.json"), [raw, raw], form)
    assert load_rows(path) == LoadedRows(rows=[expected, expected], shape=shape, dropped=0)


def test_byte_order_mark_blank_lines_crlf_and_odd_line_separators(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    line = json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf\r\n" + f"{line}\r\n\r\n{line}".encode())
    assert load_rows(path).rows == [{"text": "a\u2028b\x85c"}] * 2
    path.write_bytes(b"\xef\xbb\xbf \n" + json.dumps([PAIR]).encode())
    assert load_rows(path).rows == [PAIR]


def test_limit_counts_usable_rows_and_reads_no_further(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    empty = {"prompt": "x", "completion": " \n"}
    path.write_text("\n".join([json.dumps(empty), json.dumps(PAIR), json.dumps(PAIR), "{broken"]), encoding="utf-8")
    assert load_rows(path, limit=2) == LoadedRows(rows=[PAIR, PAIR], shape="prompt/completion", dropped=1)
    _fails(path, "line 4", limit=3)
    _fails(path, "at least 1", limit=0)


@pytest.mark.parametrize(
    ("good", "empty"),
    [
        (PAIR, {"prompt": "x", "completion": ""}),
        ({"text": "a"}, {"text": "\n "}),
        ({"instruction": "a", "output": "b"}, {"instruction": "a", "output": ""}),
        ({"messages": TALK}, {"messages": []}),
        ({"messages": TALK}, {"messages": TALK[:1]}),
        ({"conversations": SHAREGPT}, {"conversations": SHAREGPT[:1]}),
    ],
)
def test_empty_rows_are_dropped_but_not_all_of_them(
    tmp_path: Path, good: dict[str, Any], empty: dict[str, Any]
) -> None:
    loaded = load_rows(_write(tmp_path / "some.jsonl", [empty, good, empty], "jsonl"))
    assert (len(loaded.rows), loaded.dropped) == (1, 2)
    _fails(_write(tmp_path / "all.jsonl", [empty, empty], "jsonl"), "none of its 2 rows")


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ("no rows",)),
        (b" \n\n", ("no rows",)),
        (b"[]", ("no rows",)),
        (b'{"text": "a"}\n{"text": }\n', ("line 2 column", "invalid JSON")),
        (b'[{"text": "a"},\n{"text": "b"}', ("line 2 column", "invalid JSON")),
        (b"prompt,completion\n1,2\n", ("line 1", "invalid JSON")),
        (b'{"text": "a"}\n\n{"text": "\xff"}\n', ("line 3", "not UTF-8")),
        (b'[{"text": "a"},\n{"text": "\xff"}]', ("line 2", "not UTF-8")),
        ('{"text": "a"}'.encode("utf-16"), ("line 1", "not UTF-8")),
        (b'{"text": "a"}\n"b"\n', ("line 2", "a string, not an object")),
        (b"[[1]]", ("row 1", "a list, not an object")),
        (b'[{"text": "a"}, null]', ("row 2", "null, not an object")),
        (b'{"question": "a", "answer": "b"}', ("line 1", "no known shape", '"question", "answer"')),
        (b"{}", ("line 1", "the object is empty")),
        (b'{"prompt": "a"}', ("line 1", "no known shape")),
        (b'{"text": "a"}\n{"prompt": "a", "completion": "b"}', ("line 2", "line 1 has text", "do not mix")),
        (b'{"text": "a"}\n\n{"txt": "a"}', ("line 3", "no known shape")),
        (b'[{"prompt": "a", "completion": 4}]', ("row 1", "completion must be a string, not a number")),
        (b'{"prompt": null, "completion": "a"}', ("line 1", "prompt must be a string, not null")),
        (b'{"text": true}', ("text must be a string, not a boolean",)),
        (b'{"text": ["a"]}', ("text must be a string, not a list",)),
        (b'{"instruction": "a", "input": 1.5, "output": "b"}', ("input must be a string, not a number",)),
        (b'{"messages": "a"}', ("messages must be a list, not a string",)),
        (b'{"messages": ["a"]}', ("turn 1", "a string, not an object")),
        (b'{"messages": [{"content": "a"}]}', ("turn 1", "lacks role")),
        (b'{"messages": [{"role": "user", "content": {}}]}', ("content must be a string, not an object",)),
        (b'{"conversations": [{"from": "robot", "value": "a"}]}', ('from is "robot"', "human")),
        (b'{"conversations": [{"from": "human"}]}', ("turn 1", "lacks value")),
        (b'{"text": "\\ud83d"}', ("line 1", "surrogate")),
        (b'{"text": ' + b"[" * 100_000, ("line 1", "invalid JSON")),
        (b'{"a\\nb": 1}', ("no known shape",)),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_bad_content(tmp_path: Path, content: bytes, parts: tuple[str, ...]) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    message = _fails(path, *parts)
    assert "prompt + completion" in message  # always says what would be accepted
    assert "None" not in message


def test_bad_paths(tmp_path: Path) -> None:
    _fails(tmp_path / "absent.json", "no such file")
    folder = tmp_path / "folder.json"
    folder.mkdir()
    _fails(folder, "a folder")
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    _fails(pipe, "not a regular file")
    link = tmp_path / "loop.json"
    link.symlink_to(link)
    _fails(link)


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path / "rows.jsonl", [PAIR], "jsonl")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    _fails(path, "Permission denied")


def test_mixing_is_found_past_dropped_rows(tmp_path: Path) -> None:
    path = _write(tmp_path / "mixed.json", [{"text": ""}, PAIR], "array")
    _fails(path, "row 2", "row 1 has text")


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared data folder beside the repository")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("gsm8k_train.jsonl", "prompt/completion"),
        ("gsm8k_test.jsonl", "prompt/completion"),
        ("commonsense.jsonl", "prompt/completion"),
        ("math_instruct.json", "instruction/output"),
    ],
)
def test_real_files(name: str, shape: str) -> None:
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"{name} is not in the shared data folder")
    loaded = load_rows(path)
    text = path.read_text(encoding="utf-8")
    in_file = len(json.loads(text)) if text.startswith("[") else text.count("\n")
    assert loaded.shape == shape
    assert len(loaded.rows) + loaded.dropped == in_file
    assert loaded.dropped < 5
    assert all(set(row) == {"prompt", "completion"} for row in loaded.rows)
    assert load_rows(path, limit=10).rows == loaded.rows[:10]
