"""How much each phase of a step uses the GPU: samples over windows, solved for the phases' means.

A sample is a mean over a window of half a second, in which a step may have passed several phases, or several steps.
Where windows lie, and where phases do, is known; so each sample is an equation, *value = sum of (share of the window)
x (mean of the phase)*, and least squares over many of them gives the means. That they can be told apart at all, the
samples themselves must show: the interval comes from leaving out one stretch of the run after another (delete-a-block
jackknife, which no likeness of neighbouring samples deceives), and from shifting all windows against the steps, for
the two clocks are known to agree only so far. A mean that is left open too widely is not given.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from ft_insight import records as r

PARTS = {
    "data_wait": "data_wait",
    "forward": "forward",
    "loss": "loss",
    "recompute": "backward",  # it alternates with backward, layer by layer
    "backward": "backward",
    "clip": "optimizer",
    "optimizer": "optimizer",
}
ORDER = ("data_wait", "forward", "loss", "backward", "optimizer", "other", "evaluation", "saving", "outside")
SHIFT_S = 0.025
"""How far host and device time may be apart beyond what the log knows of it."""
MOST_WINDOWS = 2000
MOST_BLOCKS = 32
FEWEST_BLOCKS = 8
BLOCK = 4
"""Windows in a block, at first: two seconds."""
WIDEST = 10.0
"""Half of an interval, in percentage points, beyond which a mean is not given."""
LEAST_SHARE = 0.002
Z80 = 1.2816
DRIVER_WINDOW_S = 1.0
"""The longest time over which NVML's own utilisation is a mean; how long it is, the driver does not tell."""
MOST_PENDING = 4096
Key = TypeVar("Key", bound=Hashable)
Window = tuple[float, float]
Interval = tuple[float, float, str]
Estimate = tuple[float, float, float]
"""A mean in percent, and its 80% interval."""


class PhaseUse(msgspec.Struct, frozen=True):
    """One phase: its share of the sampled time, and what it used of the GPU in percent, by the field's name."""

    phase: str
    share: float
    means: Mapping[str, Estimate] = msgspec.field(default_factory=dict)
    reason: str | None = None
    """Why a mean is missing."""


def step_intervals(step: r.Step) -> Iterator[Interval]:
    """Lay a step out in time, on the log's clock: (begin, end, part of ``ORDER``).

    Micro-batches lie where they began, each with the step's own mix of forward, loss and backward; data is waited for
    before them, the optimizer comes after.
    """
    seconds: dict[str, float] = {}
    for name, s in step.phases_s.items():
        part = PARTS.get(name, "other")
        seconds[part] = seconds.get(part, 0.0) + s
    begin = step.t_s + (step.lag_s or 0.0)
    wait = seconds.get("data_wait", 0.0)
    computing = [seconds.get(part, 0.0) for part in ("forward", "loss", "backward")]
    blocks = [(m.begin_s, m.compute_s) for m in step.micro if m.begin_s is not None and m.compute_s is not None]
    if not blocks or len(blocks) < len(step.micro):
        blocks = [(wait, sum(computing))]
    at = begin + wait
    yield begin, at, "data_wait"
    for offset, length in blocks:
        yield at, begin + offset, "other"
        at = begin + offset
        for part, s in zip(("forward", "loss", "backward"), computing, strict=True):
            end = at + length * (s / sum(computing) if sum(computing) else 0.0)
            yield at, end, part
            at = end
    optimizer = at if step.optimizer_begin_s is None else max(at, begin + step.optimizer_begin_s)
    yield at, optimizer, "other"
    end = optimizer + seconds.get("optimizer", 0.0)
    yield optimizer, end, "optimizer"
    yield end, begin + sum(seconds.values()), "other"


