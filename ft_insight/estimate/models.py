"""Candidate forms of step time against batch, density, sequence length and accumulation, for fits over several runs.

Two families. The additive ones have a fixed time ``h`` and a load ``u = (c0 + c1 density + c2 length) x work``, and
differ in how the two overlap. The logarithmic ones are equation (2) of "Understanding the Performance and Estimating
the Cost of LLM Fine-Tuning": as it is printed, and as the code of its artifact (stsxxx/finetune at 728a01b) has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
TINY = 1e-12
"""Share of the quickest time that stands for zero, so that logarithms exist."""
DISTINCT = 0.3
"""Share of a column's spread that the columns before it must leave unexplained for its effect to be told."""


class Point(msgspec.Struct, frozen=True):
    """One measured time: ``seconds`` of an optimizer step of ``accumulation`` micro-batches of ``work`` each."""

    work: float
    """Queries or slots in a micro-batch; the same unit in all points of a fit."""
    seconds: float
    density: float = 1.0
    """Share of the experts that a token passes through; 1 in a model without experts."""
    length: float | None = None
    """Positions per query, where attention's growth with it is to be looked for."""
    accumulation: float = 1.0


class Design(msgspec.Struct, frozen=True, dict=True):
    """The points' columns, and the unknowns that they can tell apart."""

    work: Array
    seconds: Array
    density: Array
    length: Array
    accumulation: Array
    terms: tuple[str, ...]
    """Unknowns of the load: ``per_unit_s``, or ``dense_s`` and ``experts_s`` where densities differ, ``length_s``."""
    has_rest: bool

    @cached_property
    def floor_s(self) -> float:
        """A time that stands for zero."""
        return TINY * float(self.seconds.min())

    @classmethod
    def of(cls, points: Sequence[Point]) -> Design:
        """Lay out points; which effects get an unknown follows from what varies among them on its own."""
        columns = _columns(points)
        work, _, density, length, accumulation = columns
        terms: tuple[str, ...] = ("per_unit_s",)
        known = [work]
        if _adds(density, known):
            terms = ("dense_s", "experts_s")
            known.append(density)
        if _adds(length, known):
            terms = (*terms, "length_s")
            known.append(length)
        return cls(*columns, terms=terms, has_rest=_adds(accumulation, known))

    def at(self, points: Sequence[Point]) -> Design:
        """Lay out other points with the unknowns of this design."""
        return Design(*_columns(points), terms=self.terms, has_rest=self.has_rest)

    def load(self, per_term: Array) -> Array:
        """Return seconds of a micro-batch that grow with its work; ``per_term`` runs along ``terms``."""
        one = np.ones_like(self.work)
        column = {"dense_s": one, "per_unit_s": one, "experts_s": self.density, "length_s": self.length}
        columns = np.array([column[term] for term in self.terms])
        result: Array = per_term @ columns * self.work
        return result


def _columns(points: Sequence[Point]) -> tuple[Array, Array, Array, Array, Array]:
    rows = [(p.work, p.seconds, p.density, p.length or 0.0, p.accumulation) for p in points]
    work, seconds, density, length, accumulation = np.array(rows, dtype=float).T
    return work, seconds, density, length, accumulation


def _adds(column: Array, known: Sequence[Array]) -> bool:
    """Tell whether a column varies, and is not the others in disguise."""
    centred = column - column.mean()
    spread = float(np.linalg.norm(centred))
    if spread <= 1e-9 * max(1.0, float(np.linalg.norm(column))) or (column <= 0).any():
        return False
    base = np.column_stack([np.ones_like(column), *known])
    base = base / np.linalg.norm(base, axis=0)
    left = column - base @ np.linalg.lstsq(base, column, rcond=None)[0]
    return float(np.linalg.norm(left)) > DISTINCT * spread


