"""The paper's Tables III and IV and Figures 13 to 15: as published, by its equations, and by ft-insight.

    python examples/paper/reproduce.py [--figures FOLDER]

Prints, for each, what was published, what the printed equation gives, what it gives as its own figures need it, and
what ft-insight says, with errors; and writes the figures as SVG. Everything is computed from ``measurements.json``
beside this file, the measured figures of the paper's artifact (stsxxx/finetune at 728a01b, MIT).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # svg.py

from svg import Series, chart  # isort: skip

from ft_insight.estimate.joint import Joint, fit_joint
from ft_insight.estimate.models import Point
from ft_insight.estimate.paper import (
    LONGEST_LENGTH,
    MEDIAN_LENGTH,
    NEEDED,
    PRINTED,
    cost_usd,
    fit_eq2,
    max_batch,
    one_line_meets,
    raw_max_batch,
)
from ft_insight.estimate.step_time import NotIdentifiable

HERE = Path(__file__).parent
DENSITY = {"dense": 1.0, "sparse": 0.25}
"""Share of the experts that are active: all, or 2 of 8."""


@dataclass(frozen=True)
class Measured:
    """One throughput series: queries per second against batch, dense and sparse together."""

    name: str
    batch: tuple[int, ...]
    density: tuple[float, ...]
    throughput: tuple[float, ...]
    published_rmse: float

    @property
    def points(self) -> list[Point]:
        """As step times."""
        rows = zip(self.batch, self.density, self.throughput, strict=True)
        return [Point(b, b / q, density=s) for b, s, q in rows]


@dataclass(frozen=True)
class LeftOut:
    """Points of a series, each predicted from all others."""

    errors: tuple[float, ...]
    held: tuple[bool, ...]
    skipped: int
    """Points without which nothing is known of their density."""

    @property
    def mean(self) -> float:
        """Mean absolute relative error."""
        return sum(self.errors) / len(self.errors)


def load() -> dict[str, Any]:
    """Return the artifact's figures."""
    found: dict[str, Any] = json.loads((HERE / "measurements.json").read_text())
    return found


def series_of(data: dict[str, Any]) -> list[Measured]:
    """Return the seven throughput series."""
    found = []
    for name, kinds in data["throughput_qps"].items():
        rows = [(int(b), DENSITY[kind], q) for kind in DENSITY for b, q in kinds[kind].items()]
        batch, density, throughput = zip(*rows, strict=True)
        found.append(Measured(name, batch, density, throughput, kinds["published_rmse"]))
    return found


def told(points: Sequence[Point]) -> Joint:
    """Return the fitted model; every series here has one."""
    model = fit_joint(points)
    if isinstance(model, NotIdentifiable):
        raise SystemExit(model.reason)
    return model


def left_out(measured: Measured) -> LeftOut:
    """Predict each point from a model that is fitted, and chosen, without it."""
    errors, held, skipped = [], [], 0
    points = measured.points
    for i, point in enumerate(points):
        model = told(points[:i] + points[i + 1 :])
        try:
            middle, low, high = model.predict(point.work, point.density)
        except ValueError:
            skipped += 1
            continue
        errors.append(abs(middle / point.seconds - 1))
        held.append(low <= point.seconds <= high)
    return LeftOut(tuple(errors), tuple(held), skipped)


def left_out_eq2(measured: Measured, *, coded: bool) -> float:
    """Return the mean leave-one-out error of equation (2), fitted in throughput as the artifact does."""
    rows = list(zip(measured.batch, measured.density, measured.throughput, strict=True))
    errors = []
    for i, (batch, density, throughput) in enumerate(rows):
        fit = fit_eq2(*zip(*rows[:i], *rows[i + 1 :], strict=True), coded=coded)
        errors.append(abs(fit.throughput(batch, density) / throughput - 1))
    return sum(errors) / len(errors)


def rmse(measured: Measured, seconds: Any) -> float:
    """Return the root mean square error in queries per second of predicted step times."""
    return float(np.sqrt(np.mean((np.array(measured.batch) / np.exp(seconds) - np.array(measured.throughput)) ** 2)))