def shares_of(window: Window, intervals: Sequence[Interval]) -> dict[str, float]:
    """Return what share of a window each part has; what lies in no interval is ``outside``."""
    begin, end = window
    shares: dict[str, float] = {}
    for a, b, part in intervals:
        inside = min(b, end) - max(a, begin)
        if inside > 0:
            shares[part] = shares.get(part, 0.0) + inside / (end - begin)
    rest = 1.0 - sum(shares.values())
    if rest > 1e-6:
        shares["outside"] = shares.get("outside", 0.0) + rest
    return shares


class GpuPhases:
    """Joins the samples of one run's GPUs to its steps, in constant memory."""

    def __init__(self) -> None:
        self._intervals: deque[Interval] = deque(maxlen=20_000)
        self._covered_s = -math.inf
        self._from_s = math.inf
        self._pending: deque[tuple[str, Window, dict[str, float], bool]] = deque(maxlen=MOST_PENDING)
        self._gpus: defaultdict[str, _Uses] = defaultdict(_Uses)

    def add_sample(self, t_s: float, sample: r.GpuSample) -> None:
        """Take a sample in; it is joined once the steps around it are known."""
        uses = self._gpus[sample.uuid]
        names = ("sm_percent", "tensor_percent", "dram_percent")
        # what a log says may be anything
        values = {name: v for name in names if (v := getattr(sample, name)) is not None and 0 <= v <= 100}
        if sample.window_s is not None and values:
            begin, end = sample.window_s
            if uses.is_new(sample.window_s) and begin < end <= t_s + 1.0:
                self._pending.append((sample.uuid, sample.window_s, values, False))
        elif sample.gpu_percent is not None and 0 <= sample.gpu_percent <= 100 and not uses.counted:
            window = (t_s - DRIVER_WINDOW_S, t_s)
            self._pending.append((sample.uuid, window, {"gpu_percent": sample.gpu_percent}, True))

    def add_step(self, step: r.Step) -> None:
        """Take a step in. Before the first sample there is nothing to be joined, and this costs nothing."""
        if not self._gpus:
            return
        intervals = [i for i in step_intervals(step) if i[1] > i[0]]
        self._intervals.extend(intervals)
        self._from_s = min(self._from_s, step.t_s)
        self._covered_s = max([self._covered_s, *(end for _, end, _ in intervals)])
        self._join()

    def add_span(self, span: r.Span) -> None:
        """Take in what is outside of steps."""
        if self._gpus and span.kind in ORDER:
            self._intervals.append((span.t_s, span.t_s + span.wall_s, span.kind))

    def _join(self) -> None:
        while self._pending and self._pending[0][1][1] + SHIFT_S <= self._covered_s:
            uuid, (begin, end), values, pure = self._pending.popleft()
            while len(self._intervals) > 1 and self._intervals[0][1] < begin - DRIVER_WINDOW_S:
                self._intervals.popleft()
            uses = self._gpus[uuid]
            if begin - SHIFT_S < self._from_s or (pure and uses.counted):
                continue
            weight = uses.next_weight()
            if not weight:
                continue
            near = [i for i in self._intervals if i[1] > begin - SHIFT_S and i[0] < end + SHIFT_S]
            shares = [shares_of((begin + s, end + s), near) for s in (-SHIFT_S, 0.0, SHIFT_S)]
            if not pure or all(len(found) == 1 for found in shares):
                uses.add(shares, values, weight)
            else:
                uses.mixed += 1

    def uses(self, uuid: str, *, final: bool) -> tuple[tuple[PhaseUse, ...], str | None]:
        """Return what is known by phase, and why nothing is; ``final`` leaves no sample out."""
        found = self._gpus.get(uuid)
        return found.told(final=final) if found is not None else ((), None)


