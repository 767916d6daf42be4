"""What a sweep is asked, checked before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Iterable


class SweepError(ValueError):
    """A sweep or probe that cannot be done; the message is one line."""


def sizes_of(text: str) -> str | list[int]:
    """Read ``auto`` or ``1,2,4`` as typed. Raises :class:`SweepError`."""
    if text == "auto":
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise SweepError(f"--batch-sizes must be 'auto' or sizes like 1,2,4, not {text!r}") from None


def check_question(batch_sizes: str | Iterable[int], steps: int, max_batch: int | None) -> tuple[int, ...] | None:
    """Return the sizes to measure in ascending order, None for ``"auto"``. Raises :class:`SweepError`."""
    for name, value in (("steps", steps), ("max_batch", max_batch)):
        if value is not None and not _whole(value):
            raise SweepError(f"{name} must be a whole number of 1 or more, not {value!r}")
    if isinstance(batch_sizes, str):
        if batch_sizes != "auto":
            raise SweepError(f"batch_sizes must be 'auto' or whole numbers of 1 or more, not {batch_sizes!r}")
        return None
    sizes = list(batch_sizes) if isinstance(batch_sizes, Iterable) else [batch_sizes]
    wrong = [size for size in sizes if not _whole(size)]
    if wrong or not sizes:
        raise SweepError(f"batch_sizes must be whole numbers of 1 or more, not {wrong[0] if wrong else 'none'!r}")
    return tuple(sorted(set(sizes)))


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
