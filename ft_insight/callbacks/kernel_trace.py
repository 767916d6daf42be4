"""Reading a chrome trace of torch's profiler: the tree of operators, who made whose gradient, and the kernels.

Only what the trace states is used: ranges nest by thread and time, a backward operator names its forward operator
by sequence number and thread, and a kernel names its launch by correlation.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

EVALUATE = "autograd::engine::evaluate_function: "
LAUNCHES = ("cuda_runtime", "cuda_driver")
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
RANGES = ("cpu_op", "user_annotation", "python_function")


@dataclass(slots=True, eq=False)
class Op:
    """A range on a host thread, in microseconds; ``seq`` is its autograd sequence number."""

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
    pass_name: str = "outside"
    counted: bool = False
    flops: float | None = None
    bytes: float | None = None
    cost_below: bool = False

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
    bytes: float | None
    device: Any = 0


@dataclass(slots=True)
class Trace:
    """All of a trace that matters here."""

    ops: list[Op] = field(default_factory=list)
    """By thread, then by beginning; what contains comes before what it contains."""
    kernels: list[Kernel] = field(default_factory=list)
    begin: float = 0.0
    end: float = 0.0


def read_trace(text: bytes) -> Trace:
    """Read a trace; ``ValueError`` if it is none."""
    events = _decode(text).get("traceEvents")
    if not isinstance(events, list):
        raise ValueError("not a trace: it has no traceEvents")
    trace = Trace()
    complete = [e for e in events if e.get("ph") == "X" and "dur" in e]
    trace.ops = _tree([e for e in complete if e.get("cat") in RANGES and not str(e["name"]).startswith("ProfilerStep")])
    _link(trace.ops, events)
    _read_kernels(trace, complete)
    spans = [(o.begin, o.end) for o in trace.ops] + [(k.begin, k.end) for k in trace.kernels]
    trace.begin = min((b for b, _ in spans), default=0.0)
    trace.end = max((e for _, e in spans), default=0.0)
    return trace


def _decode(text: bytes) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # the profiler writes infinite figures, and bytes of foreign names, as they come
        plain = re.sub(r"(?<=[:\s\[])-?(inf|nan)\b", "null", text.decode("utf-8", errors="replace"))
        decoded = json.loads(plain, strict=False)
    if not isinstance(decoded, dict):
        raise ValueError("not a trace: it is no object")
    return decoded


def _tree(events: list[dict[str, Any]]) -> list[Op]:
    by_thread: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        by_thread.setdefault((event.get("pid"), event.get("tid")), []).append(event)
    ops: list[Op] = []
    for thread, own in by_thread.items():
        own.sort(key=lambda e: (float(e["ts"]), -float(e["dur"])))
        ops += _nest(thread, own)
    return ops


def _nest(thread: Any, events: list[dict[str, Any]]) -> list[Op]:
    ops: list[Op] = []
    stack: list[Op] = []
    for event in events:
        begin = float(event["ts"])
        while stack and stack[-1].end <= begin:
            stack.pop()
        parent = stack[-1] if stack else None
        # ranges of one thread nest; what sticks out does so by rounding
        end = begin + float(event["dur"])
        end = min(end, parent.end) if parent else end
        args = event.get("args") or {}
        op = Op(
            name=str(event["name"]),
            begin=begin,
            end=end,
            tid=thread,
            parent=parent,
            annotation=event.get("cat") != "cpu_op",
            seq=args.get("Sequence number"),
            forward_thread=int(args.get("Fwd thread id") or 0),
            dims=args.get("Input Dims") or (),
            types=args.get("Input type") or (),
        )
        if parent is not None:
            parent.children_us += end - begin
        ops.append(op)
        stack.append(op)
    return ops


def _link(ops: list[Op], events: list[dict[str, Any]]) -> None:
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
        assert op.seq is not None  # noqa: S101 - filtered above
        known = threads.get(op.forward_thread)
        candidates = [known] if known is not None else tids
        found = [makers[tid, op.seq] for tid in candidates if (tid, op.seq) in makers]
        op.forward_op = next((maker for maker in found if maker.begin < op.begin), None)


def _forward_threads(events: list[dict[str, Any]], backward: list[Op]) -> dict[int, Any]:
    """Tell which thread of the trace each of the profiler's own thread numbers is, by the arrows of the trace."""
    begins: dict[Any, Any] = {}
    arrows = [e for e in events if e.get("cat") == "fwdbwd"]
    for arrow in arrows:
        if arrow.get("ph") == "s":
            begins[arrow.get("id")] = arrow.get("pid"), arrow.get("tid")
    at = {(op.tid, op.begin): op.forward_thread for op in backward}
    votes: dict[int, Counter[Any]] = {}
    for arrow in arrows:
        number = at.get(((arrow.get("pid"), arrow.get("tid")), float(arrow.get("ts", 0))))
        if arrow.get("ph") == "f" and number is not None and arrow.get("id") in begins:
            votes.setdefault(number, Counter())[begins[arrow.get("id")]] += 1
    return {number: counter.most_common(1)[0][0] for number, counter in votes.items()}


def _read_kernels(trace: Trace, events: list[dict[str, Any]]) -> None:
    launches: dict[Any, dict[str, Any]] = {}
    for event in events:
        if event.get("cat") in LAUNCHES:
            launches.setdefault((event.get("args") or {}).get("correlation"), event)
    finder = _Finder(trace.ops)
    for event in events:
        if event.get("cat") not in DEVICE_WORK:
            continue
        args = event.get("args") or {}
        launch = launches.get(args.get("correlation"))
        begin = float(event["ts"])
        trace.kernels.append(
            Kernel(
                name=str(event["name"]),
                category=str(event["cat"]),
                begin=begin,
                end=begin + float(event["dur"]),
                op=None
                if launch is None
                else finder.innermost((launch.get("pid"), launch.get("tid")), float(launch["ts"])),
                occupancy=_number(args.get("est. achieved occupancy %")),
                blocks_per_sm=_number(args.get("blocks per SM")),
                bytes=_number(args.get("bytes")),
                device=args.get("device", 0),
            )
        )


def _number(value: Any) -> float | None:
    """Return a finite number, or None: the profiler writes ``"inf"`` where a card does not tell its size."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if abs(number) != float("inf") and number == number else None


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
