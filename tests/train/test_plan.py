"""Planning a fine-tune that has not run: against bytes counted by hand, and against a real training step on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig

import ft_insight
from ft_insight.catalog import find_gpu
from ft_insight.cli import main
from ft_insight.estimate.memory import CONTEXT_BYTES
from ft_insight.estimate.plan import PlanError, steps
from ft_insight.estimate.plan.allocator import Allocator, DeviceFullError, replay
from ft_insight.estimate.plan.build import build
from ft_insight.estimate.plan.cuda_kernels import cuda_kernels
from ft_insight.estimate.plan.fit import Scaled, largest, room
from ft_insight.estimate.plan.losses import LOSS
from ft_insight.estimate.plan.models import catalogue, find_config, from_entry
from ft_insight.estimate.plan.setup import Setup
from ft_insight.estimate.plan.trace import GRADIENTS, OPTIMIZER, WEIGHTS, Log, StorageTrace
from ft_insight.report.layout import to_text
from ft_insight.report.plan import headline, plan_sections

HIDDEN, WIDE, VOCABULARY, LAYERS = 64, 160, 512, 2
ATTENTION = 4 * HIDDEN * HIDDEN
MLP = 3 * HIDDEN * WIDE
PARAMETERS = VOCABULARY * HIDDEN * 2 + LAYERS * (ATTENTION + MLP + 2 * HIDDEN) + HIDDEN
MIB = 1 << 20


def tiny(**changes: object) -> LlamaConfig:
    facts = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**facts, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> str:
    tiny().save_pretrained(tmp_path)
    return str(tmp_path)


def up(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


# what each parameter of the tiny model takes when it is bf16
BF16 = sum(
    up(2 * count)
    for count in (
        [VOCABULARY * HIDDEN] * 2 + [HIDDEN] + LAYERS * ([HIDDEN * HIDDEN] * 4 + [HIDDEN * WIDE] * 3 + [HIDDEN] * 2)
    )
)


def test_the_allocator_rounds_splits_and_keeps_as_torchs_does() -> None:
    allocator = Allocator()
    allocator.allocate(0, 1)  # 512 bytes of a segment of 2 MiB
    assert (allocator.allocated, allocator.reserved) == (512, 2 * MIB)
    allocator.allocate(1, MIB + 1)  # beyond 1 MiB: from a segment of 20 MiB
    assert (allocator.allocated, allocator.reserved) == (512 + MIB + 512, 22 * MIB)
    allocator.allocate(2, 9 * MIB)  # from the rest of it
    assert allocator.reserved == 22 * MIB
    allocator.allocate(3, 11 * MIB)  # from 10 MiB on, a segment of its own, of whole 2 MiB
    assert allocator.reserved == 34 * MIB
    allocator.free(3)
    allocator.allocate(4, 11 * MIB + 512)  # 12 MiB are free, and what would be left of them is not worth splitting off
    assert (allocator.reserved, allocator.allocated) == (34 * MIB, 512 + MIB + 512 + 9 * MIB + 12 * MIB)
    allocator.free(4)
    allocator.free(1)
    allocator.free(2)  # the three pieces of 20 MiB are one again
    allocator.allocate(5, 15 * MIB)
    assert allocator.reserved == 34 * MIB
    allocator.free(5)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.allocated) == (2 * MIB, 512)
    assert (allocator.peak_reserved, allocator.peak_allocated) == (34 * MIB, 512 + MIB + 512 + 9 * MIB + 12 * MIB)


def test_a_full_device_gives_its_cache_back_before_it_fails() -> None:
    events = [(0, 12 * MIB), (0, -1), (1, 16 * MIB)]
    assert replay(events).peak_reserved == 28 * MIB
    assert replay(events, 20 * MIB).peak_reserved == 16 * MIB
    with pytest.raises(DeviceFullError):
        replay(events, 15 * MIB)


def test_full_fine_tuning_holds_weights_gradients_and_two_states_each() -> None:
    setup = Setup(method="full", autocast=False, optimizer="adamw_torch", loss="own-dtype", padded=False)
    traced = steps.trace_steps(tiny(), setup, 2, 8)
    assert (traced.parameters, traced.trainable) == (PARAMETERS, PARAMETERS)
    _, parts = traced.log.peak()
    rotary = 2 * up(4 * 8)  # inverse frequencies, and the original ones
    assert parts[WEIGHTS] == BF16 + rotary
    assert parts[GRADIENTS] == BF16
    count = 3 + LAYERS * 9
    assert parts[OPTIMIZER] == 2 * BF16 + count * 512  # and a step each
    assert parts["optimizer temporaries"] >= BF16  # the square root of a whole list of states


def test_lora_trains_its_adapters_in_fp32() -> None:
    traced = steps.trace_steps(tiny(), Setup(rank=4, targets=("q_proj", "v_proj"), loss="trainer"), 2, 8)
    adapters = LAYERS * 2 * 2 * 4 * HIDDEN
    assert traced.trainable == adapters
    assert traced.parameters == PARAMETERS + adapters
    _, parts = traced.log.peak()
    assert parts[WEIGHTS] == BF16 + 2 * up(32) + LAYERS * 4 * up(4 * 4 * HIDDEN)


def test_4_bit_weights_take_half_a_byte_and_their_scales() -> None:
    traced = steps.trace_steps(tiny(), Setup(method="qlora", rank=4, double_quant=True), 2, 8)
    layers = LAYERS * (ATTENTION + MLP)
    assert traced.quantised == layers

    def packed(count: int) -> int:
        blocks = -(-count // 64)
        # codes of 4 bits, scales in 8 bits, scales of those, and the three small tables of each matrix
        return up(count // 2) + up(blocks) + up(4 * -(-blocks // 256)) + up(4 * 16) + up(4 * 256) + up(4)

    kept = 2 * up(2 * VOCABULARY * HIDDEN) + (1 + 2 * LAYERS) * up(2 * HIDDEN) + 2 * up(32)
    matrices = LAYERS * (4 * packed(HIDDEN * HIDDEN) + 3 * packed(HIDDEN * WIDE))
    adapters = LAYERS * 4 * up(2 * 4 * HIDDEN)  # in bf16, as TRL does
    assert traced.log.peak()[1][WEIGHTS] == kept + matrices + adapters


def test_flops_are_those_of_the_matrices() -> None:
    length = 16
    setup = Setup(method="full", autocast=False, checkpointing=False, loss="own-dtype", padded=False)
    traced = steps.trace_steps(tiny(), setup, 2, length)
    matrices = LAYERS * (ATTENTION + MLP) + VOCABULARY * HIDDEN
    attention = LAYERS * 4 * length * HIDDEN  # scores and their use, each 2 x length x size a token
    assert traced.flops_per_token == pytest.approx(3 * 2 * matrices + 3.5 * attention)
    again = steps.trace_steps(tiny(), Setup(method="full", autocast=False, loss="own-dtype", padded=False), 2, length)
    # all of a layer but its last matrix, whose product nothing saves (torch stops the recomputation there)
    recomputed = LAYERS * 2 * (ATTENTION + MLP - HIDDEN * WIDE) + attention
    assert again.flops_per_token - traced.flops_per_token == pytest.approx(recomputed)


def test_8_bit_states_take_a_byte_and_paged_ones_none() -> None:
    def states(optimizer: str) -> int:
        setup = Setup(method="full", optimizer=optimizer, loss="own-dtype", padded=False)
        return steps.trace_steps(tiny(), setup, 2, 8).log.peak()[1][OPTIMIZER]

    sizes = [VOCABULARY * HIDDEN] * 2 + LAYERS * ([HIDDEN * HIDDEN] * 4 + [HIDDEN * WIDE] * 3)
    small = (1 + 2 * LAYERS) * 2 * up(4 * HIDDEN)  # norms stay in fp32
    assert states("adamw_8bit") == small + sum(2 * (up(n) + up(4 * n // 256)) for n in sizes)
    assert states("paged_adamw_8bit") == states("adamw_8bit")  # nothing here is large enough to be paged


def test_the_trace_of_fake_tensors_is_what_a_real_step_allocates() -> None:
    """torch's profiler sees every allocation of a real training step on the CPU."""
    setup = Setup(rank=4, targets=("q_proj", "v_proj"), autocast=False, loss="trainer", checkpointing=False)
    planned = steps.trace_steps(tiny(), setup, 4, 64).log
    log = Log()
    trace = StorageTrace(log)
    with cuda_kernels(trace):
        model = build(tiny(), setup).to_empty(device="cpu")
        run = steps._Run(model, setup, trace, LOSS["trainer"], 4, 64)
        run.trace.see = lambda *_: 0  # type: ignore[method-assign] # the profiler counts here, not the trace
        held = sum(t.untyped_storage().nbytes() for t in [*model.parameters(), *model.buffers()])
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run.two_steps()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    real = {key: nbytes for key, nbytes in planned.events if nbytes >= 0}
    assert len(real) > 100
    assert held + peak == pytest.approx(_unrounded_peak(planned) - 8_519_680, rel=0.03)


