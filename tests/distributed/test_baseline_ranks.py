"""Rows shown before and after a run of two ranks: each takes its share, and neither waits for the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from trl import SFTConfig, SFTTrainer

from ft_insight import FtInsightCallback
from ft_insight.demo.tiny import build_tokenizer
from ft_insight.reader import read_run
from tests.train.conftest import VOCABULARY, moe_model, token_rows
from tests.train.test_baseline import by_hand

ROOT = Path(__file__).parents[2]
LOOK = token_rows([6, 3, 5, 3, 4], seed=5)
SOURCES: dict[str, Any] = {
    "good": LOOK,
    "bad": [{"text": "one"}, {"text": None}],  # fails while rows are prepared, where a trainer's ranks wait
}


def train(folder: Path) -> None:
    """Train twice; runs in each of the two processes."""
    torch.set_num_threads(1)
    tokenizer = build_tokenizer(["one two three four"], vocab_size=VOCABULARY)
    for name, before in SOURCES.items():
        args = SFTConfig(
            output_dir=str(folder / name / "out"),
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            max_steps=2,
            report_to=[],
            save_strategy="no",
            bf16=False,
            use_cpu=True,
            disable_tqdm=True,
        )
        SFTTrainer(
            model=moe_model(),
            args=args,
            train_dataset=token_rows([8] * 8),
            processing_class=tokenizer,
            callbacks=[FtInsightCallback(folder / name / "run.jsonl", before=before)],
        ).train()


def test_two_ranks_share_the_rows(tmp_path: Path) -> None:
    for name in SOURCES:
        (tmp_path / name).mkdir()
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", __name__, str(tmp_path)]
    done = subprocess.run([sys.executable, *launch], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    view, _ = read_run(tmp_path / "good" / "run.jsonl")
    assert view.ranks == 2
    assert (view.rows_before, view.rows_after) == (5, 5)
    assert tuple(load.counts for load in view.experts_before) == by_hand(moe_model(), LOOK)
    assert [load.tokens for load in view.experts_after] == [21, 21]
    assert view.load_change is not None
    assert view.load_change.basis == "the same 5 rows before and after the run"
    failed, status = read_run(tmp_path / "bad" / "run.jsonl")
    assert (status.kind, failed.totals.steps, failed.experts_before) == ("completed", 2, ())
    assert len([n for n in failed.notices if n.collector == "baseline" and n.off]) == 1


if __name__ == "__main__":
    train(Path(sys.argv[1]))
