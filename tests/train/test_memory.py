"""What fills memory, against bytes counted by hand; nothing of the training changes for it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTTrainer

from ft_insight import FtInsightCallback
from ft_insight import records as r
from ft_insight.callbacks import memory_watch
from ft_insight.callbacks.guard import Guard
from ft_insight.callbacks.memory_look import CountedLook, left_behind
from ft_insight.callbacks.memory_watch import MemoryWatch
from ft_insight.callbacks.modules import Part, find_parts
from ft_insight.callbacks.oom import is_out_of_memory, requested_bytes
from ft_insight.callbacks.storages import Inventory, take_inventory
from tests.train.conftest import Log, MakeTrainer, dense_model, lora, moe_model, token_rows

CPU = torch.device("cpu")


def guard() -> Guard:
    def fail(collector: str, reason: str) -> None:
        raise AssertionError(f"{collector}: {reason}")

    return Guard(fail)


def sums(moment: r.MemoryMoment | None) -> dict[str, int]:
    """Bytes by category; they must add up to the whole."""
    assert moment is not None
    found: dict[str, int] = {}
    for part in moment.parts:
        found[part.category] = found.get(part.category, 0) + part.bytes
    assert sum(found.values()) == moment.allocated_bytes
    assert set(found) <= set(r.MEMORY_CATEGORIES)
    return found


def parts_of(moment: r.MemoryMoment, category: str) -> dict[str, int]:
    return {p.detail: p.bytes for p in moment.parts if p.category == category}


def moments(log: Log, step: int) -> dict[str, r.MemoryMoment]:
    record = next(x for x in log.of(r.MemoryParts) if x.step == step)
    return {m.name: m for m in record.moments}


def trained(make_trainer: MakeTrainer, path: Path, **settings: Any) -> tuple[SFTTrainer, Log]:
    trainer = make_trainer([FtInsightCallback(path)], **{"max_steps": 3, **settings})
    trainer.train()
    return trainer, Log(path)


# runs


def test_a_full_fine_tune_holds_four_four_and_eight_bytes_a_parameter(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer, log = trained(make_trainer, tmp_path / "run.jsonl")
    count = sum(p.numel() for p in trainer.model.parameters())
    tensors = len(list(trainer.model.parameters()))
    states = 8 * count + 4 * tensors  # AdamW's two moments, and a step count for each tensor
    buffers = sum(b.numel() * b.element_size() for b in trainer.model.buffers())
    assert [record.step for record in log.of(r.MemoryParts)] == [1, 2]
    for step in (1, 2):
        between = moments(log, step)["between"]
        assert sums(between) == {"weights": 4 * count, "optimizer_state": states, "buffers": buffers}
        assert parts_of(between, "weights") == {"float32": 4 * count}
    looked = moments(log, 2)
    assert set(looked) == {"between", "forward", "peak", "backward"}
    backward = sums(looked["backward"])
    assert backward["gradients"] == 4 * count
    assert backward["optimizer_state"] == states
    assert "activations" not in backward
    forward = sums(looked["forward"])
    assert "gradients" not in forward
    slots, width = looked["forward"].slots or 0, 32
    kinds = parts_of(looked["forward"], "activations")
    # what the embedding makes goes into the first norm and beside it: fp32, 32 wide
    assert kinds["embedding"] == 4 * slots * width
    # gate, up, the activation of gate and the product of both, 64 wide, in 2 layers
    assert kinds["mlp"] == 2 * 4 * slots * 64 * 4
    peak = looked["peak"]
    assert peak.allocated_bytes >= max(looked["forward"].allocated_bytes, looked["backward"].allocated_bytes)
    assert sums(peak)["weights"] == 4 * count
    step = log.steps[1]
    assert step.memory is not None
    assert step.memory.micro == (r.MicroMemory(peak.allocated_bytes, True, looked["forward"].allocated_bytes),)


def test_adapters_are_told_apart(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer, log = trained(make_trainer, tmp_path / "run.jsonl", peft_config=lora())
    adapters = [p for n, p in trainer.model.named_parameters() if "lora_" in n]
    count = sum(p.numel() for p in adapters)
    # q and v of 2 layers: 4 x (32 + 32) and 4 x (32 + 16)
    assert count == 2 * (4 * 64 + 4 * 48)
    base = sum(p.numel() for n, p in trainer.model.named_parameters() if "lora_" not in n)
    backward = sums(moments(log, 2)["backward"])
    assert backward["adapters"] == backward["gradients"] == 4 * count
    assert backward["weights"] == 4 * base
    assert backward["optimizer_state"] == 8 * count + 4 * len(adapters)


def test_a_checkpointed_layer_keeps_its_input_alone(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    _, log = trained(make_trainer, tmp_path / "run.jsonl", checkpointing=True, peft_config=lora())
    looked = moments(log, 2)
    kinds = parts_of(looked["forward"], "activations")
    slots = looked["forward"].slots or 0
    assert kinds["layer"] == 2 * 4 * slots * 32  # what two layers hand on
    assert not {"mlp", "attention"} & set(kinds)


def test_under_accumulation_the_gradients_are_there_before_the_last_micro_batch(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer, log = trained(
        make_trainer, tmp_path / "run.jsonl", gradient_accumulation_steps=2, rows=token_rows([8] * 12)
    )
    count = sum(p.numel() for p in trainer.model.parameters())
    looked = moments(log, 2)
    assert sums(looked["forward"])["gradients"] == sums(looked["backward"])["gradients"] == 4 * count
    memory = log.steps[1].memory
    assert memory is not None
    assert [m.exact for m in memory.micro] == [False, True]


@pytest.mark.parametrize("case", ["dense", "lora, checkpointing", "mixture of experts"])
def test_a_look_at_every_step_changes_no_loss(
    case: str, make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_watch.Sampling, "due", lambda self: True)

    def losses(callbacks: list[Any]) -> Any:
        settings: dict[str, Any] = {"max_steps": 4}
        if case == "lora, checkpointing":
            settings |= {"peft_config": lora(), "checkpointing": True}
        model = moe_model() if case == "mixture of experts" else dense_model()
        trainer = make_trainer(callbacks, model=model, **settings)
        trainer.train()
        return (
            [(x.get("loss"), x.get("grad_norm")) for x in trainer.state.log_history],
            [p.detach().clone() for p in trainer.model.parameters()],
        )

    without, weights = losses([])
    path = tmp_path / "run.jsonl"
    observed, observed_weights = losses([FtInsightCallback(path, layers_every=0)])
    assert observed == without
    assert all(torch.equal(a, b) for a, b in zip(weights, observed_weights, strict=True))
    log = Log(path)
    assert [len(record.moments) for record in log.of(r.MemoryParts)] == [4, 4, 4, 4]
    assert log.notices == [] or not any("off" in text for text in log.notices)


def test_a_look_is_paid_for_out_of_a_budget(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    _, log = trained(make_trainer, tmp_path / "run.jsonl", max_steps=24)
    assert [record.step for record in log.of(r.MemoryParts)] == [1, 2]  # a tiny model's step pays for few
    looked = log.steps[1]
    assert looked.self_s is not None
    others = sorted(s.self_s or 0.0 for s in log.steps[4:])
    assert looked.self_s > others[len(others) // 2]


# storages


def test_tied_weights_and_views_count_once() -> None:
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    unique = {p.data_ptr(): p.numel() for p in model.parameters()}
    found = take_inventory(model, None, CPU)
    assert found.parts["weights", "float32"] == 4 * sum(unique.values())
    assert len(model.lm_head.weight) == 100
    bucket = torch.zeros(model.lm_head.weight.numel() + 50)
    model.lm_head.weight.grad = bucket[: model.lm_head.weight.numel()].view(100, 16)
    model.model.norm.weight.grad = bucket[-16:]
    # gradients that are views into one bucket, as DDP has them, are as large as the bucket
    assert take_inventory(model, None, CPU).parts["gradients", "float32"] == 4 * bucket.numel()


@pytest.mark.parametrize("nested", [False, True])
def test_four_bit_weights_with_their_constants(nested: bool) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    rows, columns = 512, 256
    linear = bnb.nn.Linear4bit(columns, rows, bias=False, quant_type="nf4", compress_statistics=nested)
    linear.weight = bnb.nn.Params4bit(
        torch.randn(rows, columns), requires_grad=False, quant_type="nf4", compress_statistics=nested
    )
    found = take_inventory(nn.Sequential(linear.to("cpu")), None, CPU)
    count = rows * columns
    blocks = count // 64
    # 4 bits a weight; a scale for each 64, and the code book of 16 numbers
    constants = 4 * blocks + 4 * 16
    if nested:
        # 8 bits a scale, a scale for each 256 of these, their code book of 256 numbers, and an offset
        constants = blocks + 4 * (blocks // 256) + 4 * 256 + 4 + 4 * 16
    assert found.parts == {("quantised_weights", "nf4"): count // 2, ("quantised_weights", "constants"): constants}


def test_eight_bit_states_and_what_is_paged_to_the_host() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model = nn.Linear(128, 64, bias=False)
    optimizer = bnb.optim.AdamW8bit(model.parameters())
    model(torch.ones(1, 128)).sum().backward()
    optimizer.step()
    found = take_inventory(model, optimizer, CPU).parts
    count = 128 * 64
    assert found["optimizer_state", "uint8"] == 2 * count
    # a scale for each 256, and a code book of 256 numbers, for each of the two states
    assert found["optimizer_state", "float32"] == 2 * 4 * (count // 256 + 256)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.is_paged = True
    assert not any(category == "optimizer_state" for category, _ in take_inventory(model, optimizer, CPU).parts)


def test_what_lies_on_another_device_does_not_count() -> None:
    model = nn.Linear(4, 4)
    assert take_inventory(model, None, torch.device("cuda", 0)).parts == {}
    assert take_inventory(nn.Linear(4, 4, device="meta"), None, CPU).parts == {}


# one micro-batch


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).pow(2).sum()  # type: ignore[no-any-return]


def look_at(model: nn.Module, parts: list[Part], *inputs: torch.Tensor) -> tuple[CountedLook, Any, Any]:
    static = take_inventory(model, None, CPU)
    for tensor in inputs:
        static.add("other", "batch", tensor)
    look = CountedLook(parts, guard(), static)
    look.begin()
    loss = model(*inputs)
    forward = look.activations()
    loss.backward()
    look.end()
    return look, forward, look.after_backward(list(model.parameters()))


def test_activations_of_a_small_network_by_hand() -> None:
    rows = 32
    _, forward, (peak, at_peak, left) = look_at(Loss(), [], torch.randn(rows, 8))
    # the rectified hidden layer waits for both of its neighbours; the output and the loss; the rest is released
    assert forward == {("activations", "model"): 4 * rows * 16 + 4 * rows * 4 + 4}
    gradients = 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert left == {("gradients", "float32"): gradients, ("other", ""): 4}  # and the loss itself
    assert peak == sum(at_peak.values())
    # at its highest: all that waits, the gradients of the loss, of the output, and of the hidden layer
    assert peak >= forward["activations", "model"] + 4 * rows * 16


def test_the_peak_is_what_the_allocator_itself_reports(tmp_path: Path) -> None:
    """Against torch's profiler, which hears of every allocation in C++."""
    ids = torch.randint(10, 200, (2, 48))

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = dense_model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids=x, labels=x).loss  # type: ignore[no-any-return]

    model = Causal()
    model(ids).backward()  # caches of the first call
    model.zero_grad()
    look, _, (peak, _, _) = look_at(model, find_parts(model.inner), ids)
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        loss = model(ids)
        loss.backward()
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    current = highest = 0
    for _, count in changes:
        current += count
        highest = max(highest, current)
    assert len(look.counter.storages) > 200
    # operators' own scratch space is not seen by storages
    assert 0.97 * highest <= peak <= highest * 1.001


