"""The Memory page: what fills memory with the card's limit, the room in queries, the curves and the failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_insight import records as r
from ft_insight.tui.app import WatchApp
from tests.tui.made import GIB, encoded, gpu, header, step, wait_for

TOTAL = 44 * GIB
SIZES = [(80, 24), (120, 40), (160, 48)]
DATA = r.DatasetFacts(queries=100, length_values=(100, 200, 400), length_counts=(5, 3, 2), longest=400)
TRAIN = r.TrainFacts(trainer="SFTTrainer", method="qlora", lora_rank=16, max_steps=1240, batch=4)
PEAK = r.MemoryMoment(
    name="peak",
    step=2,
    allocated_bytes=30 * GIB,
    slots=1600,
    parts=(
        r.MemoryPart("quantised_weights", "nf4", 20 * GIB),
        r.MemoryPart("quantised_weights", "constants", GIB),
        r.MemoryPart("weights", "bfloat16", 2 * GIB),
        r.MemoryPart("adapters", "float32", GIB // 2),
        r.MemoryPart("optimizer_state", "float32", GIB),
        r.MemoryPart("activations", "experts", 3 * GIB),
        r.MemoryPart("activations", "attention", GIB),
        r.MemoryPart("temporaries", "", GIB),
        r.MemoryPart("other", "", GIB // 2),
    ),
)


def gpu_run(card: r.Device, *more: r.Record) -> list[r.Record]:
    """10 GiB and 4 MiB a slot, batches of 4 rows that grow from 100 to 400 tokens."""
    items: list[r.Record] = [header(devices=(card,), train=TRAIN, dataset=DATA)]
    highest = 0
    for number, row in enumerate((100, 150, 200, 120, 250, 300, 400, 300, 200), 1):
        slots = 4 * row
        peak = 10 * GIB + slots * 4 * 1024**2
        told = r.MicroMemory(max(peak, highest), peak > highest, peak - GIB)
        highest = max(peak, highest)
        memory = r.Memory(
            allocated_bytes=9 * GIB,
            reserved_bytes=20 * GIB,
            peak_allocated_bytes=highest,
            peak_reserved_bytes=highest + GIB,
            base_bytes=9 * GIB,
            micro=(told,),
        )
        items.append(step(number, memory=memory, micro=(r.MicroBatch(4, slots, slots, slots, 1.5),)))
    return [*items, r.MemoryParts(step=2, t_s=4.0, method="allocator", moments=(PEAK,)), *more]


CARD = r.Device(kind="cuda", name="NVIDIA A40", index=0, uuid="GPU-1", memory_bytes=TOTAL)
SAMPLE = gpu(18.0, memory_used_bytes=22 * GIB, process_memory_bytes=20 * GIB + GIB // 2, memory_total_bytes=TOTAL)


async def shown_at(log: Path, size: tuple[int, int], wanted: str) -> str:
    async with WatchApp(log).run_test(size=size) as pilot:
        await wait_for(pilot, "step 9")
        await pilot.press("6")
        return await wait_for(pilot, wanted)


@pytest.mark.parametrize("size", SIZES)
async def test_what_fills_the_card(log: Path, size: tuple[int, int]) -> None:
    log.write_bytes(encoded(gpu_run(CARD, SAMPLE)))
    shown = " ".join((await shown_at(log, size, "30.0 GiB")).split())
    for row in (
        "■ quantised weights 21.0 GiB 48% nf4 20.0 GiB, constants 1.0 GiB",
        "■ weights 2.0 GiB 4.5% bfloat16",
        "■ activations 4.0 GiB 9.1% experts 3.0 GiB, attention 1.0 GiB",
        "■ optimizer state 1.0 GiB 2.3% float32",
        "■ allocator reserve 1.0 GiB",
        # 20.5 GiB of this process, of which 20 are reserved; 22 in use on the card
        "■ CUDA context 512 MiB",
        "■ other processes 1.5 GiB",
        # 44 less 30, 1, 0.5 and 1.5
        "□ free 11.0 GiB of 44.0 GiB",
    ):
        assert row in shown, (row, shown)


async def test_the_room_is_told_in_queries(log: Path) -> None:
    log.write_bytes(encoded(gpu_run(CARD, SAMPLE)))
    shown = " ".join((await shown_at(log, (120, 50), "room for")).split())
    # 44 GiB less 4%, 0.5 of context, 1.5 of others, 10 fixed: 30.24 GiB, of 400 slots x 4 MiB a row
    assert "room for batch 19; you use 4" in shown
    assert "at 400 tokens, the longest row 19 [18-20]" in shown
    assert "per slot 4.00 MiB [4.00 MiB-4.00 MiB] · fixed 10.0 GiB" in shown
    assert "1.8 GiB left free for fragmentation" in shown
    assert "memory, by step" in shown
    assert "1,600 slots" in shown


async def test_a_failure_is_said_in_words(log: Path) -> None:
    failure = r.OutOfMemory(
        step=10,
        t_s=19.0,
        phase="forward",
        message="CUDA out of memory",
        queries=32,
        slots=12_800,
        requested_bytes=2 * GIB,
        allocated_bytes=43 * GIB,
        parts=PEAK.parts,
        largest="quantised_weights",
        fits=(19, 17, 20),
    )
    log.write_bytes(encoded(gpu_run(CARD, SAMPLE, failure)))
    shown = " ".join((await shown_at(log, (120, 50), "memory ended")).replace("│", " ").split())
    assert "▲ memory ended in step 10, forward with 32 x 400 slots, for want of 2.0 GiB" in shown
    assert "most was quantised weights (21.0 GiB of 43.0 GiB); batch 19 [17-20] would have fitted" in shown


@pytest.mark.parametrize("size", SIZES)
async def test_a_cpu_run_shows_what_was_counted_and_why_the_rest_is_not(log: Path, size: tuple[int, int]) -> None:
    parts = (r.MemoryPart("weights", "float32", 4096), r.MemoryPart("optimizer_state", "float32", 8192))
    moment = r.MemoryMoment(name="between", step=1, allocated_bytes=12_288, parts=parts)
    items: list[r.Record] = [header(devices=(r.Device(kind="cpu", name="a CPU"),), train=TRAIN, dataset=DATA)]
    items += [step(n, memory=r.Memory(rss_bytes=GIB + n)) for n in range(1, 10)]
    items.append(r.MemoryParts(step=1, t_s=2.0, method="storages", moments=(moment,)))
    log.write_bytes(encoded(items))
    shown = " ".join((await shown_at(log, size, "12.0 KiB")).split())
    assert "■ weights 4.00 KiB 33% float32" in shown
    assert "■ optimizer state 8.00 KiB 67% float32" in shown
    assert "n/a activations: no step was looked at yet" in shown
    assert "n/a limit: a CPU run has no card" in shown
    assert "n/a room: the run computed on a CPU" in shown
    if size[1] > 30:
        assert "n/a: no micro-batch with a known peak yet" in shown
        assert "resident memory of the process" in shown


async def test_before_anything_is_known(log: Path) -> None:
    async with WatchApp(log).run_test(size=(80, 24)) as pilot:
        await wait_for(pilot, "waiting for")
        await pilot.press("6")
        await wait_for(pilot, "nothing yet")
