"""Whole processes: the demo's training killed at random, two ranks over gloo, what is imported when."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ft_insight import records as r
from ft_insight.reader import read_run
from ft_insight.report import render
from ft_insight.runlog import rank_files, read_records

TRAIN = """
import sys
from ft_insight import FtInsightCallback
from tests.train.conftest import moe_model, token_rows
from ft_insight.demo.tiny import build_tokenizer
from trl import SFTConfig, SFTTrainer
import torch
torch.set_num_threads(1)
steps = int(sys.argv[1])
SFTTrainer(
    model=moe_model(),
    args=SFTConfig(output_dir=sys.argv[2], max_steps=steps, per_device_train_batch_size=2, save_strategy="no",
                   logging_steps=1, report_to=[], bf16=False, use_cpu=True, disable_tqdm=True,
                   dataloader_pin_memory=False),
    train_dataset=token_rows([8] * 64),
    processing_class=build_tokenizer(["one two"], vocab_size=300),
    callbacks=[FtInsightCallback()],
).train()
"""
ROOT = Path(__file__).parent.parent.parent


def environment(log: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "FT_INSIGHT_LOG": str(log), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **more}


@pytest.mark.parametrize("seed", [0, 1])
def test_kill_9_leaves_a_log_that_tells_what_happened(seed: int, tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    training = subprocess.Popen(
        [sys.executable, "-c", TRAIN, "100000", str(tmp_path / "out")],
        env=environment(log),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not (log.exists() and log.stat().st_size > 20_000) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(random.Random(seed).random())
    training.send_signal(signal.SIGKILL)
    training.wait()

    whole = log.read_bytes().rpartition(b"\n")[0]
    parsed = [json.loads(line) for line in whole.split(b"\n")]
    steps = [line["step"] for line in parsed if line["type"] == "step"]
    assert steps == list(range(1, len(steps) + 1))
    view, status = read_run(log)
    assert (status.kind, view.step, view.malformed_lines) == ("stopped", steps[-1], 0)
    assert f"stopped without an end record, after step {steps[-1]}" in render(view, status)
    report = subprocess.run(
        [sys.executable, "-m", "ft_insight.cli", "report", str(log)], capture_output=True, text=True, check=True
    )
    assert "stopped without an end record" in report.stdout


def test_two_ranks_write_a_log_each_and_are_read_as_one_run(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone"]
        + [str(script), "4", str(tmp_path / "out")],
        env=environment(log, OMP_NUM_THREADS="1"),
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=300,
    )
    files = rank_files(log)
    assert [f.name for f in files] == ["run.jsonl", "run.rank1.jsonl"]
    headers = [next(iter(read_records(f)[1])) for f in files]
    assert all(isinstance(h, r.Header) for h in headers)
    assert {h.run_id for h in headers} == {headers[0].run_id}  # type: ignore[union-attr]
    view, status = read_run(log)
    assert (status.kind, view.ranks, view.totals.steps) == ("completed", 2, 4)
    # each rank computes 2 rows of 8 tokens a step
    assert (view.totals.queries, view.totals.real_tokens) == (4 * 2 * 2, 4 * 2 * 2 * 8)
    assert sum(view.experts[0].counts) == 4 * 2 * 2 * 8 * 2
    for file in files:
        steps = [x for x in read_records(file)[1] if isinstance(x, r.Step)]
        assert all(abs(sum(s.phases_s.values()) / s.wall_s - 1) < 0.02 for s in steps)


def test_two_ranks_choose_one_folder_by_default(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
        + [str(script), "2", str(tmp_path / "out")],
        env={k: v for k, v in environment(tmp_path, OMP_NUM_THREADS="1").items() if k != "FT_INSIGHT_LOG"},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=300,
    )
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob("ft_insight_runs/*/*.jsonl"))
    assert len(names) == 2
    assert names[0].endswith("run.jsonl")
    assert names[1] == names[0].replace("run.jsonl", "run.rank1.jsonl")


PLANTED = """
import os, sys
from pathlib import Path
import torch
from collections import defaultdict
from ft_insight import FtInsightCallback
from ft_insight import records as r
from ft_insight.callbacks import clock as clock_module, output as output_module
from ft_insight.demo.tiny import build_tokenizer
from tests.train.conftest import Log, moe_model, token_rows
from tests.train.planted import Book, VirtualClock
from tests.train.test_layers import measured, plant_everywhere
from trl import SFTConfig, SFTTrainer
torch.set_num_threads(1)
clock = VirtualClock()
clock_module.perf_counter = output_module.perf_counter = clock
book, model = Book(clock), moe_model()
plant_everywhere(model, book)
SFTTrainer(
    model=model,
    args=SFTConfig(output_dir=sys.argv[1], max_steps=3, per_device_train_batch_size=2, save_strategy="no",
                   gradient_accumulation_steps=2, logging_steps=1, report_to=[], bf16=False, use_cpu=True,
                   disable_tqdm=True, dataloader_pin_memory=False),
    train_dataset=token_rows([8] * 64),
    processing_class=build_tokenizer(["one two"], vocab_size=300),
    callbacks=[FtInsightCallback(layers_every=1)],
).train()
path = Path(os.environ["FT_INSIGHT_LOG"])
log = Log(path if os.environ["RANK"] == "0" else path.with_name("run.rank1.jsonl"))
assert len(log.of(r.Layers)) == 3
assert measured(log) == {name: dict(rows) for name, rows in book.done.items()}, (measured(log), book.done)
assert book.done["recompute"]
"""


def test_layers_are_exact_in_both_of_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLANTED)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
        + [str(tmp_path / "out")],
        env=environment(tmp_path / "run.jsonl", OMP_NUM_THREADS="1"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