def test_what_a_part_leaves_behind() -> None:
    assert left_behind("layer", 100, {"attention": 30, "mlp": 50}) == {"attention": 30, "mlp": 50, "layer": 20}
    assert left_behind("layer", 10, {"attention": 30, "mlp": 50}) == {"layer": 10}  # it recomputes
    assert left_behind("layer", 0, {"attention": 30}) == {}
    assert left_behind("layer", 72, {"attention": 30, "mlp": 50}) == {"attention": 27, "mlp": 45}
    assert left_behind("norm", 7, {}) == {"norm": 7}


# a device with an allocator


class Allocator:
    """torch's statistics, by hand."""

    def __init__(self, current: int) -> None:
        self.current = self.peak = current

    def take(self, count: int) -> None:
        self.current += count
        self.peak = max(self.peak, self.current)

    def stats(self, device: Any = None) -> dict[str, Any]:
        return {
            "allocated_bytes": {"all": {"current": self.current, "peak": self.peak}},
            "reserved_bytes": {"all": {"current": self.current + 5}},
            "inactive_split_bytes": {"all": {"current": 3}},
        }


class Takes(nn.Module):
    """Takes memory of the device when it is called: so much stays, so much is given back."""

    def __init__(self, device: Allocator, stays: int, passes: int = 0, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)
        self.call = (device, stays, passes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device, stays, passes = self.call
        for module in self.inner:
            x = module(x)
        device.take(passes)
        device.take(-passes)
        device.take(stays)
        return x * 1.0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    allocator = Allocator(1000)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", allocator.stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 9000))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: pytest.fail("nobody may reset"))
    return allocator


def on_a_gpu(device: Allocator) -> tuple[MemoryWatch, nn.Module]:
    attention, mlp = Takes(device, 40, 100), Takes(device, 60)
    layer = Takes(device, 5, 0, attention, mlp)
    norm, head = Takes(device, 7), Takes(device, 200)
    model = Takes(device, 3, 0, layer, norm, head)
    outer = Part("layer", layer, "layer", 0)
    parts = [outer, Part("a", attention, "attention", 0, outer), Part("m", mlp, "mlp", 0, outer)]
    parts += [Part("n", norm, "final_norm"), Part("h", head, "head")]
    watch = MemoryWatch(model, parts, guard(), CPU, lambda: None, counts=False)
    watch.on_gpu = watch._looks = True
    return watch, model


def one_step(
    watch: MemoryWatch, model: nn.Module, device: Allocator, backward: int = 300, optimizer: int = 0
) -> tuple[r.Memory, r.MemoryParts | None]:
    begun = device.current
    watch.step_begins(free=True)
    watch.expect(1)
    watch.micro_begins({}, 64)
    watch.forward_begins()
    x = model(torch.ones(2, requires_grad=True))
    watch.backward_begins()
    device.take(backward)
    device.take(begun + 50 - device.current)  # gradients stay
    x.sum().backward()
    watch.micro_ends()
    device.take(optimizer)
    device.take(begun - device.current)
    memory = watch.step_ends(r.Memory(allocated_bytes=device.current, reserved_bytes=device.current + 5))
    assert memory is not None
    return memory, watch.take(1, 0.0, memory)


def test_the_own_peak_of_a_micro_batch_without_a_reset(device: Allocator) -> None:
    watch, model = on_a_gpu(device)
    first, told = one_step(watch, model, device)
    # 1,000 at first; 40 + 60 + 5 + 7 + 200 + 3 wait for backward, which takes 300 more
    assert first.micro == (r.MicroMemory(1615, True, 1315),)
    assert first.base_bytes == 1000
    assert told is not None
    assert [m.name for m in told.moments] == ["between"]
    again, told = one_step(watch, model, device, backward=200)  # the second step is looked at
    # it rose no higher: 1,615 is a bound; what was read within is a bound from below
    assert again.micro == (r.MicroMemory(1615, False, 1315),)
    assert told is not None
    assert [m.name for m in told.moments] == ["between", "forward", "backward"]
    third, _ = one_step(watch, model, device, backward=900)
    assert third.micro[0].peak_bytes == 2215
    assert third.micro[0].exact
    device.peak = device.current  # another monitor resets
    fourth, _ = one_step(watch, model, device, backward=100)
    assert fourth.micro == (r.MicroMemory(1415, True, 1315),)


def test_a_reset_within_a_micro_batch_leaves_its_peak_unknown(device: Allocator) -> None:
    watch, _ = on_a_gpu(device)
    device.take(500)
    device.take(-500)
    watch.step_begins(free=False)
    watch.micro_begins({}, 64)
    device.peak = device.current
    watch.micro_ends()
    memory = watch.step_ends(r.Memory(allocated_bytes=1000))
    assert memory is not None
    assert memory.micro == (r.MicroMemory(None, False, 1000),)


def test_what_waits_for_backward_by_kind_of_layer(device: Allocator) -> None:
    watch, model = on_a_gpu(device)
    one_step(watch, model, device)
    _, told = one_step(watch, model, device, backward=800, optimizer=2000)
    assert told is not None
    found = {m.name: m for m in told.moments}
    forward = found["forward"]
    assert forward.allocated_bytes == 1315
    assert parts_of(forward, "activations") == {"attention": 40, "mlp": 60, "layer": 5, "final_norm": 7}
    assert sums(forward)["logits_and_loss"] == 203
    assert sums(forward)["other"] == 1000
    peak = sums(found["peak"])
    assert found["peak"].allocated_bytes == 2115
    assert peak["temporaries"] == 800
    assert peak["activations"] == 112
    assert found["backward"].allocated_bytes == 1050
    # the optimizer went beyond it: 1,050 and 2,000
    assert found["optimizer"].allocated_bytes == 3050
    assert sums(found["optimizer"])["temporaries"] == 2000
    assert (told.reserved_bytes, told.method) == (1005, "allocator")
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_what_is_allocated_between_steps_is_counted_anew_when_it_changes(device: Allocator) -> None:
    watch, model = on_a_gpu(device)
    watch._looks = False
    assert one_step(watch, model, device)[1] is not None
    assert one_step(watch, model, device)[1] is None
    device.take(40)
    assert one_step(watch, model, device)[1] is None
    device.take(40)
    told = one_step(watch, model, device)[1]
    assert told is not None
    assert told.moments[0].allocated_bytes == 1080


# memory that ends


class Small(SFTTrainer):
    """A device that holds no more than so many slots."""

    most = 40
    error: type[RuntimeError] = torch.OutOfMemoryError
    text = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 44.42 GiB"

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if inputs["input_ids"].numel() > self.most:
            raise self.error(self.text)
        return super().compute_loss(model, inputs, *args, **kwargs)


def test_a_failure_leaves_a_record_before_it_goes_on(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    rows = token_rows([10] * 4 + [30] * 4)  # steps 1 and 2 fit, the third does not
    trainer = make_trainer(
        [FtInsightCallback(path)], trainer_class=Small, rows=rows, train_sampling_strategy="sequential"
    )
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    assert str(caught.value) == Small.text
    log = Log(path)
    (told,) = log.of(r.OutOfMemory)
    assert (told.step, told.queries, told.slots) == (3, 2, 60)
    assert told.requested_bytes == 2.5 * 2**30
    assert told.message == Small.text
    assert told.phase in r.STEP_PHASES
    count = sum(p.numel() for p in trainer.model.parameters())
    weights = sum(p.bytes for p in told.parts if p.category == "weights")
    states = sum(p.bytes for p in told.parts if p.category == "optimizer_state")
    assert (weights, states) == (4 * count, 8 * count + 4 * len(list(trainer.model.parameters())))
    assert told.largest == "optimizer_state"
    # 20 slots were computed, 60 were too many: of rows of 30 slots 0 for certain, 1 at most
    assert (told.fits, told.unknown) == (None, "no smaller micro-batch was computed before it")
    assert (log.end.status, log.records.index(told) < log.records.index(log.end)) == ("failed", True)
    for module in trainer.model.modules():
        assert not any("ft_insight" in type(hook).__module__ for hook in module._forward_hooks.values())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_retries_are_attempts_and_what_failed_bounds_the_answer(
    error: type[RuntimeError], make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Small, "error", error)
    monkeypatch.setattr(Small, "most", 60)
    if error is RuntimeError:
        text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 640 bytes. Error code 12"
        monkeypatch.setattr(Small, "text", text)
    path = tmp_path / "run.jsonl"
    trainer = make_trainer(
        [FtInsightCallback(path)],
        trainer_class=Small,
        rows=token_rows([8] * 24),
        max_steps=2,
        per_device_train_batch_size=8,
        auto_find_batch_size=True,
    )
    trainer.train()
    log = Log(path)
    batches = [h.train.batch for h in log.of(r.Header)]
    # 7 rows of 8 slots fit into 60
    assert batches[0] == 8
    assert batches[-1] is not None
    assert batches[-1] <= 7
    told = log.of(r.OutOfMemory)
    assert [t.queries for t in told] == batches[:-1]
    assert [t.slots for t in told] == [8 * b for b in batches[:-1] if b]
    assert [e.status for e in log.of(r.End)] == ["retried"] * len(told) + ["completed"]
    from ft_insight.run import RunState

    filling = RunState().replay(log.records).filling
    assert filling.fails_slots == min(t.slots for t in told)
    assert filling.fits_slots == 8 * batches[-1]
    assert len(filling.failures) == len(told)
    if error is RuntimeError:
        assert told[0].requested_bytes == 640


def test_a_failure_within_a_look_lets_go_of_everything(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """The second step is looked at, and fails in the middle of it, under the dispatch mode."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    path = tmp_path / "run.jsonl"
    trainer = make_trainer([FtInsightCallback(path)])
    head = trainer.model.model.layers[1]

    def fail(*_: Any) -> None:
        if trainer.state.global_step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 KiB")

    head.register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert _get_current_dispatch_mode() is None
    (told,) = Log(path).of(r.OutOfMemory)
    assert told.requested_bytes == 2**20
    assert told.allocated_bytes == sum(p.bytes for p in told.parts)
    kinds = {p.detail for p in told.parts if p.category == "activations"}
    assert {"attention", "mlp", "embedding"} <= kinds
    assert told.phase == "forward"


def test_one_that_is_caught_trains_on(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    class Forgiving(Small):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().training_step(model, inputs, *args, **kwargs)
            except torch.OutOfMemoryError:
                return torch.tensor(0.0)

    path = tmp_path / "run.jsonl"
    rows = token_rows([10] * 2 + [30] * 2 + [10] * 4)
    make_trainer(
        [FtInsightCallback(path)], trainer_class=Forgiving, rows=rows, train_sampling_strategy="sequential"
    ).train()
    log = Log(path)
    assert log.end.status == "completed"
    assert len(log.steps) == 4


def test_what_says_that_memory_ended() -> None:
    assert torch.cuda.OutOfMemoryError is torch.OutOfMemoryError
    assert is_out_of_memory(torch.OutOfMemoryError("anything"))
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"))
    assert is_out_of_memory(RuntimeError("HIP out of memory. Tried to allocate 2 GiB"))
    assert not is_out_of_memory(RuntimeError("size mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))
    assert requested_bytes("Tried to allocate 20.00 MiB. GPU 0") == 20 * 2**20
    assert requested_bytes("you tried to allocate 123 bytes. Error code 12") == 123
    assert requested_bytes("no figure") is None


def test_an_inventory_is_empty_without_anything() -> None:
    assert Inventory(CPU).total == 0
    assert take_inventory(nn.Module(), SimpleNamespace(state=None), CPU).parts == {}
