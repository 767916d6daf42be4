"""What is to be trained: how many queries, how long they are, and how many slots a batch of them fills."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ft_insight.estimate.packing import Packing, is_packed, packed
from ft_insight.records import TrainFacts
from ft_insight.run_view import RunView


class WorkloadError(ValueError):
    """A job that cannot be priced; the message is one line."""


class Lengths(msgspec.Struct, frozen=True):
    """Rows of a data set other than the run's, and the histogram of their lengths in tokens."""

    queries: int
    values: tuple[int, ...]
    """Ascending."""
    counts: tuple[int, ...]
    notes: tuple[str, ...] = ()
    """What was cut off, packed or left out, in words."""


class Workload(msgspec.Struct, frozen=True):
    """A job: ``queries`` rows of the training set, ``epochs`` times."""

    queries: int
    epochs: float
    basis: str
    """Where these numbers come from, in words."""
    length_values: tuple[int, ...] = ()
    """Tokens per query, ascending; with ``length_counts`` a histogram. Empty where lengths are not known."""
    length_counts: tuple[int, ...] = ()
    padded: bool = True
    """Every row of a micro-batch fills as many slots as its longest one."""
    packing: Packing | None = None
    """Where a row of a batch holds several queries."""

    @property
    def queries_per_row(self) -> float:
        """Queries in one row of a batch."""
        return self.packing.rows if self.packing else 1.0

    @property
    def total(self) -> float:
        """Queries over all epochs."""
        return self.queries * self.epochs

    @property
    def longest(self) -> int | None:
        """Tokens of the longest row of a batch."""
        if self.packing:
            return self.packing.size
        return self.length_values[-1] if self.length_values else None

    def slots(self, batch: int) -> float | None:
        """Return the expected slots of a micro-batch of ``batch`` rows drawn at random; None if unknown.

        Padded, it is ``batch`` times the expected longest of ``batch`` draws, from the distribution of lengths.
        """
        if not self.length_values:
            return None
        total = sum(self.length_counts)
        if not self.padded:
            pairs = zip(self.length_values, self.length_counts, strict=True)
            return batch * self.queries_per_row * sum(v * c for v, c in pairs) / total
        expected = below = 0.0
        cumulated = 0
        for value, count in zip(self.length_values, self.length_counts, strict=True):
            cumulated += count
            at_most = (cumulated / total) ** batch
            expected += value * (at_most - below)
            below = at_most
        return batch * expected


def median_length(view: RunView) -> int | None:
    """Return the tokens of the median row of the run's training set; None where lengths are not known."""
    data = view.header.dataset if view.header else None
    if data is None or not data.length_values or not data.length_counts:
        return None
    seen = 0
    for value, count in zip(data.length_values, data.length_counts, strict=False):
        seen += count
        if 2 * seen >= sum(data.length_counts):
            return value
    return None


def workload_of(
    view: RunView,
    *,
    queries: int | None = None,
    epochs: float | None = None,
    seq_len: int | None = None,
    lengths: Lengths | None = None,
) -> Workload:
    """Return the job that the trainer was set to do, with what the user says instead.

    It is the training set times ``num_train_epochs``, also where ``max_steps`` ended this run early: a probe of 20
    steps is priced as the job that it probes. Where ``max_steps`` asks for more than that, it is what is priced.
    ``lengths`` is another data set, which is priced instead of the run's.
    """
    header = view.header
    assert header is not None  # noqa: S101 - views of runs have one
    train, data = header.train, header.dataset
    if lengths is not None:
        queries = lengths.queries if queries is None else queries
    rows, times, basis = _job(view, queries, epochs)
    unit = data.query_unit + ("s" if rows != 1 else "")
    label = f"{rows:,} {unit} x {times:g} epoch{'s' if times != 1 else ''}"
    values, counts = data.length_values or (), data.length_counts or ()
    if len(values) != len(counts) or min(values, default=0) <= 0 or min(counts, default=0) < 0 or not sum(counts):
        values, counts = (), ()
    if lengths is not None:
        values, counts = lengths.values, lengths.counts
        basis += lengths.notes
    elif seq_len is not None:
        values, counts = (seq_len,), (1,)
        basis.append(f"every row {seq_len:,} tokens long")
    padded = not (train.padding_free or is_packed(train.packing))
    own = lengths is None and seq_len is None
    packing = _packing(view, train, values, counts, seq_len, own=own) if is_packed(train.packing) else None
    return Workload(rows, times, "; ".join([label, *basis]), tuple(values), tuple(counts), padded, packing)


def _packing(
    view: RunView,
    train: TrainFacts,
    values: Sequence[int],
    counts: Sequence[int],
    seq_len: int | None,
    *,
    own: bool,
) -> Packing | None:
    """Return how the job's rows are packed: the run's own as it was counted, others by packing their lengths."""
    size = max(train.max_length or 0, seq_len or 0)
    if own and size and view.totals.queries and train.batch and view.micro_batches:
        return Packing(view.totals.queries / (view.micro_batches * train.batch), size)
    return packed(values, counts, size) if size and values else None


def _job(view: RunView, queries: int | None, epochs: float | None) -> tuple[int, float, list[str]]:
    """Return rows, epochs and what is to be said of them. What the user says goes before what ``max_steps`` says."""
    header = view.header
    assert header is not None  # noqa: S101 - views of runs have one
    train, data = header.train, header.dataset
    per_step = _queries_per_step(view)
    stepped = train.max_steps * per_step if train.max_steps and per_step else None
    if queries is not None:
        known = train.epochs if data.queries is not None else None
        return queries, epochs or known or 1.0, []
    if data.queries is not None:
        times = epochs or train.epochs or 1.0
        if epochs is None and data.queries > 0 and stepped and stepped > data.queries * times * 1.01:
            return data.queries, stepped / data.queries, [f"{train.max_steps:,} steps as set by max_steps"]
        return data.queries, times, []
    if stepped is None:
        raise WorkloadError("the run does not say how many rows its training set has: add --queries N")
    note = f"{train.max_steps:,} steps of {per_step:,.0f}, from a data set without a length"
    return round(stepped), epochs or 1.0, [note]


def _queries_per_step(view: RunView) -> float | None:
    """Queries of one optimizer step over all ranks: measured, else as configured."""
    if view.totals.queries and view.totals.steps:
        return view.totals.queries / view.totals.steps
    header = view.header
    if header is None or not header.train.batch:
        return None
    ranks = header.data_parallel_size or header.world_size
    return header.train.batch * (header.train.accumulation or 1) * ranks
