"""Read a fine-tuning data file, whatever common shape it has, into rows that TRL's SFTTrainer takes.

A file in the wrong shape otherwise fails minutes later, deep inside a tokeniser and with a traceback; here it
fails at once, with one line that says where in the file the fault is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

__all__ = ["ACCEPTED", "DatasetError", "LoadedRows", "load_rows"]

ACCEPTED = (
    "a UTF-8 JSON array or JSONL (one object a line), every row having one of: prompt + completion; "
    "messages of role + content, or conversations of from + value; instruction + output (or response), "
    "optionally input; text"
)
"""What `load_rows` takes, in words, for messages and help texts."""

_CHATTY = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}


class DatasetError(ValueError):
    """A data file that cannot be used; the message is one line, fit to be shown to the user as it is."""


@dataclass(frozen=True)
class LoadedRows:
    """The usable rows of a file, and what was found out on the way, so that nothing is dropped silently."""

    rows: list[dict[str, Any]]
    """Rows with only the columns the trainer knows: prompt + completion, messages, or text."""
    shape: str
    """The file's own shape: prompt/completion, messages, conversations, instruction/output or text."""
    dropped: int
    """How many of the rows read had nothing to learn from, such as an empty completion."""


class _RowError(Exception):
    """What is wrong with one row; the caller knows the file and the place."""


def load_rows(path: Path, limit: int | None = None) -> LoadedRows:
    """Read the rows of a file; with `limit`, at most so many usable ones, and nothing after them.

    Raises:
        DatasetError: the file or a row of it cannot be used.
    """
    if limit is not None and limit < 1:
        raise DatasetError(f"{_show(path)}: the number of rows to read must be at least 1, not {limit}")
    kept: list[dict[str, Any]] = []
    dropped = 0
    shape = first_place = ""
    for place, raw in _raw_rows(path):
        try:
            row_shape = _shape_of(raw)
            if shape and row_shape != shape:
                raise _RowError(f"has the shape {row_shape}, but {first_place} has {shape}; do not mix them")
            row = _CONVERTERS[row_shape](raw)
        except _RowError as fault:
            raise _error(path, place, str(fault)) from None
        if not shape:
            shape, first_place = row_shape, place
        if row is None:
            dropped += 1
            continue
        kept.append(row)
        if limit is not None and len(kept) >= limit:
            break
    if not shape:
        raise _error(path, "", "the file has no rows")
    if not kept:
        raise _error(path, "", f"none of its {dropped} rows has anything to learn from, all are empty")
    return LoadedRows(rows=kept, shape=shape, dropped=dropped)


def _show(path: Path) -> str:
    """Show a path on one line, whatever characters it has."""
    return str(path).encode("utf-8", "backslashreplace").decode().replace("\n", "\\n").replace("\r", "\\r")


def _error(path: Path, place: str, what: str) -> DatasetError:
    where = f"{_show(path)}: {place}: " if place else f"{_show(path)}: "
    return DatasetError(f"{where}{what}. Accepted is {ACCEPTED}.")


