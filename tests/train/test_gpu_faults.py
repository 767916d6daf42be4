"""A driver that refuses, loses GPUs and hangs: what is lost is told, the rest goes on, and training waits for nothing.

Hangs here end when a file appears, not after a time: what happens meanwhile does not depend on this machine's speed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ft_insight.callbacks.gpu_card import MOST_STUCK, NO_ANSWER
from tests.train.conftest import Log
from tests.train.nvml_library import FAKES, FIRST, SECOND, Cases, samples_of

READINGS = 15
"""How many things are read of a GPU, by the table in ``gpu_nvml``."""


def test_driver_not_loaded(cases: Cases, library: Path) -> None:
    result = cases.run(library, SECOND, FAKE_NVML_FAULTS="init:9")
    assert result["told"] == [["no GPU statistics: NVML says Driver Not Loaded", True]]
    assert result["records"][-1] == [[], 0, True]


def test_a_gpu_that_nvml_does_not_know(cases: Cases, library: Path) -> None:
    unknown = "99999999-0000-0000-0000-000000000000"
    result = cases.run(library, unknown, SECOND)
    assert {s["uuid"] for record in result["records"] for s in record[0]} == {SECOND}
    assert result["told"][0] == [f"no statistics of GPU {unknown}: NVML does not know GPU {unknown}", False]


def test_permission_that_ends_in_mid_run(cases: Cases, library: Path) -> None:
    result = cases.run(library, SECOND, FAKE_NVML_FAULTS="power:4@3", records=6)
    seen = samples_of(result)
    assert [s.get("power_w") for s in seen[:4]] == [271.5, 271.5, None, None]
    assert seen[2]["unknown"] == {"power_w": "Insufficient Permissions"}
    assert seen[5]["temperature_c"] == 62
    assert [f"not known of GPU {SECOND}: power (Insufficient Permissions)", False] in result["told"]


def test_a_passing_error_is_forgotten(cases: Cases, library: Path) -> None:
    seen = samples_of(cases.run(library, SECOND, FAKE_NVML_FAULTS="power:999@2-3", records=5))
    assert [s.get("power_w") for s in seen[:5]] == [271.5, None, None, 271.5, 271.5]
    assert seen[1]["unknown"] == {"power_w": "NVMLError_Unknown: Unknown Error"}
    assert seen[3]["unknown"] == {"power_w": ""}  # known again


def test_an_error_that_stays_ends_the_reading(cases: Cases, library: Path) -> None:
    result = cases.run(library, SECOND, FAKE_NVML_FAULTS="power:999", records=8)
    assert all("power_w" not in s for s in samples_of(result))
    assert sum("power (NVMLError_Unknown" in text for text, _ in result["told"]) == 1


def test_a_lost_gpu_ends_its_samples_and_no_others(cases: Cases, library: Path) -> None:
    result = cases.run(library, FIRST, SECOND, FAKE_NVML_FAULTS="temperature/1:15@3", records=6)
    by_record = [[s["uuid"] for s in record[0]] for record in result["records"] if record[0]]
    assert by_record[:4] == [[FIRST, SECOND], [FIRST, SECOND], [FIRST, SECOND], [FIRST]]
    assert samples_of(result, 1)[2]["lost"] is True
    assert "lost" not in samples_of(result, 1)[1]
    assert [f"GPU {SECOND} is lost: no statistics of it follow", False] in result["told"]


def test_the_only_gpu_is_lost(cases: Cases, library: Path) -> None:
    result = cases.run(library, SECOND, FAKE_NVML_FAULTS="utilisation:15@2", records=6)
    assert len(samples_of(result)) == 2
    assert [f"GPU {SECOND} is lost: no statistics of it follow", True] in result["told"]
    assert result["records"][-1] == [[], 0, True]


def test_a_call_that_hangs_costs_its_own_field_only(cases: Cases, library: Path, tmp_path: Path) -> None:
    result = cases.run(
        library,
        SECOND,
        records=8,
        limit_s=0.2,
        release_after=5,
        FAKE_NVML_FAULTS="power:hang@2-2",
        FAKE_NVML_RELEASE=str(tmp_path / "release"),
        FAKE_NVML_HANGING=str(tmp_path / "hanging"),
    )
    seen = samples_of(result)
    assert (tmp_path / "hanging").read_text() == "hr"
    assert seen[0]["power_w"] == 271.5
    stuck = [i for i, s in enumerate(seen) if "power_w" not in s]
    assert stuck[:3] == [1, 2, 3]
    assert seen[stuck[-1] + 1]["power_w"] == 271.5  # it returned, and is asked again
    assert all(s["temperature_c"] == 62 and s["xid"] is not None for s in seen)
    assert seen[1]["unknown"] == {"power_w": NO_ANSWER}
    dropped = [record[1] for record in result["records"] if record[0]]
    assert dropped[0] == 0
    assert all(dropped[i] >= 1 for i in stuck)
    assert f"power ({NO_ANSWER})" in " ".join(text for text, _ in result["told"])


def test_a_driver_that_hangs_altogether(cases: Cases, library: Path) -> None:
    names = "utilisation,memory,processes,power,limit,energy,temperature,sm clock,memory clock,throttle,pcie,nvlink"
    faults = ",".join(f"{name}:hang" for name in names.split(","))
    result = cases.run(library, SECOND, records=5, limit_s=0.05, FAKE_NVML_FAULTS=faults, FAKE_NVML_HANG_MS="20000")
    dropped = [record[1] for record in result["records"] if record[0]]
    assert result["hanging"] <= MOST_STUCK + 1  # threads: those that hang, and the one that goes on
    assert all(d >= READINGS - 1 - 1 for d in dropped[1:])  # all but the counters, which ended, and one more
    assert result["stop_s"] < 10  # each call hangs for 20 s


def test_an_init_that_hangs(cases: Cases, library: Path, tmp_path: Path) -> None:
    result = cases.run(
        library,
        SECOND,
        records=60,
        interval_s=0.02,
        release_after=20,
        FAKE_NVML_FAULTS="init:hang",
        FAKE_NVML_RELEASE=str(tmp_path / "release"),
    )
    assert all(record[0] == [] and record[2] for record in result["records"][:15])  # the process goes on being sampled
    assert samples_of(result)  # and the GPU as soon as it can be
    never = cases.run(library, SECOND, records=3, FAKE_NVML_FAULTS="init:hang", FAKE_NVML_HANG_MS="20000")
    assert never["stop_s"] < 10


def test_ending_does_not_wait_for_a_call_that_hangs(cases: Cases, library: Path, tmp_path: Path) -> None:
    hangs = tmp_path / "hanging"
    result = cases.run(
        library,
        SECOND,
        records=1_000_000,
        limit_s=60.0,
        until_hanging=hangs,
        FAKE_NVML_FAULTS="memory:hang@2",
        FAKE_NVML_HANG_MS="60000",
        FAKE_NVML_HANGING=str(hangs),
    )
    assert result["stop_s"] < 20  # the call itself, and its limit, are 60 s; it is given up after one
    assert result["hanging"] == 1


TRAIN = """
import sys
from pathlib import Path
from ft_insight import FtInsightCallback
from ft_insight.callbacks import facts
from ft_insight.records import Device
from tests.train.conftest import dense_model, token_rows
from ft_insight.demo.tiny import build_tokenizer
from trl import SFTConfig, SFTTrainer