def _unrounded_peak(log: Log) -> int:
    live: dict[int, int] = {}
    peak = 0
    for key, nbytes in log.events:
        if nbytes < 0:
            del live[key]
        else:
            live[key] = nbytes
            peak = max(peak, sum(live.values()))
    return peak


def test_two_batches_give_the_log_of_every_other() -> None:
    setup = Setup(rank=4)
    logs = {batch: steps.trace_steps(tiny(), setup, batch, 32).log for batch in (2, 3, 9)}
    scaled = Scaled(2, logs[2], 3, logs[3])
    assert scaled.alike
    mine = {key: nbytes for key, nbytes in scaled.events(9) if nbytes >= 0}
    direct = {key: nbytes for key, nbytes in logs[9].events if nbytes >= 0}
    assert mine.keys() == direct.keys()
    # the memory-efficient kernel pads rows to a multiple: nothing else may differ
    assert sum(mine.values()) == pytest.approx(sum(direct.values()), rel=1e-3)


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    config = tiny(hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8)
    config.max_position_embeddings = 4096
    setup = Setup(method="full", loss="trainer", checkpointing=False)
    logs = [steps.trace_steps(config, setup, batch, 4096).log for batch in (2, 3)]
    gpu = find_gpu("t4")
    best, low, high = largest(Scaled(2, logs[0], 3, logs[1]), gpu)
    assert low <= best <= high
    assert best > 3
    assert room(gpu) == gpu.usable_memory_bytes - CONTEXT_BYTES
    replay(steps.trace_steps(config, setup, best, 4096).log.events, room(gpu))
    with pytest.raises(DeviceFullError):
        replay(steps.trace_steps(config, setup, best + 1, 4096).log.events, room(gpu))


