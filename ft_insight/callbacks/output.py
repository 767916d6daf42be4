"""The end of the line for everything that is recorded: the log, the state that the summary is made of, the end.

It knows nothing of the trainer, so that it can outlive it: when a trainer is dropped after an exception, or the
process exits, the log still gets its last line.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Callable
from time import perf_counter
from typing import Any

from ft_insight.callbacks.gpu import GpuSampler
from ft_insight.records import Device, End, Gpu, GpuSample, HostSample, Notice, Record
from ft_insight.run import RunState
from ft_insight.runlog import LogWriter


class Output:
    """Takes records in and ends a segment exactly once."""

    def __init__(self) -> None:
        self._start_s = perf_counter()
        self._lock = threading.Lock()
        self._closed = False
        self.writer: LogWriter | None = None
        self.sampler: GpuSampler | None = None
        self.state = RunState()
        self.step = 0
        self.host = socket.gethostname()
        self.pid = os.getpid()

    def clock(self) -> float:
        """Return seconds since the segment's header."""
        return perf_counter() - self._start_s

    def since_start(self, host_s: float) -> float:
        """Turn a time of ``perf_counter`` into seconds since the header."""
        return round(host_s - self._start_s, 6)

    @property
    def closed(self) -> bool:
        """The segment has ended, or its process was forked and belongs to somebody else."""
        return self._closed or os.getpid() != self.pid

    def put(self, record: Record) -> None:
        """Log a record and take it into the state."""
        if self.writer is None or self.closed:
            return
        self.writer.put(record)
        self.state.fold(record)

    def notice(self, collector: str, text: str, *, off: bool = False) -> None:
        """Log something that the reader should know."""
        self.put(Notice(t_s=round(self.clock(), 3), collector=collector, text=text, off=off))

    def start_sampler(self, devices: tuple[Device, ...], *, rocm: bool = False) -> None:
        """Sample this process and its GPUs until the end. The thread holds this object weakly."""
        me = weakref.ref(self)
        start_s = self._start_s

        def clock() -> float:
            return perf_counter() - start_s

        def put(record: Record) -> None:
            output = me()
            if output is not None and output.writer is not None and not output.closed:
                output.writer.put(record)

        def emit(samples: tuple[GpuSample, ...], host: HostSample | None, dropped: int) -> None:
            put(Gpu(t_s=round(clock(), 4), samples=samples, host=host, dropped=dropped))

        def tell(text: str, off: bool) -> None:
            put(Notice(t_s=round(clock(), 3), collector="gpu", text=text, off=off))

        self.sampler = GpuSampler(devices, emit, tell, clock, self.pid, rocm=rocm)
        self.sampler.start()

    def end(
        self,
        status: str,
        reason: str | None = None,
        before_s: dict[str, float] | None = None,
        last: Callable[[], Any] | None = None,
    ) -> None:
        """End the segment: what ``last`` puts, the end record, everything flushed. Only the first call counts."""
        with self._lock:
            if self.closed:
                return
            if last is not None:
                last()
            if self.sampler is not None:
                self.sampler.stop()
            self.put(
                End(t_s=round(self.clock(), 6), status=status, step=self.step, reason=reason, before_s=before_s or {})
            )
            self._closed = True
            if self.writer is not None:
                self.writer.close()