class _Uses:
    """One GPU's equations: by field, and by shift of the windows."""

    def __init__(self) -> None:
        self.counted = False
        """Its counters have windows that are known."""
        self.mixed = 0
        """Windows of unknown length that more than one phase may have a share in."""
        self._seen: Window | None = None
        self._sums: dict[str, list[_Blocks]] = {}
        self._count = 0
        self._windows = 0
        self._stride = 1
        self._told: tuple[int, tuple[tuple[PhaseUse, ...], str | None]] = (-1, ((), None))

    def is_new(self, window: Window) -> bool:
        if not self.counted:
            self.counted = True
            self._sums.clear()
            self._windows, self._stride = 0, 1
        new, self._seen = window != self._seen, window
        return new

    def next_weight(self) -> int:
        """Return for how many windows the next one stands, 0 where another does: a long run costs as a short one."""
        self._windows += 1
        weight = 0 if self._windows % self._stride else self._stride
        if self._windows >= MOST_WINDOWS * self._stride:
            self._stride *= 2
        return weight

    def add(self, shares: Sequence[Mapping[str, float]], values: Mapping[str, float], weight: int) -> None:
        self._count += 1
        for name, value in values.items():
            blocks = self._sums.setdefault(name, [_Blocks() for _ in shares])
            for sums, shifted in zip(blocks, shares, strict=True):
                sums.add(shifted, value, weight)

    def told(self, *, final: bool) -> tuple[tuple[PhaseUse, ...], str | None]:
        count, answer = self._told
        if self._count > count * (1.0 if final else 1.2) or count < 0:
            answer = self._solve()
            self._told = (self._count, answer)
        return answer

    def _solve(self) -> tuple[tuple[PhaseUse, ...], str | None]:
        if not self._sums:
            return (), "no phase lasts for longer than the driver may average over (1 s)" if self.mixed else None
        by_field: dict[str, dict[str, Estimate | str]] = {}
        for name, blocks in self._sums.items():
            found = _estimates(blocks)
            if isinstance(found, str):
                return (), found
            by_field[name] = found
        lead = next(iter(self._sums.values()))[1]
        uses = []
        for part, share in lead.shares():
            told = {name: found[part] for name, found in by_field.items() if part in found}
            means = {name: e for name, e in told.items() if not isinstance(e, str)}
            uses.append(PhaseUse(part, share, means, next((e for e in told.values() if isinstance(e, str)), None)))
        return tuple(uses), None


class _Blocks:
    """Sums of one field's equations, in at most ``MOST_BLOCKS`` stretches of the run of like length."""

    def __init__(self) -> None:
        self.blocks: list[_Sums] = []
        self._size = BLOCK

    def add(self, shares: Mapping[str, float], value: float, weight: int) -> None:
        if not self.blocks or self.blocks[-1].count >= self._size:
            if len(self.blocks) == MOST_BLOCKS:
                self.blocks = [a.plus(b) for a, b in zip(self.blocks[::2], self.blocks[1::2], strict=True)]
                self._size *= 2
            self.blocks.append(_Sums())
        self.blocks[-1].add(shares, value, weight)

    def total(self) -> _Sums:
        total = _Sums()
        for block in self.blocks:
            total = total.plus(block)
        return total

    def shares(self) -> list[tuple[str, float]]:
        total = self.total()
        return [(part, total.time[part] / total.weight) for part in ORDER if part in total.time]


