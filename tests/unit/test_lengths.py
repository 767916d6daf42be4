"""Rows of other lengths than a run's, data that is waited for, and several runs: against laws that are planted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from makers import A40, header, log, micro, step, view

from ft_insight import records as r
from ft_insight.catalog import find_gpu
from ft_insight.cli import main
from ft_insight.estimate import Ask, measure, project
from ft_insight.estimate.measured import Measured
from ft_insight.estimate.work import attention_share
from ft_insight.estimate.workload import workload_of
from ft_insight.records import ProjectionRow
from ft_insight.run_view import RunView

HIDDEN, LAYERS = 4096, 32
PARAMETERS = 12 * HIDDEN**2 * LAYERS
DENSE: dict[str, Any] = {"kind": "llama", "parameters": PARAMETERS, "active_parameters": PARAMETERS, "hidden": HIDDEN}
FIXED_S, SLOT_S, REST_S = 0.2, 1e-4, 0.1
A100 = find_gpu("a100")


def run(law: Any, **said: Any) -> RunView:
    """Return the view of what :func:`records` says."""
    return view(records(law, **said))


def records(
    law: Any,
    batch: int = 4,
    lengths: tuple[int, int] = (256, 512),
    wait_s: float = 0.0,
    accumulation: int = 1,
    train: Any = (),
    model: Any = (),
    seed: int = 0,
) -> list[Any]:
    """60 steps of ``batch`` rows whose padded length is drawn between ``lengths``, taking what ``law(x, L)`` says."""
    rng = np.random.default_rng(seed)
    low, high = lengths
    items: list[Any] = [
        header(
            devices=(A40,),
            model={**DENSE, "layers": LAYERS, **dict(model)},
            train={"method": "full", "batch": batch, "accumulation": accumulation, **dict(train)},
            dataset={"queries": 1000, "length_values": lengths, "length_counts": (500, 500)},
        )
    ]
    at = 0.0
    for number in range(1, 61):
        drawn = [int(rng.integers(low, high + 1)) for _ in range(accumulation)]
        batches = tuple(micro(batch, batch * each, batch * each, compute_s=law(batch * each, each)) for each in drawn)
        computed = sum(m.compute_s or 0.0 for m in batches)
        wall = computed + REST_S + wait_s
        phases = {"data_wait": wait_s, "forward": computed / 3, "backward": computed * 2 / 3, "optimizer": REST_S}
        items.append(step(number, at, wall, phases_s={k: v for k, v in phases.items() if v}, micro=batches))
        at += wall
    return items


def attending(weight: float) -> Any:
    """A step of a full fine-tune whose attention takes ``weight`` times s/(6h): Narayanan et al. 2021, section 5.1."""

    def law(x: float, length: float) -> float:
        return FIXED_S + SLOT_S * x * (1 + weight * length / (6 * HIDDEN)) / (1 + weight * 400 / (6 * HIDDEN))

    return law


def flat(x: float, length: float) -> float:
    return FIXED_S + SLOT_S * x


def here(measured: Measured, **asked: Any) -> ProjectionRow:
    work = workload_of(measured.view, queries=1000, epochs=1.0, **asked)
    return project(measured, Ask(work, ())).rows[0]


def there(measured: Measured, batch: int | None = None, **asked: Any) -> float:
    work = workload_of(measured.view, queries=1000, epochs=1.0, **asked)
    row = project(measured, Ask(work, (A100,), batch=batch)).rows[1]
    assert row.queries_per_s is not None, row.unknown
    return row.queries_per_s[0]


# attention grows with the length of a row


@pytest.mark.parametrize("length", [128, 4096, 32768])
def test_the_share_of_attention_is_the_published_one(length: int) -> None:
    full = header(model={**DENSE, "layers": LAYERS}, train={"method": "full"})
    assert attention_share(full, length) == pytest.approx(length / (6 * HIDDEN))
    # adapters: the weights have no gradients of their own, attention's products do
    lora = header(model={**DENSE, "layers": LAYERS}, train={"method": "lora"})
    assert attention_share(lora, length) == pytest.approx(1.5 * length / (6 * HIDDEN))
    again = header(model={**DENSE, "layers": LAYERS}, train={"method": "full", "gradient_checkpointing": "reentrant"})
    assert attention_share(again, length) == pytest.approx(length / (6 * HIDDEN))  # 4 passes of 3, 8 FLOPs of 6
    assert attention_share(full, length, layers=8) == pytest.approx(length / (6 * HIDDEN) / 4)


@pytest.mark.parametrize("model", [{"kind": "mamba2"}, {"hidden": None}, {"layers": None}, {"parameters": None}])
def test_what_does_not_attend_has_no_share(model: Any) -> None:
    said = {**DENSE, "layers": LAYERS, **model}
    if said["parameters"] is None:
        said["active_parameters"] = None
    assert attention_share(header(model=said, train={"method": "full"}), 4096) == 0.0


@pytest.mark.parametrize(("weight", "off"), [(0.5, 0.08), (0.75, 0.02), (1.0, 0.08)])
def test_longer_rows_take_more_than_their_slots(weight: float, off: float) -> None:
    """Kernels that skip what is masked do half of attention's FLOPs; at two thirds of a matmul's rate that is 0.75."""
    law = attending(weight)
    row = here(measure(run(law)), seq_len=8192)
    assert row.queries_per_s is not None
    truth = 4 / (law(4 * 8192, 8192) + REST_S)
    assert row.queries_per_s[0] == pytest.approx(truth, rel=off)
    assert row.queries_per_s[1] < truth * 1.01
    assert row.queries_per_s[2] > truth * 0.99
    by_slots = 4 / (FIXED_S + SLOT_S * 4 * 8192 + REST_S)
    assert row.queries_per_s[0] < 0.85 * by_slots


def test_packed_rows_are_not_what_attention_sees() -> None:
    row = here(measure(run(lambda x, length: FIXED_S + SLOT_S * x, train={"packing": "bfd"})), seq_len=8192)
    assert row.queries_per_s is not None
    assert row.queries_per_s[0] == pytest.approx(4 / (FIXED_S + SLOT_S * 4 * 8192 + REST_S), rel=0.01)


# several runs


def test_runs_of_several_lengths_tell_what_a_length_adds() -> None:
    def law(x: float, length: float) -> float:
        return FIXED_S + (SLOT_S + 4e-8 * length) * x

    short = run(law, batch=16, lengths=(128, 256), seed=1)
    long = run(law, batch=2, lengths=(1024, 2048), seed=2)
    measured = measure(short, long)
    assert measured.joint is not None
    assert measured.joint.unknowns["length_s"] == pytest.approx(4e-8, rel=0.05)
    row = here(measured, seq_len=1500)
    assert row.queries_per_s is not None
    assert row.queries_per_s[0] == pytest.approx(16 / (law(16 * 1500, 1500) + REST_S), rel=0.03)


def test_two_runs_are_told_by_their_joint_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def law(x: float, length: float) -> float:
        return FIXED_S + (SLOT_S + 4e-8 * length) * x

    short = log(tmp_path / "short.jsonl", records(law, batch=16, lengths=(128, 256), seed=1))
    long = log(tmp_path / "long.jsonl", records(law, batch=2, lengths=(1024, 2048), seed=2))
    words = ["project", str(short), str(long), "--gpu", "h100", "--seq-len", "1500"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "T = h + u s a micro-batch" in out
    assert "·klength)·kslots" in out
    assert "measured at batch" not in out  # rows of this length were not
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["joint_fit"]["unknowns"]
    for name, truth in {"fixed_s": FIXED_S, "per_unit_s": SLOT_S, "length_s": 4e-8}.items():
        middle, low, high = told[name]
        assert low < truth < high
        assert middle == pytest.approx(truth, rel=0.06)


def test_runs_whose_slots_say_it_all_are_one_curve() -> None:
    def law(x: float, length: float) -> float:
        return FIXED_S + SLOT_S * x

    measured = measure(run(law, model={"kind": "mamba2"}), run(law, model={"kind": "mamba2"}, seed=3))
    assert measured.joint is None
    row = here(measured, seq_len=1024)
    assert row.queries_per_s is not None
    assert row.queries_per_s[1] < 4 / (law(4096, 0) + REST_S) < row.queries_per_s[2]


def test_runs_of_several_accumulations_tell_what_a_micro_batch_adds_besides() -> None:
    def of(accumulation: int) -> RunView:
        """Besides its micro-batches, 0.1 s a step and 20 ms for each of them."""
        items = records(flat, accumulation=accumulation, wait_s=0.02 * accumulation, seed=accumulation)
        steps = [item for item in items if isinstance(item, r.Step)]
        parts = [dict(each.phases_s) for each in steps]
        phases = [{**each, "data_wait": 0.0, "other": each["data_wait"]} for each in parts]
        moved = [msgspec.structs.replace(each, phases_s=said) for each, said in zip(steps, phases, strict=True)]
        return view([items[0], *moved])

    def rate(measured: Measured, batch: int) -> float:
        work = workload_of(measured.view, queries=1000, epochs=1.0)
        row = project(measured, Ask(work, (), batch=batch)).rows[0]
        assert row.queries_per_s is not None, row.unknown
        return row.queries_per_s[0]

    alone, both = measure(of(8)), measure(of(8), of(2))
    assert both.rest_per_micro_s == pytest.approx(0.02, rel=1e-6)
    slots = workload_of(both.view).slots(8)
    assert slots is not None
    # 32 queries a step: 8 micro-batches of 4 in the run, 4 of 8 as asked for
    assert rate(both, 8) == pytest.approx(32 / (4 * flat(slots, 0) + 0.1 + 4 * 0.02), rel=2e-3)
    assert rate(alone, 8) == pytest.approx(32 / (4 * flat(slots, 0) + 0.1 + 8 * 0.02), rel=2e-3)


# data that is waited for


def test_what_workers_load_is_no_faster_on_a_faster_gpu() -> None:
    starved = measure(run(flat, wait_s=1.0, train={"loader_workers": 2}))
    rate = starved.view.rates.queries_per_s
    assert rate is not None
    assert there(starved, batch=4) == pytest.approx(rate, rel=0.02)
    # loaded in the training's own process the wait stays, and computing alone gets shorter
    alone = measure(run(flat, wait_s=1.0, train={"loader_workers": 0}))
    assert there(alone, batch=4) > 1.05 * rate
    # where nothing was waited for, nobody knows how fast the workers are
    fed = measure(run(flat, wait_s=0.001, train={"loader_workers": 2}))
    assert there(fed, batch=4) > 1.3 * rate


def test_a_larger_batch_waits_longer_for_its_data() -> None:
    one, twice = (there(measure(run(flat, wait_s=1.0)), batch=b) for b in (4, 8))
    none = [there(measure(run(flat)), batch=b) for b in (4, 8)]
    waits = [b / rate - b / without for b, rate, without in zip((4, 8), (one, twice), none, strict=True)]
    assert waits[0] == pytest.approx(1.0, rel=0.05)
    assert waits[1] == pytest.approx(2.0, rel=0.05)
    assert math.isfinite(twice)
