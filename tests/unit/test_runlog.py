"""The log on disk: what a writer leaves behind however it ends, and what a follower makes of any file."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from makers import header, line, log, step, steps

from ft_insight import records as r
from ft_insight import runlog
from ft_insight.runlog import Follower, LogWriter, RunLogError, find_run, read_records


def lines(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    assert data.endswith(b"\n") or not data
    return [json.loads(raw, parse_constant=pytest.fail) for raw in data.splitlines()]


def drain(follower: Follower, limit: int = 4 << 20) -> list[r.Record]:
    found: list[r.Record] = []
    while (poll := follower.poll(limit)).news or poll.more:
        found += poll.records
    return found


@pytest.fixture
def clock() -> Any:
    return time.monotonic


# the writer


def test_each_record_is_one_line_of_strict_json_with_its_type_first(tmp_path: Path, clock: Any) -> None:
    writer = LogWriter(tmp_path / "deep" / "run.jsonl", clock)
    logs = r.Logs(step=1, t_s=0.0, values={"loss": math.nan, "grad_norm": math.inf, "lr": 1e-4})
    writer.put(header(model={"name": "a\nb\x1b[31m"}))
    writer.put(logs)
    writer.put(step(1, 0.0, wall_s=math.inf))
    writer.close()
    raw = (tmp_path / "deep" / "run.jsonl").read_bytes()
    assert [text[:9] for text in raw.decode().splitlines()] == ['{"type":"'] * 3
    found = lines(tmp_path / "deep" / "run.jsonl")
    assert [x["type"] for x in found] == ["header", "logs", "step"]
    assert found[1]["values"] == {"loss": None, "grad_norm": None, "lr": 1e-4}
    assert found[2]["wall_s"] is None


def test_a_record_is_on_disk_within_a_second(tmp_path: Path, clock: Any) -> None:
    writer = LogWriter(tmp_path / "run.jsonl", clock)
    writer.put(header())
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline and not (tmp_path / "run.jsonl").stat().st_size:
        time.sleep(0.02)
    assert lines(tmp_path / "run.jsonl")[0]["type"] == "header"
    writer.close()


def test_nothing_is_overwritten(tmp_path: Path, clock: Any) -> None:
    (tmp_path / "run.jsonl").write_text("mine")
    with pytest.raises(FileExistsError):
        LogWriter(tmp_path / "run.jsonl", clock)
    assert (tmp_path / "run.jsonl").read_text() == "mine"
    with pytest.raises(FileNotFoundError):
        LogWriter(tmp_path / "other.jsonl", clock, append=True)


@pytest.mark.parametrize("torn", [True, False])
def test_appending_begins_on_a_fresh_line(tmp_path: Path, clock: Any, torn: bool) -> None:
    path = log(tmp_path / "run.jsonl", [header(), step(1, 0.0)] + ([b'{"type":"step","st'] if torn else []))
    writer = LogWriter(path, clock, append=True)
    writer.put(header(segment=1, first_step=1))
    writer.close()
    follower = Follower(path)
    assert [type(x).__name__ for x in drain(follower)] == ["Header", "Step", "Header"]
    assert follower.malformed == int(torn)


def test_a_full_queue_drops_and_counts(tmp_path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runlog, "QUEUE_RECORDS", 10)
    monkeypatch.setattr(runlog, "FLUSH_S", 5.0)
    writer = LogWriter(tmp_path / "run.jsonl", clock)
    time.sleep(0.1)  # the thread is asleep now
    for i in range(25):
        writer.put(step(i, float(i)))
    assert writer.dropped == 15
    writer.close()
    assert len(lines(tmp_path / "run.jsonl")) == 10


def test_a_full_disk_is_told_and_never_raises(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runlog, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(runlog, "FLUSH_S", 0.02)
    writer = LogWriter(Path("/dev/full"), clock, append=True)
    writer.put(header())
    assert not writer.flush()
    assert writer.failure is not None
    assert "/dev/full" in writer.failure
    told = writer.failure
    for i in range(10):
        writer.put(step(i, 0.0))
    time.sleep(0.2)  # no heartbeat may try again
    assert not writer._thread.is_alive()
    assert writer.failure == told
    writer.close()
    writer.close()


def test_a_closed_file_is_told_and_never_raises(tmp_path: Path, clock: Any) -> None:
    writer = LogWriter(tmp_path / "run.jsonl", clock)
    os.close(writer._fd)
    writer.put(header())
    assert not writer.flush()
    assert "cannot write" in str(writer.failure)
    writer.put(header())
    writer.close()


def test_a_record_that_cannot_be_encoded_costs_only_itself(tmp_path: Path, clock: Any) -> None:
    writer = LogWriter(tmp_path / "run.jsonl", clock)
    writer.put(header(model={"name": "caf\udce9"}))
    writer.put(step(1, 0.0, self_s=object()))
    writer.put(step(2, 1.0))
    writer.close()
    assert writer.failure is None
    assert writer.dropped == 1
    found = lines(tmp_path / "run.jsonl")
    assert [x["type"] for x in found] == ["header", "step"]
    assert found[0]["model"]["name"] == "caf?"


def test_an_idle_writer_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runlog, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(runlog, "FLUSH_S", 0.02)
    writer = LogWriter(tmp_path / "run.jsonl", lambda: 7.25)
    writer.put(header())
    time.sleep(0.6)
    writer.close()
    found = lines(tmp_path / "run.jsonl")
    assert 2 <= len(found) - 1 <= 6
    assert found[-1] == {"type": "heartbeat", "t_s": 7.25}


def test_closing_syncs_also_when_all_was_flushed_before(
    tmp_path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    real = os.fsync
    monkeypatch.setattr(runlog.os, "fsync", lambda fd: (synced.append(fd), real(fd)))
    writer = LogWriter(tmp_path / "run.jsonl", clock)
    writer.put(header())
    assert writer.flush()
    assert not synced
    writer.close()
    assert synced == [writer._fd]
    writer.close()
    writer.put(header())
    assert len(lines(tmp_path / "run.jsonl")) == 1
    assert len(synced) == 1


_WRITE_FOREVER = """
import sys, time
sys.path[:0] = {path!r}
from makers import header, step
from ft_insight import runlog
runlog.FLUSH_S = 0.001
w = runlog.LogWriter(runlog.Path(sys.argv[1]), time.monotonic)
w.put(header())
w.flush()
print("ready", flush=True)
for i in range(10**9):
    w.put(step(i, float(i)))
    if i % 50 == 0:
        time.sleep(0.0005)
