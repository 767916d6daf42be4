"""Token lengths of a data set that was not trained on yet: its rows cut off and packed as the run would."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ft_insight.estimate.workload import Lengths

CHUNK = 1000
MOST_BINS = 512
"""Bins of the histogram; beyond so many lengths neighbours share one, at its upper edge."""


class TokenizerError(ValueError):
    """A tokenizer that cannot be had; the message is one line."""


def lengths_of(path: Path, tokenizer: str, most: int | None = None, packing: str | None = None) -> Lengths:
    """Return the lengths of a data file's rows, at most ``most`` tokens each.

    ``packing`` is TRL's: ``wrapped`` chops the whole text into pieces of ``most`` tokens, ``bfd_split`` longer rows;
    the pieces are then the queries.
    Raises ``ValueError`` with one line for a file or a tokenizer that cannot be used.
    """
    from ft_insight.demo.datasets import load_rows

    loaded = load_rows(path)
    sizes = list(_sizes(loaded.rows, tokenizer))
    notes = [f"{path.name}: {loaded.shape}"]
    if loaded.dropped:
        notes.append(f"{loaded.dropped:,} rows with nothing to learn left out")
    if packing == "wrapped" and most:
        chunks = -(-sum(sizes) // most)
        return Lengths(chunks, (most,), (chunks,), (*notes, f"packed into pieces of {most:,} tokens"))
    if packing == "bfd_split" and most:
        sizes = [piece for size in sizes for piece in (most,) * (size // most) + (size % most,) if piece]
    longer = sum(size > most for size in sizes) if most else 0
    if longer:
        notes.append(f"{longer:,} rows cut off at {most:,} tokens")
    values, counts = _histogram([min(size, most) if most else size for size in sizes])
    return Lengths(len(sizes), values, counts, tuple(notes))


def _histogram(sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    width = max(1, -(-max(sizes) // MOST_BINS)) if sizes else 1
    bins = Counter(-(-max(1, size) // width) * width for size in sizes)
    longest = max(sizes, default=1)
    pairs = sorted((min(value, longest), count) for value, count in bins.items())
    return tuple(value for value, _ in pairs), tuple(count for _, count in pairs)


def _sizes(rows: Sequence[dict[str, Any]], name: str) -> Iterator[int]:
    """Yield the tokens of each row, with the end-of-sequence token that trainers add to text without a template."""
    if rows and "messages" in rows[0]:
        yield from _chat_sizes(rows, name)
        return
    tokenizer = _tokenizer(name)
    texts = (_text(row) for row in rows)
    while chunk := list(islice(texts, CHUNK)):
        yield from (len(encoded.ids) + 1 for encoded in tokenizer.encode_batch(chunk))


def _text(row: dict[str, Any]) -> str:
    return str(row["text"]) if "text" in row else f"{row.get('prompt', '')}{row.get('completion', '')}"


def _tokenizer(name: str) -> Any:
    """Load a tokenizer from a file, a folder, or the hub's cache."""
    _quiet_hub()
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise TokenizerError("--tokenizer needs the package tokenizers: pip install tokenizers") from None
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
        if not path.exists():
            raise TokenizerError(f"{name} holds no tokenizer.json")
    try:
        loaded = Tokenizer.from_file(str(path)) if path.exists() else Tokenizer.from_pretrained(name)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for all of its faults
        what = "is no tokenizer" if path.exists() else "is no local file or folder, and the hub did not give it"
        raise TokenizerError(f"{name} {what}: {str(error).splitlines()[0][:200] if str(error) else error!r}") from None
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def _quiet_hub() -> None:
    """Keep the hub's client from telling of each attempt: what failed is said in a line."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _chat_sizes(rows: Sequence[dict[str, Any]], name: str) -> Iterator[int]:
    """Yield the tokens of conversations under the tokenizer's own chat template, which only transformers applies."""
    if Path(name).is_file():
        raise TokenizerError(f"rows of messages need the folder of {name}: the chat template lies beside it")
    _quiet_hub()
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise TokenizerError("rows of messages need transformers for their chat template") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        for row in rows:
            yield len(tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False))
    except Exception as error:  # noqa: BLE001 - transformers and jinja raise many kinds
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)
        raise TokenizerError(f"{name} cannot lay out rows of messages: {first}") from None
