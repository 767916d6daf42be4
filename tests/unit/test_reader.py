"""A run read from its files: ranks merged, and how it stands."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from makers import end, header, line, log, step, steps

from ft_insight.reader import RunReader, read_run
from ft_insight.runlog import RunLogError, rank_path


@pytest.fixture(scope="module")
def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def status_of(path: Path, age_s: float = 0.0) -> tuple[str, str]:
    os.utime(path, (time.time() - age_s,) * 2)
    _, status = read_run(path)
    return status.kind, status.text


@pytest.mark.parametrize(
    ("head", "last", "age_s", "kind", "text"),
    [
        ({}, None, 0, "live", "live"),
        ({}, ("completed", None), 9e6, "completed", "completed"),
        ({}, ("failed", "OutOfMemoryError: no"), 0, "failed", "failed: OutOfMemoryError: no"),
        ({}, ("interrupted", "KeyboardInterrupt"), 0, "interrupted", "interrupted: KeyboardInterrupt"),
        ({}, ("retried", "batch 8 was too large"), 0, "live", "live"),
        ({"pid": "dead"}, ("retried", None), 0, "stopped", "after step 2"),
        ({"pid": "dead"}, None, 0, "stopped", "stopped without an end record, after step 2"),
        ({}, None, 200, "silent", "silent for 3m 20s"),
        ({"host": "elsewhere", "pid": "dead"}, None, 0, "live", "live"),
        ({"host": "elsewhere"}, None, 3600, "silent", "no end record, and silent for 1.0 h, after step 2"),
        ({"pid": 1}, None, 0, "live", "live"),
        ({"pid": 10**15}, None, 0, "stopped", "stopped"),
        ({"pid": -1}, None, 0, "live", "live"),
        ({"pid": None}, None, 3600, "silent", "no end record"),
    ],
)
def test_status(
    tmp_path: Path, dead_pid: int, head: dict[str, Any], last: Any, age_s: float, kind: str, text: str
) -> None:
    said = {**head, **({"pid": dead_pid} if head.get("pid") == "dead" else {})}
    items = [header(**said), *steps(2)]
    if last is not None:
        items.append(end(2.0, last[0], 2, reason=last[1]))
    found = status_of(log(tmp_path / "run.jsonl", items), age_s)
    assert found[0] == kind
    assert text in found[1]


def test_after_a_retry_the_next_segment_speaks(tmp_path: Path) -> None:
    path = log(
        tmp_path / "run.jsonl", [header(), *steps(2), end(2.0, "retried"), header(segment=1), *steps(1), end(1.0)]
    )
    view, status = read_run(path)
    assert status.kind == "completed"
    assert status.over
    assert view.segments == 2


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    reader = RunReader(tmp_path / "run.jsonl")
    assert not reader.poll()
    status = reader.status(reader.view())
    assert (status.kind, status.over) == ("waiting", False)
    with pytest.raises(RunLogError, match="does not exist"):
        read_run(tmp_path / "run.jsonl")
    with pytest.raises(RunLogError, match="holds no record yet"):
        read_run(log(tmp_path / "run.jsonl", [b""]))
    with pytest.raises(RunLogError, match="holds no record yet"):
        read_run(log(tmp_path / "run.jsonl", [line(header())[:-1]]))


def test_ranks_are_found_when_they_come_and_merged(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    # rank 10 comes before rank 2, and rank 0 last
    for rank, expected in ((10, 30), (2, 60), (0, 90)):
        log(rank_path(path, rank), [header(rank=rank, world_size=11), *steps(3)])
        if rank == 10:
            reader = RunReader(path)
        while reader.poll():
            pass
        assert reader.view().totals.queries == expected
    lead = reader.view().header
    assert lead is not None
    assert lead.rank == 0
    with rank_path(path, 2).open("ab") as file:
        file.write(line(step(4, 3.0)))
    assert reader.poll()
    assert reader.view().totals.queries == 100
    assert not reader.poll()


def test_ranks_of_another_run_are_not_ours(tmp_path: Path) -> None:
    path = log(tmp_path / "run.jsonl", [header(world_size=2), *steps(3)])
    log(rank_path(path, 1), [header(rank=1, world_size=2, run_id="another"), *steps(3)])
    assert read_run(path)[0].totals.queries == 30
    log(rank_path(path, 5), [header(rank=5, world_size=8), *steps(3)])
    assert read_run(path)[0].totals.queries == 30


def test_lines_that_were_skipped_are_counted_over_all_ranks(tmp_path: Path) -> None:
    path = log(tmp_path / "run.jsonl", [header(world_size=2), b"{\n", b'{"type":"new"}\n'])
    log(rank_path(path, 1), [header(rank=1, world_size=2), b"{\n"])
    view = read_run(path)[0]
    assert (view.malformed_lines, view.unknown_lines) == (2, 1)


def test_a_file_that_starts_anew_is_a_new_run(tmp_path: Path) -> None:
    path = log(tmp_path / "run.jsonl", [header(), *steps(5)])
    reader = RunReader(path)
    while reader.poll():
        pass
    log(path, [header(run_id="next"), *steps(1)])
    while reader.poll():
        pass
    view = reader.view()
    assert view.header is not None
    assert (view.header.run_id, view.step, view.segments) == ("next", 1, 1)