folder = Path(sys.argv[1])
facts.devices = lambda args, model: (Device(kind="cuda", name="a GPU", uuid=sys.argv[2]),)
steps_while_hanging = 0


class Watch(FtInsightCallback):
    def on_step_end(self, *args, **kwargs):
        global steps_while_hanging
        told = folder / "hanging"
        steps_while_hanging += told.exists() and told.read_text() == "h"


config = SFTConfig(output_dir=str(folder / "out"), per_device_train_batch_size=2, max_steps=150, report_to=[],
                   save_strategy="no", bf16=False, use_cpu=True, disable_tqdm=True, logging_steps=100)
SFTTrainer(model=dense_model(), args=config, train_dataset=token_rows([8] * 16),
           callbacks=[Watch(folder / "run.jsonl")],
           processing_class=build_tokenizer(["one two"], vocab_size=300)).train()
print("steps while hanging", steps_while_hanging)
"""


@pytest.fixture
def hung_training(library: Path, tmp_path: Path) -> tuple[str, Log]:
    """Train 150 steps while one call into the driver hangs, from the first sample to after the process should end."""
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(library.parent),
        "FAKE_NVML_FAULTS": "memory:hang",
        "FAKE_NVML_HANG_MS": "120000",
        "FAKE_NVML_HANGING": str(tmp_path / "hanging"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, str(tmp_path), SECOND],
        capture_output=True,
        text=True,
        env=environment,
        cwd=FAKES.parent.parent,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, Log(tmp_path / "run.jsonl")


def test_training_goes_on_and_ends_while_a_call_hangs(hung_training: tuple[str, Log], tmp_path: Path) -> None:
    from ft_insight import records as r

    printed, log = hung_training
    assert (tmp_path / "hanging").read_text() == "h"  # it never returned: the process ended all the same
    assert log.end.status == "completed"
    assert len(log.steps) == 150
    steps = int(printed.split("steps while hanging")[1])
    assert steps >= 75  # all but those before the first sample: nothing in a step waits for the sampler
    samples = [record for record in log.of(r.Gpu) if record.samples]
    assert samples
    assert all(record.dropped >= 1 for record in samples)
    assert all(record.samples[0].power_w == 271.5 for record in samples)