def test_the_catalogue_counts_what_was_published() -> None:
    from transformers import AutoModelForCausalLM

    for entry in catalogue():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(from_entry(entry))
        assert model.num_parameters() == pytest.approx(entry["parameters"], rel=5e-4), entry["name"]
        assert entry["source"].startswith("https://")


def test_a_model_is_found_by_file_folder_name_or_hub_name(folder: str) -> None:
    assert find_config(folder)[0].hidden_size == HIDDEN
    assert find_config(f"{folder}/config.json")[0].hidden_size == HIDDEN
    assert find_config("Llama-3.2-3B")[0].hidden_size == 3072
    assert find_config("meta-llama/Llama-3.2-3B")[0].num_hidden_layers == 28


def test_the_api_returns_one_frozen_answer(folder: str) -> None:
    result = ft_insight.plan(folder, batch=2, seq_len=64, gpus=["t4"])
    assert result.trainable == LAYERS * 2 * 2 * 16 * HIDDEN
    assert sum(result.parts.values()) == result.peak_bytes
    assert result.device_bytes == result.reserved_bytes + CONTEXT_BYTES
    (fit,) = result.fits
    assert fit.fits
    assert fit.largest_batch is not None
    assert fit.largest_batch > 1000
    text = to_text(headline(result), plan_sections(result))
    assert "an estimate, nothing was run" in text
    assert f"{fit.largest_batch:,}" in text
    with pytest.raises(AttributeError):
        result.batch = 3  # type: ignore[misc]


def test_rows_are_read_and_the_longest_counts(folder: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": "x" * n, "completion": "y", "id": "z" * 999}) for n in (10, 298)))
    result = ft_insight.plan(folder, dataset=str(rows), batch=2)
    assert result.seq_len == 100  # 298 + 1 characters and a line break, at 3 a token
    assert any("estimated at 3 characters a token" in notice for notice in result.notices)
    assert ft_insight.plan(folder, dataset=str(rows), batch=2, seq_len=32).seq_len == 32


def test_json_is_strict(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", folder, "--seq-len", "64", "--batch", "2", "--gpu", "t4", "--no-grad-checkpointing"]
    assert main([*asked, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["parameters"] == PARAMETERS + data["trainable"]
    assert data["checkpointing"] is False


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "llama-3.2-3c"], "did you mean llama-3.2-3b"),
        (["--model", "missing/config.json"], "does not exist"),
        (["--model", "llama-3.2-3b", "--gpu", "h1000"], "did you mean"),
        (["--model", "llama-2-7b", "--seq-len", "5000"], "more than the 4,096 positions"),
        (["--model", "llama-2-7b", "--optimizer", "adamm"], "unknown optimizer"),
        (["--model", "llama-2-7b", "--batch", "0"], "batch must be above 0"),
        (["--model", "llama-2-7b", "--dataset", "missing.jsonl"], "does not exist"),
        (["--model", "llama-3.2-1b", "--targets", "no_such_layer"], "PEFT cannot adapt this model"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_a_nonsense_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 1}')
    with pytest.raises(PlanError, match="no model configuration"):
        find_config(str(tmp_path))


def test_fused_experts_stay_out_of_4_bits_and_it_is_said(tmp_path: Path) -> None:
    facts = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        **tiny().to_dict(),
        "num_local_experts": 4,
    }
    facts["model_type"] = "mixtral"
    (tmp_path / "config.json").write_text(json.dumps(facts))
    result = ft_insight.plan(str(tmp_path), method="qlora", batch=2, seq_len=32)
    assert result.quantised == LAYERS * ATTENTION
    assert any("3-D parameter" in notice for notice in result.notices)


def test_help_loads_no_torch() -> None:
    code = "import sys, ft_insight.cli as c\ntry: c.main(['plan', '--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