def equation_1(data: dict[str, Any]) -> None:
    print("Equation (1), Table III: largest batch on an A40 (48 GB)")
    print(f"  {'':24}{'published':>10}{'reached by':>12}{'as printed':>12}{'as needed':>11}")
    print(f"  {'':24}{'':>10}{'its sweeps':>12}{'median row':>12}{'longest row':>11}")
    misses = []
    for model, sets in data["table_iii"].items():
        for data_set, cells in sets.items():
            reached = data["throughput_qps"][f"A40 {model}-{data_set}"]
            for kind, published in cells.items():
                swept = max(map(int, reached[kind]))
                printed = max_batch(PRINTED[model], 48, MEDIAN_LENGTH[data_set], DENSITY[kind])
                needed = max_batch(NEEDED[model], 48, LONGEST_LENGTH[data_set], DENSITY[kind])
                print(f"  {model + ' ' + data_set + ' ' + kind:24}{published:>10}{swept:>12}{printed:>12}{needed:>11}")
                if needed != published:
                    misses.append(f"{model} {data_set} {kind}: published {published}, its sweep and equation {needed}")
    print("  cells that the equation does not meet, for the paper's own sweeps went further:")
    print("".join(f"    {miss}\n" for miss in misses))


def figure_13(data: dict[str, Any], figures: Path) -> None:
    print("Figure 13: largest batch of sparse Mixtral by GPU memory (CS)")
    figure = {int(gb): value for kind in ("measured", "projected") for gb, value in data["figure_13"][kind].items()}
    raw = {gb: raw_max_batch(NEEDED["Mixtral"], gb, LONGEST_LENGTH["CS"], 0.25) for gb in figure}
    for gb, value in figure.items():
        kind = "measured" if str(gb) in data["figure_13"]["measured"] else "projected"
        whole = f"floor {math.floor(raw[gb])}, rounded {round(raw[gb])}"
        print(f"  {gb:>4} GB  {kind:9} {value:>3}   as needed {raw[gb]:5.1f}: {whole}")
    measured = {int(gb): value for gb, value in data["figure_13"]["measured"].items()}
    rows = {int(row["memory_gb"]): row["batch"] for row in data["table_iv"]["rows"]}
    swept = max(map(int, data["throughput_qps"]["A100-40 Mixtral"]["sparse"]))
    print(f"  printed as a floor, 28 at 100 GB is rounded: floor gives {math.floor(raw[100])}")
    print(f"  can any C0, C1 and model memory give {measured} together? {_yes(one_line_meets(measured))}")
    maxima = {40: swept, **rows}
    print(f"  or MATH's {maxima}, Table IV and the sweep at 40 GB? {_yes(one_line_meets(maxima))}\n")
    memory = list(range(24, 125, 4))
    drawn = [
        Series("measured", [(float(g), float(v)) for g, v in measured.items()], 0),
        Series("projected by the paper", [(float(g), float(v)) for g, v in figure.items() if g not in measured], 1),
        Series(
            "equation (1) as needed", [(g, raw_max_batch(NEEDED["Mixtral"], g, 512, 0.25)) for g in memory], 2, "line"
        ),
    ]
    (figures / "figure_13.svg").write_text(
        chart("Largest batch, sparse Mixtral, CS", "GPU memory, GB", "queries", drawn)
    )


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