def _raw_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place in words, parsed JSON) for every row, telling an array from JSONL by content."""
    if path.is_dir():
        raise _error(path, "", "this is a folder, not a file")
    if not path.exists():
        raise _error(path, "", "there is no such file")
    if not path.is_file():
        raise _error(path, "", "this is not a regular file")
    try:
        if _first_byte(path) == b"[":
            yield from _array_rows(path)
        else:
            yield from _line_rows(path)
    except OSError as problem:
        raise _error(path, "", f"cannot be read: {problem.strerror or type(problem).__name__}") from problem


def _first_byte(path: Path) -> bytes:
    """Find the first byte that is neither white space nor a byte order mark."""
    with path.open("rb") as file:
        for line in file:
            if stripped := line.removeprefix(b"\xef\xbb\xbf").strip():
                return stripped[:1]
    return b""


def _array_rows(path: Path) -> Iterator[tuple[str, Any]]:
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        raise _error(path, f"line {line}", "not UTF-8 text") from None
    for index, raw in enumerate(_parse(path, text, ""), start=1):
        yield f"row {index}", raw


def _line_rows(path: Path) -> Iterator[tuple[str, Any]]:
    # Bytes are split at newlines only: a text may hold other characters that str.splitlines would split at.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise _error(path, place, "not UTF-8 text") from None
            if text.strip():
                yield place, _parse(path, text, place)


def _parse(path: Path, text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as problem:
        where = f"{place or f'line {problem.lineno}'} column {problem.colno}"
        raise _error(path, where, f"invalid JSON ({problem.msg})") from None
    except (ValueError, RecursionError) as problem:  # a number too long, or brackets nested too deep
        raise _error(path, place, f"invalid JSON ({type(problem).__name__})") from None


def _shape_of(raw: Any) -> str:
    """Name the shape of a row by its keys; further keys do no harm and are left out later."""
    if not isinstance(raw, dict):
        raise _RowError(f"this is {_kind(raw)}, not an object")
    if "prompt" in raw and "completion" in raw:
        return "prompt/completion"
    if "messages" in raw:
        return "messages"
    if "conversations" in raw:
        return "conversations"
    if "instruction" in raw and ("output" in raw or "response" in raw):
        return "instruction/output"
    if "text" in raw:
        return "text"
    keys = ", ".join(json.dumps(key[:40]) for key in islice(raw, 8))
    raise _RowError(f"no known shape, it has the keys {keys}" if keys else "no known shape, the object is empty")


def _kind(value: Any) -> str:
    """Name a JSON value's type as somebody who wrote the file would."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object")


def _string(raw: dict[str, Any], key: str, where: str = "") -> str:
    if key not in raw:
        raise _RowError(f"{where}lacks {key}")
    value = raw[key]
    if not isinstance(value, str):
        raise _RowError(f"{where}{key} must be a string, not {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can spell but no tokeniser takes
        raise _RowError(f"{where}{key} holds half a surrogate pair, which is not valid text") from None
    return value


def _from_pair(raw: dict[str, Any]) -> dict[str, Any] | None:
    row = {"prompt": _string(raw, "prompt"), "completion": _string(raw, "completion")}
    return row if row["completion"].strip() else None


def _from_text(raw: dict[str, Any]) -> dict[str, Any] | None:
    text = _string(raw, "text")
    return {"text": text} if text.strip() else None


def _from_instruction(raw: dict[str, Any]) -> dict[str, Any] | None:
    prompt = _string(raw, "instruction")
    extra = _string(raw, "input") if raw.get("input") is not None else ""
    answer = _string(raw, "output" if "output" in raw else "response")
    if extra.strip():
        prompt = f"{prompt}\n\n{extra}"
    return {"prompt": prompt, "completion": answer} if answer.strip() else None


def _turns(raw: dict[str, Any], key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    value = raw[key]
    if not isinstance(value, list):
        raise _RowError(f"{key} must be a list, not {_kind(value)}")
    for index, turn in enumerate(value, start=1):
        where = f"{key}, turn {index}: "
        if not isinstance(turn, dict):
            raise _RowError(f"{where}this is {_kind(turn)}, not an object")
        yield where, turn


def _from_messages(raw: dict[str, Any]) -> dict[str, Any] | None:
    turns = [
        {"role": _string(turn, "role", where), "content": _string(turn, "content", where)}
        for where, turn in _turns(raw, "messages")
    ]
    return _conversation(turns)


def _from_conversations(raw: dict[str, Any]) -> dict[str, Any] | None:
    turns = []
    for where, turn in _turns(raw, "conversations"):
        speaker = _string(turn, "from", where)
        if speaker not in _CHATTY:
            raise _RowError(f"{where}from is {json.dumps(speaker[:40])}, known are {', '.join(_CHATTY)}")
        turns.append({"role": _CHATTY[speaker], "content": _string(turn, "value", where)})
    return _conversation(turns)


def _conversation(turns: list[dict[str, str]]) -> dict[str, Any] | None:
    """Keep a conversation only if the assistant says something in it: nothing else is to be learnt."""
    spoken = any(turn["role"] == "assistant" and turn["content"].strip() for turn in turns)
    return {"messages": turns} if spoken else None


_CONVERTERS = {
    "prompt/completion": _from_pair,
    "messages": _from_messages,
    "conversations": _from_conversations,
    "instruction/output": _from_instruction,
    "text": _from_text,
}
