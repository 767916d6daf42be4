"""Writing a run log and following one while it grows.

The writer never makes training wait: ``put`` appends to a bounded queue, one thread encodes and writes whole
lines. The follower never trusts the file: it may not exist yet, end in half a line, hold lines that this
version does not know, shrink, or be replaced while it is being read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, get_args

import msgspec

from ft_insight import records
from ft_insight.records import Header, Heartbeat, Record

FLUSH_S = 0.5
"""Longest that a record waits in memory before it is on its way to the disk."""
HEARTBEAT_S = 5.0
SILENT_S = 3 * HEARTBEAT_S
"""A log without a new byte for this long belongs to a writer that hangs or is gone."""
QUEUE_RECORDS = 20_000
CHUNK_BYTES = 1 << 20
LONGEST_LINE_BYTES = 64 << 20
RUNS_FOLDER = "ft_insight_runs"
LOG_NAME = "run.jsonl"
LOG_VARIABLE = "FT_INSIGHT_LOG"

_RANK_FILE = re.compile(r"\.rank\d+\.jsonl$")
_TYPES = frozenset(t.__struct_config__.tag for t in get_args(Record))
_SAMPLES = b'{"type":"gpu"'
_SAMPLE = re.compile(re.escape(_SAMPLES) + rb"[^\n]*\n")  # which is nowhere within a line: strings escape quotes


class RunLogError(ValueError):
    """A log that cannot be read; the message is one line that says which, why and what to do."""


class LogWriter:
    """Appends records to one file from one background thread.

    Opening raises ``OSError`` when the file cannot be made. After that nothing raises: a full queue drops the
    record and counts it in ``dropped``, as does one that cannot be encoded; a failing disk ends the writing and is
    told in ``failure``.
    """

    def __init__(self, path: Path, clock: Callable[[], float], *, append: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = os.O_RDWR | os.O_APPEND if append else os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self.path = path
        self.dropped = 0
        self.failure: str | None = None
        self._fd = os.open(path, mode, 0o644)
        self._clock = clock
        self._queue: deque[Record] = deque()
        self._wake = threading.Condition()
        self._stop = False
        self._busy = False
        self._encoder = msgspec.json.Encoder()
        try:
            self._separate_from_torn_line()
        except OSError:
            os.close(self._fd)
            raise
        self._thread = threading.Thread(target=self._run, name="ft-insight-log", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Queue a record; returns at once, whatever the disk does."""
        if self._stop or self.failure:
            return
        if len(self._queue) >= QUEUE_RECORDS:
            self.dropped += 1
            return
        self._queue.append(record)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until all that was queued is written; False if that took longer than ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        with self._wake:
            self._wake.notify_all()
        while (self._queue or self._busy) and not self.failure and self._thread.is_alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return not self.failure

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued, sync it to the disk and stop the thread. May be called again."""
        if self._stop:
            return
        with self._wake:
            self._stop = True
            self._wake.notify_all()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            with contextlib.suppress(OSError):
                os.close(self._fd)

    def _separate_from_torn_line(self) -> None:
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def _run(self) -> None:
        last_write = time.monotonic()
        while True:
            with self._wake:
                if not self._stop:
                    self._wake.wait(FLUSH_S)
                stop = self._stop
            if self._write_queued():
                last_write = time.monotonic()
            elif time.monotonic() - last_write > HEARTBEAT_S and not stop:
                self._queue.append(Heartbeat(t_s=round(self._clock(), 3)))
            if self.failure:
                return
            if stop and not self._queue:
                self._sync()
                return

    def _sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a pipe or a device, where there is nothing to sync
                self.failure = f"cannot write {self.path}: {error}"

    def _write_queued(self) -> bool:
        if not self._queue:
            return False
        self._busy = True
        lines = bytearray()
        try:
            while self._queue and len(lines) < CHUNK_BYTES:
                lines += self._encoded(self._queue.popleft())
            view = memoryview(lines)
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            self.failure = f"cannot write {self.path}: {error}"
            self._queue.clear()
        finally:
            self._busy = False
        return True

    def _encoded(self, record: Record) -> bytes:
        """Return the line of a record; nothing of one that holds what JSON cannot, so that the others are written."""
        try:
            return self._encoder.encode(record) + b"\n"
        except UnicodeEncodeError:  # a name with bytes that are no UTF-8, as paths may have
            return self._encoder.encode(_printable(msgspec.to_builtins(record))) + b"\n"
        except (TypeError, ValueError, OverflowError, RecursionError):
            self.dropped += 1
            return b""


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    return value


class Poll(msgspec.Struct, frozen=True):
    """What one look at a log brought."""

    records: Iterable[Record] = ()
    """Decoded one by one as they are taken, before the next look: so a long log needs the memory of one record."""
    news: bool = False
    """There are whole lines that are new."""
    restarted: bool = False
    """The file was truncated or replaced: forget what came before."""
    more: bool = False
    """There is more to read at once."""


class Follower:
    """Reads the new whole lines of a log at each ``poll``, at most a few megabytes at a time.

    Lines of unknown type and lines that are no JSON are counted in ``unknown`` and ``malformed`` and passed
    over. Raises :class:`RunLogError` for a file that is no run log, or one written by a newer ft-insight.
    ``thinned`` leaves out all but the last of the GPUs' samples in what it reads at once: who asks only for what
    steps took need not wait for the many that a long run has.
    """

    def __init__(self, path: Path, *, thinned: bool = False) -> None:
        self.path = path
        self._thinned = thinned
        self.unknown = 0
        self.malformed = 0
        self.modified_at: float | None = None
        self._decoder = msgspec.json.Decoder(Record)
        self._forget()

    def _forget(self) -> None:
        self._offset = 0
        self._inode: int | None = None
        self._first_bytes = b""
        self._header_seen = False
        self.unknown = self.malformed = 0

    def poll(self, limit_bytes: int = 4 * CHUNK_BYTES) -> Poll:
        """Return the records of all whole lines since the last poll, up to ``limit_bytes`` of them."""
        try:
            with self.path.open("rb") as file:
                return self._read(file, limit_bytes)
        except FileNotFoundError:
            return Poll()
        except IsADirectoryError:
            raise RunLogError(f"{self.path} is a folder, not a run log") from None
        except PermissionError:
            raise RunLogError(f"{self.path} cannot be read: permission denied") from None
        except OSError as error:
            raise RunLogError(f"{self.path} cannot be read: {error.strerror or error}") from None

    def _read(self, file: BinaryIO, limit_bytes: int) -> Poll:
        stat = os.fstat(file.fileno())
        restarted = self._was_replaced(file, stat)
        if restarted:
            self._forget()
        self._inode = stat.st_ino
        self.modified_at = stat.st_mtime
        file.seek(self._offset)
        data = file.read(limit_bytes)
        if not self._header_seen and data.lstrip()[:1] not in (b"", b"{"):
            raise self._not_a_log()
        end = data.rfind(b"\n") + 1
        if not end and len(data) == limit_bytes < LONGEST_LINE_BYTES:
            data += file.read(LONGEST_LINE_BYTES - limit_bytes)
            end = data.rfind(b"\n") + 1
            if not end and len(data) == LONGEST_LINE_BYTES:
                raise RunLogError(f"{self.path} is not an ft-insight run log: a line is over 64 MiB long")
        if not self._first_bytes and end:
            self._first_bytes = data[: min(end, 512)]
        self._offset += end
        found = self._decode(data[:end]) if end else ()
        return Poll(found, bool(end), restarted, more=bool(end) and self._offset < stat.st_size)

    def _was_replaced(self, file: BinaryIO, stat: os.stat_result) -> bool:
        if self._inode is None:
            return False
        if stat.st_ino != self._inode or stat.st_size < self._offset:
            return True
        file.seek(0)
        return file.read(len(self._first_bytes)) != self._first_bytes

    def _decode(self, data: bytes) -> Iterator[Record]:
        for line in (_with_last_sample(data) if self._thinned else data).split(b"\n"):
            if not line.strip():
                continue
            try:
                record = self._decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self._count_bad(line)
                continue
            if isinstance(record, Header):
                self._check_schema(record.schema)
                self._header_seen = True
            elif not self._header_seen:
                raise self._not_a_log()
            yield record

    def _count_bad(self, line: bytes) -> None:
        try:
            raw = msgspec.json.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raw = None
        kind = raw.get("type") if isinstance(raw, dict) else None
        if kind == "header" and isinstance(raw, dict):
            self._check_schema(raw.get("schema"))
        torn_header = raw is None and line.startswith(b'{"type":"header"')  # killed while it wrote its first line
        if not self._header_seen and not torn_header:
            raise self._not_a_log()
        if isinstance(kind, str) and kind not in _TYPES:
            self.unknown += 1
        else:
            self.malformed += 1

    def _check_schema(self, schema: object) -> None:
        if isinstance(schema, int) and schema > records.SCHEMA:
            raise RunLogError(
                f"{self.path} has schema {schema}; this ft-insight reads up to {records.SCHEMA}: "
                "pip install --upgrade ft-insight"
            )

    def _not_a_log(self) -> RunLogError:
        return RunLogError(f"{self.path} is not an ft-insight run log: it does not begin with a header record")


def _with_last_sample(data: bytes) -> bytes:
    """Leave out the lines of GPUs' samples but for the last one, told by how the writer begins them."""
    last = _SAMPLE.search(data, max(0, data.rfind(_SAMPLES)))
    return _SAMPLE.sub(b"", data) + last[0] if last is not None else data