class _Sums:
    """Normal equations: products of shares, and of shares with the value."""

    def __init__(self) -> None:
        self.count = 0
        self.weight = 0.0
        self.time: dict[str, float] = {}
        self.products: dict[tuple[str, str], float] = {}
        self.values: dict[str, float] = {}

    def add(self, shares: Mapping[str, float], value: float, weight: int) -> None:
        self.count += 1
        self.weight += weight
        for part, share in shares.items():
            self.time[part] = self.time.get(part, 0.0) + weight * share
            self.values[part] = self.values.get(part, 0.0) + weight * share * value
            for other, second in shares.items():
                key = (part, other)
                self.products[key] = self.products.get(key, 0.0) + weight * share * second

    def plus(self, other: _Sums, sign: float = 1.0) -> _Sums:
        both = _Sums()
        both.count = self.count + int(sign) * other.count
        both.weight = self.weight + sign * other.weight
        both.time = _added(self.time, other.time, sign)
        both.products = _added(self.products, other.products, sign)
        both.values = _added(self.values, other.values, sign)
        return both

    def solve(self, parts: Sequence[str]) -> list[float]:
        """Return the means by least squares."""
        return _solved(self._matrix(parts), [self.values.get(part, 0.0) for part in parts])

    def told_apart(self, parts: Sequence[str]) -> list[bool]:
        """Tell of each part whether its shares are anything but a fixed mix of the others'.

        What is left of a part's squared shares, once the others have explained what they can, is one over its
        element of the inverse's diagonal.
        """
        matrix = self._matrix(parts)
        apart = []
        for i in range(len(parts)):
            column = _solved(matrix, [float(i == k) for k in range(len(parts))])
            apart.append(1.0 / column[i] > 1e-4 * matrix[i][i])
        return apart

    def _matrix(self, parts: Sequence[str]) -> list[list[float]]:
        matrix = [[self.products.get((a, b), 0.0) for b in parts] for a in parts]
        for i, row in enumerate(matrix):
            # so little that it decides nothing but what the samples leave open altogether
            row[i] = row[i] * (1 + 1e-7) + 1e-12
        return matrix


def _added(one: Mapping[Key, float], other: Mapping[Key, float], sign: float) -> dict[Key, float]:
    return {key: one.get(key, 0.0) + sign * other.get(key, 0.0) for key in {**one, **other}}


def _solved(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Solve symmetric positive equations by elimination."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (rows[i][size] - sum(rows[i][k] * found[k] for k in range(i + 1, size))) / rows[i][i]
    return found


def _estimates(shifted: Sequence[_Blocks]) -> dict[str, Estimate | str] | str:
    """Return each part's mean or why there is none; one reason where that goes for all."""
    if len(shifted[1].blocks) < FEWEST_BLOCKS + 1:
        return "too few samples yet"
    total = shifted[1].total()
    parts = [p for p in ORDER if total.time.get(p, 0.0) > LEAST_SHARE * total.weight]
    found = [_with_errors(blocks, parts) for blocks in shifted]
    apart = total.told_apart(parts)
    told: dict[str, Estimate | str] = {}
    for i, part in enumerate(parts):
        columns = [f[i] for f in found]
        if not apart[i]:
            told[part] = "no sample tells it from the phases around it"
            continue
        low = max(0.0, min(mean - error for mean, error in columns))
        high = min(100.0, max(mean + error for mean, error in columns))
        mean = min(100.0, max(0.0, columns[1][0]))
        # a mean beyond 0 or 100 is the nearer end; its interval reaches as far inwards as the error says
        low, high = min(low, mean), max(high, mean)
        wide = high - low > 2 * WIDEST
        told[part] = f"open between {low:.0f}% and {high:.0f}%" if wide else (mean, low, high)
    told.update({part: "takes too little time" for part in ORDER if part in total.time and part not in parts})
    return told


def _with_errors(blocks: _Blocks, parts: Sequence[str]) -> list[tuple[float, float]]:
    """Return (mean, half of its 80% interval) of each part, by leaving out one block after another."""
    total = blocks.total()
    means = total.solve(parts)
    without = [total.plus(block, -1.0).solve(parts) for block in blocks.blocks]
    count = len(without)
    # Student's t from the normal quantile, to the first order in 1/(degrees of freedom)
    quantile = Z80 * (1 + (Z80**2 + 1) / (4 * (count - 1)))
    found = []
    for i, mean in enumerate(means):
        left = [w[i] for w in without]
        middle = sum(left) / count
        variance = (count - 1) / count * sum((x - middle) ** 2 for x in left)
        found.append((mean, quantile * math.sqrt(variance)))
    return found
