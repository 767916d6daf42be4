"""Reading a chrome trace of torch's profiler: the tree of operators, who made whose gradient, and the kernels.

Only what the trace states is used: ranges nest by thread and time, a backward operator names its forward operator
by sequence number and thread, and a kernel names its launch by correlation.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import msgspec

EVALUATE = "autograd::engine::evaluate_function: "
LAUNCHES = ("cuda_runtime", "cuda_driver")
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
RANGES = ("cpu_op", "user_annotation", "python_function")


class Op(msgspec.Struct, eq=False, gc=False):
    """A range on a host thread, in microseconds; ``seq`` is its autograd sequence number.

    There are a hundred thousand of them, which refer to earlier ones only: nothing for the garbage collector.
    """

    name: str
    begin: float
    end: float
    tid: Any
    parent: Op | None
    annotation: bool
    seq: int | None
    forward_thread: int
    dims: Any
    types: Any
    children_us: float = 0.0
    forward_op: Op | None = None
    kind: str = "outside"
    role: str = "other"
    phase: str = "outside"
    counted: bool = False
    flops: float | None = None
    bytes: float | None = None
    flops_below: bool = False
    bytes_below: bool = False
    hosts: bool = False
    """Forward code is run again within it: its own time is Python's."""

    @property
    def self_us(self) -> float:
        """Its time without what ran within it."""
        return max(self.end - self.begin - self.children_us, 0.0)


@dataclass(slots=True, eq=False)
class Kernel:
    """Something that a device did, and the operator that launched it, if it can be told."""

    name: str
    category: str
    begin: float
    end: float
    op: Op | None
    occupancy: float | None
    blocks_per_sm: float | None
    grid: str | None


@dataclass(slots=True)
class Trace:
    """All of a trace that matters here."""

    ops: list[Op] = field(default_factory=list)
    """By thread, then by beginning; what contains comes before what it contains."""
    kernels: list[Kernel] = field(default_factory=list)
    begin: float = 0.0
    end: float = 0.0


_NOTHING = msgspec.Raw(b"[]")


class _Args(msgspec.Struct, frozen=True, gc=False):
    """What is read of an event's arguments; strides and values, most of a trace, are passed over."""

    seq: Any = msgspec.field(default=None, name="Sequence number")
    forward_thread: Any = msgspec.field(default=0, name="Fwd thread id")
    dims: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input type")
    correlation: Any = None
    occupancy: Any = msgspec.field(default=None, name="est. achieved occupancy %")
    blocks_per_sm: Any = msgspec.field(default=None, name="blocks per SM")
    grid: Any = None


_NO_ARGS = _Args()


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    name: str = ""
    cat: str | None = None
    pid: Any = None
    tid: Any = None
    ts: float = 0.0
    dur: float | None = None
    id: Any = None
    args: _Args = _NO_ARGS

    @property
    def thread(self) -> Any:
        return self.pid, self.tid


