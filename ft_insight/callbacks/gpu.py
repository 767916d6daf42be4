"""The GPU sampler: twice a second, all that the driver tells of this process's GPUs, and training never waits for it.

One thread keeps the time and writes; it has the driver asked on another (``gpu_calls``), which is left behind where a
call hangs. Without a GPU or a driver, the process itself is sampled all the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import psutil

from ft_insight.callbacks.gpu_amd import Amd
from ft_insight.callbacks.gpu_calls import DriverThread, Round
from ft_insight.callbacks.gpu_card import Backend, Card
from ft_insight.callbacks.gpu_nvml import Nvml
from ft_insight.records import Device, GpuSample, HostSample

INTERVAL_S = 0.5
SLOW_OPEN_S = 5.0
Emit = Callable[[tuple[GpuSample, ...], HostSample | None, int], None]
Tell = Callable[[str, bool], None]


class GpuSampler:
    """Samples the GPUs of this process. ``tell(reason, off)`` is told what cannot be had; ``clock`` is the log's."""

    def __init__(
        self,
        devices: Sequence[Device],
        emit: Emit,
        tell: Tell,
        clock: Callable[[], float],
        pid: int,
        *,
        rocm: bool = False,
    ) -> None:
        gpus = [d for d in devices if d.kind == "cuda"]
        self._backend: Backend | None = None
        if gpus:
            self._backend = Amd(gpus, pid) if rocm else Nvml(gpus, pid, clock)
        self._emit = emit
        self._tell = tell
        self._pid = pid
        self._cards: list[Card] = []
        self._dropped = 0
        self._driver = DriverThread()
        self._opening: Round | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ft-insight-gpu", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """End sampling; a call that hangs in the driver is left behind after ``timeout_s``."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._sample_until_stopped()
        except Exception as error:  # noqa: BLE001 - whatever goes wrong here, training goes on
            self._tell(f"GPU statistics end here: {error}", True)

    def _sample_until_stopped(self) -> None:
        host = _Host(self._pid)
        began = due = monotonic()
        if self._backend is None:
            self._tell("no GPU: of the machine, only this process's CPU time and resident memory are sampled", False)
        else:
            self._opening = self._driver.begin([_Plain(self._backend.open)])
        while not self._stop.is_set():
            self._open_if_ready(monotonic() - began)
            samples = tuple(self._sample(card) for card in self._cards if not card.lost)
            self._emit(samples, host.read(), self._dropped)
            self._dropped = 0
            self._tell_news()
            due = self._next(due)
            self._stop.wait(max(0.0, due - monotonic()))
        self._driver.leave() if self._opening is not None else self._close()

    def _open_if_ready(self, waited_s: float) -> None:
        if self._opening is None:
            return
        if not self._opening.done.is_set():
            if waited_s - INTERVAL_S < SLOW_OPEN_S <= waited_s:
                self._tell(f"the GPU's driver has not answered for {SLOW_OPEN_S:g} s; training goes on", False)
            # most drivers answer within the first moment: no record without GPUs for that
            self._opening.done.wait(INTERVAL_S / 2)
        if self._opening.done.is_set():
            answer, self._opening = self._opening.answers[0], None
            if isinstance(answer, Exception):
                self._tell(f"no GPU statistics: {answer}", True)
                return
            self._cards, told = answer
            for text in told:
                self._tell(text, False)

    def _sample(self, card: Card) -> GpuSample:
        sample, dropped = card.sample(self._driver, self._stop)
        self._dropped += dropped
        return sample

    def _next(self, due: float) -> float:
        """Return when to sample next: moments that have passed meanwhile are dropped, not made up for."""
        late = max(0, int((monotonic() - due) / INTERVAL_S))
        self._dropped += late * sum(len(card.readings) for card in self._cards)
        return due + (late + 1) * INTERVAL_S

    def _tell_news(self) -> None:
        """Tell in one line what cannot be read any more, of which GPUs and why."""
        news: dict[str, dict[str, list[str]]] = {}
        for card in self._cards:
            for name, reason in card.news:
                news.setdefault(reason, {}).setdefault(name, []).append(card.uuid)
            card.news = []
        if news:
            self._tell("not known " + "; ".join(self._one_reason(r, names) for r, names in news.items()), False)
        for card in self._cards:
            if card.lost:
                self._tell(f"GPU {card.uuid} is lost: no statistics of it follow", len(self._cards) == 1)
        self._cards = [card for card in self._cards if not card.lost]

    def _one_reason(self, reason: str, names: dict[str, list[str]]) -> str:
        uuids = sorted({uuid for found in names.values() for uuid in found})
        of = f"GPU {uuids[0]}" if len(uuids) == 1 else f"{len(uuids)} GPUs"
        return f"of {of}: {', '.join(names)} ({reason})"

    def _close(self) -> None:
        if self._backend is not None and not any(r.stuck for card in self._cards for r in card.readings):
            self._driver.run([_Plain(self._backend.close)], threading.Event())
        self._driver.leave()


class _Plain:
    """A call that nobody needs to know of when it hangs."""

    def __init__(self, body: Callable[[], Any]) -> None:
        self._body = body

    def __call__(self) -> Any:
        return self._body()

    def left(self) -> None:
        pass

    def late(self) -> None:
        pass


class _Host:
    """The process's own CPU time and memory."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._process.cpu_percent()  # the first call has nothing to compare with

    def read(self) -> HostSample | None:
        try:
            return HostSample(cpu_percent=self._process.cpu_percent(), rss_bytes=self._process.memory_info().rss)
        except psutil.Error:
            return None
