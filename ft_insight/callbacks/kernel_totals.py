"""Adding up a trace whose operators have roles: time, calls, occupancy, and what of the card's peak was used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ft_insight import records as r
from ft_insight.callbacks.kernel_costs import is_half
from ft_insight.callbacks.kernel_names import class_of
from ft_insight.callbacks.kernel_roles import role_of
from ft_insight.callbacks.kernel_scopes import PREFIX, Scope
from ft_insight.callbacks.kernel_trace import Kernel, Op, Trace
from ft_insight.catalog import Gpu

if TYPE_CHECKING:
    from ft_insight.callbacks.kernels import KernelTrace

MAX_NAMES = 300
"""Kernels that a record names: those that took longest."""

_BYTES_UNKNOWN = frozenset(
    {"gather_scatter", "embedding", "copy", "view", "optimizer", "mamba_scan", "dequantise", "communication", "other"}
)
"""Roles of whose operators too many move what their shapes do not tell."""

Key = tuple[str, str, str]


@dataclass
class _Sum:
    us: float = 0.0
    calls: int = 0
    flops: float | None = None
    bytes: float | None = None
    ideal_s: float | None = None
    occupancy: list[tuple[float, float]] = field(default_factory=list)
    blocks: list[tuple[float, float]] = field(default_factory=list)

    def cost(self, op: Op, gpu: Gpu | None, tf32: bool) -> None:
        if op.flops is not None:
            self.flops = (self.flops or 0.0) + op.flops
            peak = _peak_tflops(op, gpu, tf32)
            if peak:
                self.ideal_s = (self.ideal_s or 0.0) + op.flops / (peak * 1e12)
        if op.bytes is not None:
            self.bytes = (self.bytes or 0.0) + op.bytes


def _peak_tflops(op: Op, gpu: Gpu | None, tf32: bool) -> float | None:
    if gpu is None:
        return None
    if is_half(op):
        return gpu.matmul_tflops
    return gpu.tf32_tflops if tf32 and gpu.tf32_tflops else gpu.fp32_tflops


def total(trace: Trace, source: KernelTrace, gpu: Gpu | None) -> r.Kernels:
    """Make the record of a window."""
    on_device = bool(trace.kernels)
    sums: dict[Key, _Sum] = {}
    names: dict[tuple[str, Key, str | None], list[float]] = {}
    if on_device:
        charged: set[int] = set()
        for kernel in trace.kernels:
            key = key_of(kernel)
            _add_kernel(sums.setdefault(key, _Sum()), kernel)
            entry = names.setdefault((kernel.name, key, kernel.grid), [0.0, 0])
            entry[0] += kernel.end - kernel.begin
            entry[1] += 1
            if kernel.op is not None:
                _charge_once(sums[key], kernel, charged, gpu, source.tf32)
    else:
        for op in _computing(trace.ops):
            own = sums.setdefault((op.kind, op.role, op.phase), _Sum())
            own.us += op.self_us
            own.calls += op.counted
            own.cost(op, gpu, source.tf32)
    busy_us = _union(trace.kernels) if on_device else sum(s.us for s in sums.values())
    window_us = trace.end - trace.begin
    whole = sum(s.us for s in sums.values())
    return r.Kernels(
        step=source.step,
        t_s=source.t_s,
        clock="cuda" if on_device else "host",
        window_s=_seconds(window_us),
        busy_s=_seconds(busy_us),
        idle_s=_seconds(max(window_us - busy_us, 0.0)) if on_device else None,
        roles=tuple(_role(key, own, whole, gpu) for key, own in sorted(sums.items(), key=lambda i: -i[1].us)),
        names=tuple(
            r.KernelName(name, *key, _seconds(us), int(calls), grid)
            for (name, key, grid), (us, calls) in sorted(names.items(), key=lambda i: -i[1][0])[:MAX_NAMES]
        ),
        trace=None if source.path is None else source.path.name,
    )


def key_of(kernel: Kernel) -> Key:
    """Return kind, role and pass of a kernel: its operator's, unless its own name tells better."""
    op = kernel.op
    kind, role, phase = ("outside", "other", "outside") if op is None else (op.kind, op.role, op.phase)
    if kernel.category == "gpu_memcpy":
        return kind, "copy", phase
    cls = class_of(kernel.name)
    if cls in ("dequantise", "communication"):
        return kind, cls, phase
    if kind == "mamba" and cls in ("conv", "scan", "matmul") and role in ("mamba_scan", "other"):
        return kind, {"conv": "mamba_convolution", "scan": "mamba_scan", "matmul": "mamba_matmul"}[cls], phase
    # launched by no operator, as Triton's are: the scope tells where, the kernel's name what
    if op is not None and cls and (role == "other" or (op.annotation and cls != "matmul")):
        return kind, role_of(op, cls, Scope(kind)), phase
    return kind, role, phase


def _add_kernel(own: _Sum, kernel: Kernel) -> None:
    us = kernel.end - kernel.begin
    own.us += us
    own.calls += 1
    if kernel.occupancy is not None:
        own.occupancy.append((kernel.occupancy, us))
    if kernel.blocks_per_sm is not None:
        own.blocks.append((kernel.blocks_per_sm, us))


def _charge_once(own: _Sum, kernel: Kernel, charged: set[int], gpu: Gpu | None, tf32: bool) -> None:
    """Charge what the operator of a kernel costs, to the first of its kernels."""
    op = kernel.op
    while op is not None and op.flops is None and op.bytes is None and op.parent is not None:
        if op.name.startswith(PREFIX) or op.parent.annotation:
            break
        op = op.parent
    if op is not None and id(op) not in charged:
        charged.add(id(op))
        own.cost(op, gpu, tf32)


def _computing(ops: list[Op]) -> Iterator[Op]:
    return (o for o in ops if not (o.annotation or o.hosts or o.name.startswith((PREFIX, "Optimizer."))))


def _union(kernels: list[Kernel]) -> float:
    """Return the microseconds in which at least one kernel ran."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted((k.begin, k.end) for k in kernels):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def _role(key: Key, own: _Sum, whole_us: float, gpu: Gpu | None) -> r.KernelRole:
    kind, role, pass_name = key
    seconds = own.us / 1e6
    moved = None if role in _BYTES_UNKNOWN else own.bytes
    bandwidth = None
    if gpu is not None and moved is not None and seconds > 0:
        bandwidth = round(moved / seconds / (gpu.bandwidth_gbs * 1e9), 5)
    return r.KernelRole(
        kind=kind,
        role=role,
        pass_name=pass_name,
        seconds=_seconds(own.us),
        share=round(own.us / whole_us, 5) if whole_us else 0.0,
        calls=own.calls,
        flops=own.flops,
        bytes=moved,
        theoretical_occupancy_percent=_weighted(own.occupancy),
        blocks_per_sm=_weighted(own.blocks),
        flops_share=round(own.ideal_s / seconds, 5) if own.ideal_s is not None and seconds > 0 else None,
        bandwidth_share=bandwidth,
    )


def _weighted(values: list[tuple[float, float]]) -> float | None:
    weight = sum(us for _, us in values)
    return round(sum(value * us for value, us in values) / weight, 3) if weight else None


def _seconds(us: float) -> float:
    return round(us / 1e6, 9)