"""


def test_kill_9_leaves_whole_lines(tmp_path: Path) -> None:
    here = Path(__file__).parent
    code = _WRITE_FOREVER.format(path=[str(here), str(here.parents[1])])
    rng = random.Random(5)
    for attempt in range(4):
        path = tmp_path / f"{attempt}.jsonl"
        child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0.01, 0.25))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        whole = path.read_bytes().rpartition(b"\n")[0].split(b"\n")
        numbers = [json.loads(raw).get("step") for raw in whole]
        assert numbers == [None, *range(len(whole) - 1)]


# the follower


def test_a_torn_line_waits_for_its_rest(tmp_path: Path) -> None:
    whole = line(step(1, 0.0))
    path = log(tmp_path / "run.jsonl", [header(), whole[:20]])
    follower = Follower(path)
    assert len(drain(follower)) == 1
    with path.open("ab") as file:
        file.write(whole[20:])
    assert drain(follower) == [step(1, 0.0)]
    assert follower.malformed == 0


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_growth_in_any_steps_gives_the_same_records(tmp_path: Path, data: st.DataObject) -> None:
    content = b"".join([line(header()), line(step(1, 0.0)), b'{"type":"new"}\r\n', b"{bad\n", line(step(2, 1.0))])
    cuts = data.draw(st.lists(st.integers(0, len(content)), max_size=12).map(sorted))
    path = tmp_path / f"{time.monotonic_ns()}.jsonl"
    path.touch()
    follower = Follower(path)
    found: list[r.Record] = []
    for begin, stop in zip([0, *cuts], [*cuts, len(content)], strict=True):
        with path.open("ab") as file:
            file.write(content[begin:stop])
        found += drain(follower, data.draw(st.integers(1, 2000)))
    assert found == [header(), step(1, 0.0), step(2, 1.0)]
    assert (follower.unknown, follower.malformed) == (1, 1)
    path.unlink()


def test_a_truncated_file_starts_anew(tmp_path: Path) -> None:
    path = log(tmp_path / "run.jsonl", [header(), *steps(5)])
    follower = Follower(path)
    assert len(drain(follower)) == 6
    log(path, [header(run_id="again")])
    poll = follower.poll()
    assert poll.restarted
    assert tuple(poll.records) == (header(run_id="again"),)


def test_a_replaced_file_starts_anew(tmp_path: Path) -> None:
    path = log(tmp_path / "run.jsonl", [header(), *steps(2)])
    follower = Follower(path)
    drain(follower)
    os.replace(log(tmp_path / "new", [header(), *steps(9)]), path)
    poll = follower.poll()
    assert poll.restarted
    assert len(tuple(poll.records)) == 10


@pytest.mark.parametrize("more", [0, 7])
def test_a_file_rewritten_in_place_starts_anew(tmp_path: Path, more: int) -> None:
    path = log(tmp_path / "run.jsonl", [header(run_id="aaaa"), *steps(2)])
    inode = path.stat().st_ino
    follower = Follower(path)
    drain(follower)
    log(path, [header(run_id="bbbb"), *steps(2 + more)])
    assert path.stat().st_ino == inode
    poll = follower.poll()
    assert poll.restarted
    assert len(tuple(poll.records)) == 3 + more


def test_a_restart_is_told_also_when_its_first_line_is_longer_than_a_poll(tmp_path: Path) -> None:
    path = log(tmp_path / "run.jsonl", [header(run_id="a"), *steps(2)])
    follower = Follower(path)
    drain(follower)
    log(path, [header(run_id="b" * 3000)])
    assert follower.poll(1000).restarted


def test_what_is_not_known_is_passed_over_and_counted(tmp_path: Path) -> None:
    odd = line(step(1, 0.0))[:-2] + b',"colour":"red"}\n'
    bad = [b"\n", b"null\n", b'{"type":"step"}\n', b'{"type":"step","step":"x"}\n', b"\xff\xfe\n", b'{"type":7}\n']
    path = log(tmp_path / "run.jsonl", [header(), b'{"type":"later","x":1}\n', odd, *bad])
    follower = Follower(path)
    assert drain(follower) == [header(), step(1, 0.0)]
    assert follower.unknown == 1
    assert follower.malformed == 5


def test_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(line(header()).replace(b"\n", b"\r\n") + line(step(1, 0.0)).replace(b"\n", b"\r\n"))
    assert drain(Follower(path)) == [header(), step(1, 0.0)]


def test_a_file_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    follower = Follower(tmp_path / "run.jsonl")
    assert follower.poll() == runlog.Poll()
    log(tmp_path / "run.jsonl", [])
    assert follower.poll() == runlog.Poll()
    log(tmp_path / "run.jsonl", [header()])
    assert drain(follower) == [header()]


@pytest.mark.parametrize(
    "content",
    [
        b"\x7fELF" + bytes(range(256)) * 4,
        b"\x00" * 100,
        b'{"loss": 1.0}\n{"loss": 0.5}\n',
        b'{\n  "type": "header"\n}\n',
        b"[1, 2]\n",
        b"hello\n",
        b"hello",
        line(step(1, 0.0)),
    ],
)
def test_what_is_no_log_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(RunLogError, match="not an ft-insight run log") as caught:
        drain(Follower(path))
    assert "\n" not in str(caught.value)


def test_a_folder_and_an_unreadable_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunLogError, match="is a folder"):
        Follower(tmp_path).poll()
    with pytest.raises(RunLogError, match="cannot be read"):
        Follower(Path("/proc/self/mem")).poll()

    def deny(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(RunLogError, match="permission denied"):
        Follower(tmp_path / "run.jsonl").poll()


def test_a_first_line_torn_by_a_kill_does_not_spoil_the_log(tmp_path: Path) -> None:
    path = log(tmp_path / "run.jsonl", [line(header())[:60] + b"\n", header(segment=1)])
    follower = Follower(path)
    assert drain(follower) == [header(segment=1)]
    assert follower.malformed == 1


def test_schemas(tmp_path: Path) -> None:
    assert len(drain(Follower(log(tmp_path / "old.jsonl", [header(schema=0), *steps(1)])))) == 2
    for name, first in {
        "new": line(header(schema=r.SCHEMA + 8)),
        "strange": b'{"type":"header","schema":%d,"everything":"else"}\n' % (r.SCHEMA + 8),
    }.items():
        path = log(tmp_path / f"{name}.jsonl", [first])
        with pytest.raises(RunLogError) as caught:
            drain(Follower(path))
        message = str(caught.value)
        assert "schema 9" in message
        assert str(path) in message
        assert "upgrade" in message
        assert "\n" not in message


def test_a_long_log_is_read_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    wordy = r.Logs(step=1, t_s=0.0, values={"loss": 1.0}, texts={"note": "x" * 1500})
    block = b"".join(line(x) for x in [*steps(500), *[wordy] * 1500])
    with path.open("wb") as file:
        file.write(line(header()))
        while file.tell() < 60 << 20:
            file.write(block)
    size = path.stat().st_size
    follower = Follower(path)
    polls, most, count = 0, 0, 0
    tracemalloc.start()
    try:
        while (poll := follower.poll()).more:
            polls += 1
            found = sum(1 for _ in poll.records)
            most = max(most, found)
            count += found
            if polls == 5:  # tracing is slow: five polls show what one holds
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
        count += sum(1 for _ in poll.records)
    finally:
        tracemalloc.stop()
        path.unlink()
    assert peak < 60 << 20
    assert polls >= size // (4 << 20)
    assert most * len(block) / 2000 <= 1.2 * (4 << 20)
    assert count - 1 == 2000 * ((size - len(line(header()))) // len(block))


def test_read_records_streams_all(tmp_path: Path) -> None:
    follower, stream = read_records(log(tmp_path / "run.jsonl", [header(), b"{]\n", *steps(3)]))
    assert len(list(stream)) == 4
    assert follower.malformed == 1
    with pytest.raises(RunLogError, match="does not exist"):
        read_records(tmp_path / "none")


# finding a run


def aged(path: Path, age_s: float) -> Path:
    log(path, [header()])
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_find_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FT_INSIGHT_LOG", raising=False)
    with pytest.raises(RunLogError, match="no run here"):
        find_run()
    runs = tmp_path / "ft_insight_runs"
    runs.mkdir()
    with pytest.raises(RunLogError, match="no run log in"):
        find_run()
    aged(runs / "z-old" / "run.jsonl", 500)
    newest = aged(runs / "a-new" / "run.jsonl", 50)
    aged(runs / "a-new" / "run.rank1.jsonl", 1)
    (runs / "a-new" / "rows.jsonl").write_text('{"text": "no log"}\n')
    assert find_run().resolve() == newest
    assert find_run(runs).resolve() == newest
    assert find_run(tmp_path).resolve() == newest
    assert find_run(runs / "z-old") == runs / "z-old" / "run.jsonl"
    assert find_run(newest) == newest
    named = aged(tmp_path / "elsewhere.jsonl", 900)
    monkeypatch.setenv("FT_INSIGHT_LOG", str(named))
    assert find_run() == named
    assert find_run(runs) == newest
    with pytest.raises(RunLogError, match="does not exist"):
        find_run(tmp_path / "later.jsonl")
    assert find_run(tmp_path / "later.jsonl", may_be_missing=True) == tmp_path / "later.jsonl"
    with pytest.raises(RunLogError, match="does not exist"):
        find_run(tmp_path / "later", may_be_missing=True)


def test_the_newest_run_is_found_also_when_it_is_too_new_to_be_read(tmp_path: Path) -> None:
    aged(tmp_path / "old.jsonl", 100)
    newest = log(tmp_path / "new.jsonl", [b'{"type":"header","schema":99}\n'])
    assert find_run(tmp_path) == newest


def test_rank_files(tmp_path: Path) -> None:
    base = tmp_path / "a[1]*.jsonl"
    for rank in (10, 2, 0):
        log(runlog.rank_path(base, rank), [header(rank=rank)])
    log(tmp_path / "a1x.rank3.jsonl", [header()])
    (tmp_path / "a[1]*.rankX.jsonl").touch()
    assert [p.name for p in runlog.rank_files(base)] == ["a[1]*.jsonl", "a[1]*.rank2.jsonl", "a[1]*.rank10.jsonl"]


def test_a_thinned_log_has_all_but_the_samples_before_the_last(tmp_path: Path) -> None:
    def sample(t_s: float) -> r.Gpu:
        return r.Gpu(t_s=t_s, samples=(r.GpuSample(uuid="GPU-1", gpu_percent=t_s),))

    items = [header(), sample(1.0), step(1, 0.0), sample(2.0), step(2, 1.0), sample(3.0)]
    path = log(tmp_path / "run.jsonl", items)
    found = drain(Follower(path, thinned=True))
    assert [type(x).__name__ for x in found if not isinstance(x, r.Gpu)] == ["Header", "Step", "Step"]
    assert [x.t_s for x in found if isinstance(x, r.Gpu)] == [3.0]
    assert len(drain(Follower(path))) == 6