def read_records(path: Path) -> tuple[Follower, Iterator[Record]]:
    """Stream all records that a log holds now, in constant memory, with the follower that counts bad lines."""
    if not path.exists():
        raise RunLogError(f"{path} does not exist")
    follower = Follower(path)

    def stream() -> Iterator[Record]:
        while True:
            poll = follower.poll()
            yield from poll.records
            if not poll.more:
                return

    return follower, stream()


def rank_path(path: Path, rank: int) -> Path:
    """Where a rank writes: rank 0 has the path itself, the others a sibling ``<stem>.rank<N>.jsonl``."""
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}.jsonl")


def rank_files(path: Path) -> tuple[Path, ...]:
    """Return a log and those of its sibling ranks that exist, rank 0 first."""
    siblings = path.parent.glob(f"{_glob_escape(path.stem)}.rank*.jsonl")
    ranked = [(int(p.name.rsplit(".rank", 1)[1][:-6]), p) for p in siblings if _RANK_FILE.search(p.name)]
    return (path, *(p for _, p in sorted(ranked)))


def find_run(where: str | os.PathLike[str] | None = None, *, may_be_missing: bool = False) -> Path:
    """Find the log that a user means: a file, a folder (its newest run), or None for the newest run here.

    Without a name, ``FT_INSIGHT_LOG`` is asked first, then ``ft_insight_runs/`` in the current folder. Raises
    :class:`RunLogError` if there is none; ``may_be_missing`` lets a named log that is still to be created pass.
    """
    if where is None:
        where = os.environ.get(LOG_VARIABLE) or RUNS_FOLDER
        if where == RUNS_FOLDER and not Path(where).is_dir():
            raise RunLogError(
                f"no run here: there is no {RUNS_FOLDER}/ in {Path.cwd()}; name a run.jsonl, or start one with "
                "FtInsightCallback() or `ft-insight demo`"
            )
    path = Path(where)
    if path.is_dir():
        return _newest_in(path)
    if path.exists() or (may_be_missing and path.suffix == ".jsonl"):
        return path
    raise RunLogError(f"{path} does not exist; name a run.jsonl, or a folder that holds runs")


