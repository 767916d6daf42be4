"""The step-time model of several runs, as a formula with its unknowns and their intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_insight.units import interval, share, significant

if TYPE_CHECKING:
    from ft_insight.estimate.joint import Joint

TERMS = {
    "per_unit_s": (1e3, ""),
    "dense_s": (1e3, ""),
    "experts_s": (1e3, "·density"),
    "length_s": (1e6, "·klength"),
}
"""Parts of the load: what makes seconds a slot into seconds a thousand, and what they are multiplied by."""


def joint_lines(joint: Joint) -> tuple[str, ...]:
    """Return the formula with its left-out error, and what its letters stand for, with 95% intervals."""
    best = joint.best
    law = f"T = {best.form.formula} s a micro-batch, ±{share(best.error)}"
    terms = [f"{_told(joint, name, TERMS[name][0])}{TERMS[name][1]}" for name in best.names if name in TERMS]
    if not terms:  # equation (2) has no load
        return (law, "; ".join(f"{name} = {_told(joint, name)}" for name in best.names))
    others = [name for name in best.names if name not in ("fixed_s", *TERMS)]
    said = [f"h = {_told(joint, 'fixed_s')} s", *(f"{_letter(name)} = {_told(joint, name)} s" for name in others)]
    return law, "; ".join([*said, f"u = ({' + '.join(terms)})·kslots"])


def _letter(name: str) -> str:
    return "a" if name == "base_s" else name.removesuffix("_s")


def _told(joint: Joint, name: str, scale: float = 1.0) -> str:
    low, high = joint.interval(name)
    return f"{significant(joint.unknowns[name] * scale)} {interval(low * scale, high * scale)}"
