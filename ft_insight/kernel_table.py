"""Kernels by part and role, their passes side by side: what a report and a dashboard show of a recorded step."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ft_insight.records import KernelRole


class RoleTime(msgspec.Struct, frozen=True):
    """One role in one kind of part, all its passes. Percentages are means weighted by time."""

    kind: str
    role: str
    forward_s: float
    recompute_s: float
    backward_s: float
    other_s: float
    share: float
    calls: int
    tflops: float | None
    """Rate of the passes whose work is known, in TFLOP/s."""
    flops_share: float | None
    bandwidth_share: float | None
    theoretical_occupancy_percent: float | None
    sm_percent: float | None
    memory_percent: float | None


def by_role(roles: Sequence[KernelRole]) -> tuple[RoleTime, ...]:
    """Bring the passes of each role together, the longest role first."""
    groups: dict[tuple[str, str], list[KernelRole]] = {}
    for role in roles:
        groups.setdefault((role.kind, role.role), []).append(role)
    rows = (_row(kind, name, group) for (kind, name), group in groups.items())
    return tuple(sorted(rows, key=lambda row: -row.share))


def _row(kind: str, name: str, group: Sequence[KernelRole]) -> RoleTime:
    def seconds(*passes: str) -> float:
        return sum(role.seconds for role in group if role.pass_name in passes)

    counted = [role for role in group if role.flops]
    busy = sum(role.seconds for role in counted)
    return RoleTime(
        kind=kind,
        role=name,
        forward_s=seconds("forward"),
        recompute_s=seconds("recompute"),
        backward_s=seconds("backward"),
        other_s=seconds("optimizer", "outside"),
        share=sum(role.share for role in group),
        calls=sum(role.calls for role in group),
        tflops=sum(role.flops or 0.0 for role in counted) / busy / 1e12 if busy else None,
        flops_share=_mean(group, "flops_share"),
        bandwidth_share=_mean(group, "bandwidth_share"),
        theoretical_occupancy_percent=_mean(group, "theoretical_occupancy_percent"),
        sm_percent=_mean(group, "sm_percent"),
        memory_percent=_mean(group, "memory_percent"),
    )


def _mean(group: Sequence[KernelRole], field: str) -> float | None:
    known = [(role.seconds, getattr(role, field)) for role in group if getattr(role, field) is not None]
    weight = sum(seconds for seconds, _ in known)
    return sum(seconds * value for seconds, value in known) / weight if weight else None