class _File(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")


def read_trace(text: bytes) -> Trace:
    """Read a trace; ``ValueError`` if it is none."""
    events = _decode(text)
    trace = Trace()
    complete = [e for e in events if e.ph == "X" and e.dur is not None]
    trace.ops = _tree([e for e in complete if e.cat in RANGES and not e.name.startswith("ProfilerStep")])
    _link(trace.ops, events)
    _read_kernels(trace, complete)
    spans = [(o.begin, o.end) for o in trace.ops] + [(k.begin, k.end) for k in trace.kernels]
    trace.begin = min((b for b, _ in spans), default=0.0)
    trace.end = max((e for _, e in spans), default=0.0)
    return trace


_DECODER = msgspec.json.Decoder(_File)


def _decode(text: bytes) -> list[_Event]:
    try:
        return _DECODER.decode(text).events
    except (msgspec.MsgspecError, UnicodeDecodeError):
        # the profiler writes infinite figures, and bytes of foreign names, as they come
        plain = re.sub(
            r"(?<=[:\s\[])-?(inf(inity)?|nan)\b", "null", text.decode("utf-8", errors="replace"), flags=re.IGNORECASE
        )
    try:
        return _DECODER.decode(json.dumps(json.loads(plain, strict=False))).events
    except ValueError as error:
        raise ValueError(f"not a trace of torch's profiler: {error}".splitlines()[0]) from None


class _Shapes:
    """Parses shapes and types once each: of tens of thousands, a few hundred differ."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}

    def parse(self, raw: msgspec.Raw) -> Any:
        text = bytes(raw)
        if text not in self._known:
            self._known[text] = msgspec.json.decode(text)
        return self._known[text]


def _tree(events: list[_Event]) -> list[Op]:
    by_thread: dict[Any, list[_Event]] = {}
    for event in events:
        by_thread.setdefault(event.thread, []).append(event)
    ops: list[Op] = []
    shapes = _Shapes()
    for thread, own in by_thread.items():
        own.sort(key=lambda e: (e.ts, -(e.dur or 0.0)))
        ops += _nest(thread, own, shapes)
    return ops


def _nest(thread: Any, events: list[_Event], shapes: _Shapes) -> list[Op]:
    ops: list[Op] = []
    stack: list[Op] = []
    for event in events:
        begin = event.ts
        while stack and stack[-1].end <= begin:
            stack.pop()
        parent = stack[-1] if stack else None
        # ranges of one thread nest; what sticks out does so by rounding
        end = begin + (event.dur or 0.0)
        end = min(end, parent.end) if parent else end
        args = event.args
        op = Op(
            name=event.name,
            begin=begin,
            end=end,
            tid=thread,
            parent=parent,
            annotation=event.cat != "cpu_op" or event.name.startswith("CheckpointFunction"),
            seq=args.seq,
            forward_thread=int(args.forward_thread or 0),
            dims=shapes.parse(args.dims),
            types=shapes.parse(args.types),
        )
        if parent is not None:
            parent.children_us += end - begin
        ops.append(op)
        stack.append(op)
    return ops


def _link(ops: list[Op], events: list[_Event]) -> None:
    """Find the forward operator of each backward one: of those with its number, the last that began made the node."""
    makers: dict[tuple[Any, int], Op] = {}
    backward = []
    for op in ops:
        if op.seq is None:
            continue
        if op.name.startswith(EVALUATE):
            backward.append(op)
        elif op.forward_thread == 0:
            makers[op.tid, op.seq] = op
    threads = _forward_threads(events, backward)
    tids = list(dict.fromkeys(op.tid for op in ops))
    for op in backward:
        known = threads.get(op.forward_thread)
        candidates = [known] if known is not None else tids
        # writing into a slice makes two nodes at once, of which the second has the next number
        numbers = (op.seq, op.seq - 1) if "CopySlices" in op.name else (op.seq,)  # type: ignore[operator]
        found = [makers[key] for key in product(candidates, numbers) if key in makers]
        op.forward_op = next((maker for maker in found if maker.begin < op.begin), None)


def _forward_threads(events: list[_Event], backward: list[Op]) -> dict[int, Any]:
    """Tell which thread of the trace each of the profiler's own thread numbers is, by the arrows of the trace."""
    arrows = [e for e in events if e.cat == "fwdbwd"]
    begins = {arrow.id: arrow.thread for arrow in arrows if arrow.ph == "s"}
    at = {(op.tid, op.begin): op.forward_thread for op in backward}
    votes: dict[int, Counter[Any]] = {}
    for arrow in arrows:
        number = at.get((arrow.thread, arrow.ts))
        if arrow.ph == "f" and number is not None and arrow.id in begins:
            votes.setdefault(number, Counter())[begins[arrow.id]] += 1
    return {number: counter.most_common(1)[0][0] for number, counter in votes.items()}


def _read_kernels(trace: Trace, events: list[_Event]) -> None:
    launches: dict[Any, _Event] = {}
    for event in events:
        if event.cat in LAUNCHES:
            launches.setdefault(event.args.correlation, event)
    finder = _Finder(trace.ops)
    for event in events:
        if event.cat not in DEVICE_WORK:
            continue
        args = event.args
        launch = launches.get(args.correlation)
        trace.kernels.append(
            Kernel(
                name=event.name,
                category=event.cat,
                begin=event.ts,
                end=event.ts + (event.dur or 0.0),
                op=None if launch is None else finder.innermost(launch.thread, launch.ts),
                occupancy=_number(args.occupancy),
                blocks_per_sm=_number(args.blocks_per_sm),
                grid="x".join(map(str, args.grid)) if isinstance(args.grid, list) else None,
            )
        )


def _number(value: Any) -> float | None:
    """Return a finite number, or None: the profiler writes ``"inf"`` where a card does not tell its size."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


class _Finder:
    """Finds the innermost operator of a thread at a moment."""

    def __init__(self, ops: list[Op]) -> None:
        self._ops: dict[Any, list[Op]] = {}
        for op in ops:
            self._ops.setdefault(op.tid, []).append(op)
        self._begins = {tid: [op.begin for op in own] for tid, own in self._ops.items()}

    def innermost(self, thread: Any, moment: float) -> Op | None:
        begins = self._begins.get(thread)
        if not begins:
            return None
        position = bisect_right(begins, moment) - 1
        op: Op | None = self._ops[thread][position] if position >= 0 else None
        while op is not None and op.end < moment:
            op = op.parent
        return op