def throughput(measured: Measured, figure: int, figures: Path) -> tuple[LeftOut, Joint]:
    model = told(measured.points)
    out = left_out(measured)
    columns = measured.batch, measured.density, measured.throughput
    printed, coded = (fit_eq2(*columns, coded=coded) for coded in (False, True))
    print(f"Figure {figure}: {measured.name}, {len(measured.batch)} points   RMSE in q/s, left-out error of each point")
    print(f"  {'eq. (2), the figure':22}{measured.published_rmse:>7.2f}  as published")
    for name, fit in (("as printed", printed), ("as coded", coded)):
        loo = left_out_eq2(measured, coded=fit.coded)
        print(f"  {'eq. (2) ' + name:22}{fit.rmse:>7.3f}{loo:>9.1%}  fitted in q/s")
    for each in model.fits:
        chosen = "  <- chosen" if each is model.best else ""
        value = rmse(measured, each.log_seconds(each.design))
        print(f"  {each.form.name:22}{value:>7.3f}{each.error:>9.1%}  T = {each.form.formula}{chosen}")
    value = rmse(measured, model.best.log_seconds(model.best.design))
    skipped = f", {out.skipped} not predictable without itself" if out.skipped else ""
    print(
        f"  {'ft-insight':22}{value:>7.3f}{out.mean:>9.1%}  form chosen anew for each point{skipped};"
        f" {sum(out.held)} of {len(out.held)} within 80%"
    )
    for name, figure_s in model.unknowns.items():
        low, high = model.interval(name)
        print(f"    {name} {figure_s:.3g} [{low:.3g}-{high:.3g}]")
    print()
    _draw(measured, model, coded, figure, figures)
    return out, model


def _draw(measured: Measured, model: Joint, coded: Any, figure: int, figures: Path) -> None:
    drawn = []
    for colour, (kind, density) in enumerate(DENSITY.items()):
        rows = zip(measured.batch, measured.density, measured.throughput, strict=True)
        points = [(float(b), q) for b, s, q in rows if s == density]
        grid = np.linspace(1, max(b for b, _ in points), 40)
        drawn += [
            Series(f"{kind}, measured", points, colour),
            Series("ft-insight", [(b, b / model.predict(b, density)[0]) for b in grid], colour, "line"),
            Series("eq. (2) as coded", [(b, max(0.0, coded.throughput(b, density))) for b in grid], colour, "dashed"),
        ]
    name = measured.name.lower().replace(" ", "_")
    text = chart(measured.name, "batch", "queries/s", drawn)
    (figures / f"figure_{figure}_{name}.svg").write_text(text)


def table_iv(data: dict[str, Any], by_name: dict[str, Measured]) -> None:
    table = data["table_iv"]
    queries, epochs = table["queries"], table["epochs"]
    print(f"Table IV: sparse Mixtral on MATH, {queries:,} queries x {epochs} epochs (the data set has 13,921 rows)")
    print("  GPU    batch   q/s measured   published      its arithmetic   ft-insight, from the other batches")
    for row in table["rows"]:
        measured = by_name[row["series"]]
        place = next(i for i, p in enumerate(measured.points) if p.work == row["batch"] and p.density == 0.25)
        rate = measured.throughput[place]
        model = told([p for i, p in enumerate(measured.points) if i != place])
        seconds = model.predict(row["batch"], 0.25)
        costs = [cost_usd(queries, epochs, row["batch"] / s, row["usd_per_hour"]) for s in seconds]
        again = cost_usd(queries, epochs, rate, row["usd_per_hour"])
        print(
            f"  {row['gpu']:7}{row['batch']:>5}{rate:>12.4f}{'$' + format(row['usd'], '.1f'):>15}"
            f"{'$' + format(again, '.2f'):>17}   ${costs[0]:.2f} [${costs[1]:.2f}-${costs[2]:.2f}]"
        )
    print("  the published dollars are measured throughput times price: they predict nothing\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--figures", type=Path, default=Path("paper_figures"), help="folder (default: %(default)s)")
    figures = parser.parse_args().figures
    figures.mkdir(parents=True, exist_ok=True)
    data = load()
    series = series_of(data)
    equation_1(data)
    figure_13(data, figures)
    found = {each.name: throughput(each, 14 if each.name.startswith("A40") else 15, figures) for each in series}
    means = [out.mean for out, _ in found.values()]
    held = [held for out, _ in found.values() for held in out.held]
    print(
        f"All series: mean left-out error {sum(means) / len(means):.1%} of {len(means)} series,"
        f" 80% intervals hold {sum(held) / len(held):.0%} of {len(held)} points\n"
    )
    table_iv(data, {each.name: each for each in series})
    print(f"figures: {figures}/")


if __name__ == "__main__":
    main()