class Form(msgspec.Struct, frozen=True):
    """One candidate: its name, its formula, and how its unknowns make seconds."""

    name: str
    formula: str
    family: str
    """``additive`` or ``logarithmic``."""
    law: Callable[..., Array]
    extra: tuple[str, ...] = ()
    spare: int = 0
    """Points beyond the number of unknowns before the form is tried. A kink or a pole between two points is seen by
    neither, so that forms which have one need more to be judged by."""

    def names(self, design: Design) -> tuple[str, ...]:
        """Return the names of the unknowns."""
        rest = ("rest_s",) if design.has_rest else ()
        if self.family == "logarithmic":
            return ("gain", "offset", *rest)
        return ("fixed_s", *design.terms, *self.extra, *rest)

    def seconds(self, unknowns: Array, design: Design) -> Array:
        """Return the time of a step at each point of the design."""
        rest = float(unknowns[-1]) if design.has_rest else 0.0
        count = len(design.terms)
        if self.family == "logarithmic":
            micro = self.law(unknowns[0], unknowns[1], design)
        else:
            micro = self.law(
                unknowns[0], design.load(unknowns[1 : 1 + count]), *unknowns[1 + count :][: len(self.extra)]
            )
        result: Array = np.maximum(design.accumulation * micro + rest, design.floor_s)
        return result

    def start(self, design: Design) -> Array:
        """Return unknowns to search from: most of the quickest step fixed, most of the quickest unit per unit."""
        micro = design.seconds / design.accumulation
        rest = [0.05 * float(micro.min())] if design.has_rest else []
        if self.family == "logarithmic":
            rate = design.work / micro
            return np.array([np.ptp(rate) or rate.min(), rate.min(), *rest])
        if self.extra:
            line = _line(design, micro)
            return np.array([float(micro.min()), *line[1:], line[0], *rest])
        fixed, per_unit = 0.8 * float(micro.min()), 0.8 * float((micro / design.work).min())
        shares = {
            "per_unit_s": 1.0,
            "dense_s": 0.3,
            "experts_s": 0.7,
            "length_s": 0.1 / max(1.0, float(design.length.max())),
        }
        terms = [per_unit * shares[term] for term in design.terms]
        return np.array([fixed, *terms, *rest])


def _line(design: Design, micro: Array) -> Array:
    """Fit the affine law by least squares in relative error: a start from which a kink is found."""
    units = np.eye(len(design.terms))
    columns = np.column_stack([np.ones_like(micro), *(design.load(unit) for unit in units)])
    found = np.linalg.lstsq(columns / micro[:, None], np.ones_like(micro), rcond=None)[0]
    result: Array = np.maximum(found, 1e-3 * np.abs(found).max() / np.abs(columns).max(axis=0))
    return result


def p_norm(n: float) -> Callable[..., Array]:
    """Return the law ``(h^n + u^n)^(1/n)``; 1 adds the two up, 2 is a hyperbola, infinity their maximum."""

    def law(fixed: float, load: Array) -> Array:
        result: Array = (fixed**n + load**n) ** (1 / n)
        return result

    return law


def _saturation(fixed: float, load: Array) -> Array:
    """Throughput ``q (1 - exp(-x/k))``: the time is ``u / (1 - exp(-u/h))``, ``h`` at no load and ``u`` at much."""
    ratio = np.clip(load / max(fixed, 1e-300), 1e-12, 700.0)
    result: Array = load / -np.expm1(-ratio)
    return result


def _knee(fixed: float, load: Array, base: float) -> Array:
    """``max(h, a + u)``: flat until the device is full, then a line."""
    result: Array = np.maximum(fixed, base + load)
    return result


def _printed(gain: float, offset: float, design: Design) -> Array:
    return _by_rate(gain * np.log(design.work / design.density) + offset, design)


def _coded(gain: float, offset: float, design: Design) -> Array:
    return _by_rate(gain * np.log(design.work) / design.density + offset, design)


def _by_rate(rate: Array, design: Design) -> Array:
    """Seconds of the work at a rate; a rate at or below zero is no rate, and stands for an endless step."""
    result: Array = design.work / np.maximum(rate, 1e-9)
    return result


FORMS = (
    Form("hyperbola", "sqrt(h^2 + u^2)", "additive", p_norm(2.0)),
    Form("p-norm 1.5", "(h^1.5 + u^1.5)^(1/1.5)", "additive", p_norm(1.5)),
    Form("affine", "h + u", "additive", p_norm(1.0)),
    Form("saturation", "u / (1 - exp(-u/h))", "additive", _saturation),
    Form("knee", "max(h, a + u)", "additive", _knee, ("base_s",), spare=4),
    Form("eq. (2) printed", "b / (C2 log(b/s) + C4)", "logarithmic", _printed, spare=4),
    Form("eq. (2) coded", "b / (C2 log(b)/s + C4)", "logarithmic", _coded, spare=4),
)
"""In the order of preference when two do equally well. C3 of equation (2) cannot be told apart from C4 as printed
and from C2 as coded, and is left out."""