def _newest_in(folder: Path) -> Path:
    logs = [
        log
        for pattern in ("*.jsonl", "*/*.jsonl", f"{RUNS_FOLDER}/*/*.jsonl")
        for log in folder.glob(pattern)
        if log.is_file() and not _RANK_FILE.search(log.name) and _begins_like_a_log(log)
    ]
    if not logs:
        raise RunLogError(f"no run log in {folder}: looked for *.jsonl there and one folder down")
    return max(logs, key=lambda log: log.stat().st_mtime)


def _begins_like_a_log(path: Path) -> bool:
    """Tell a log from other files, also one whose header only a newer version can read: that is to be said."""
    try:
        with path.open("rb") as file:
            raw = msgspec.json.decode(file.readline(CHUNK_BYTES))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return isinstance(raw, dict) and raw.get("type") == "header" and "schema" in raw


def read_header(path: Path) -> Header | None:
    """Return the first header of a log, or None where there is none (yet) that this version can read."""
    try:
        with path.open("rb") as file:
            line = file.readline(CHUNK_BYTES)
        record = msgspec.json.decode(line, type=Record)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return record if isinstance(record, Header) else None


def writer_is_gone(header: Header, modified_at: float | None) -> bool | None:
    """Tell whether the process that writes a log is gone: True, False, or None where that cannot be known.

    On the writer's own host its process is looked up. Where that is not possible, or the process is there but has
    been silent for long (it hangs, or its number was used again), it is not known.
    """
    silent = modified_at is not None and time.time() - modified_at > SILENT_S
    if header.host == socket.gethostname() and header.pid and header.pid > 0:
        try:
            os.kill(header.pid, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except OSError:
            return None if silent else False
        return None if silent else False
    return None


def _glob_escape(text: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", text)
