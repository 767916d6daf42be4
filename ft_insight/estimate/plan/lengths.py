"""How long the rows of a data set are, in tokens, before it is tokenised."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ft_insight.estimate.plan.setup import PlanError

CHARACTERS_PER_TOKEN = 3.0
"""Without a tokenizer: between LaTeX (2) and English prose (4 to 4.5) of current vocabularies, so rather too long."""
LAYOUTS = (
    ("text",),
    ("messages",),
    ("prompt", "completion"),
    ("question", "answer"),
    ("query", "response"),
    ("instruction", "input", "output"),
)
"""Fields that are trained on, where a row has them all; of other rows every string counts."""
DEFAULT_LENGTH = 1024
"""SFTConfig.max_length of TRL."""


def row_lengths(dataset: str, model: str) -> tuple[list[int], str]:
    """Return (tokens of every row, how they were counted) of a .jsonl or .json file.

    A row is taken as one text, of the fields of `LAYOUTS`; a chat's template is not counted. Tokens are counted by the
    tokenizer in the model's folder or the hub's cache, and estimated from characters where there is none.

    Raises:
        PlanError: The file is not there, or holds no rows of text.
    """
    path = Path(dataset).expanduser()
    if not path.is_file():
        raise PlanError(f"{path} does not exist")
    try:
        texts = [text for row in _rows(path) if (text := "\n".join(_strings(_trained(row))))]
    except (ValueError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} is neither JSON nor JSON lines: {' '.join(str(error).split())[:120]}") from error
    if not texts:
        raise PlanError(f"{path} holds no rows of text")
    tokenizer = _tokenizer(model)
    if tokenizer is None:
        guessed = [max(1, round(len(text) / CHARACTERS_PER_TOKEN)) for text in texts]
        return guessed, f"estimated at {CHARACTERS_PER_TOKEN:g} characters a token: no tokenizer of {model} is here"
    return [len(ids) for ids in tokenizer(texts)["input_ids"]], f"counted by the tokenizer of {model}"


def _rows(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        if path.suffix == ".json":
            rows = json.load(file)
            yield from rows if isinstance(rows, list) else ()
            return
        for line in file:
            if line.strip():
                yield json.loads(line)


def _trained(row: Any) -> Any:
    if not isinstance(row, dict):
        return row
    layout = next((names for names in LAYOUTS if all(name in row for name in names)), tuple(row))
    return [row[name] for name in layout]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings(value["content"] if "content" in value else list(value.values()))
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part)


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except Exception:  # noqa: BLE001 - whatever it raises: it is not there
        return None
