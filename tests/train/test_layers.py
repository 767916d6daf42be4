"""Time per layer against planted truth on a virtual clock: every kind, forward, recompute and backward, exactly."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ft_insight import FtInsightCallback
from ft_insight import records as r
from ft_insight.callbacks.clock import HostClock
from ft_insight.callbacks.guard import Guard
from ft_insight.callbacks.layers import LayerTimer, Mark
from ft_insight.callbacks.modules import Part, find_parts
from ft_insight.callbacks.replay import HEAD_AND_LOSS, layer_record, replay
from ft_insight.demo.tiny import lora_config
from tests.train.conftest import Log, MakeTrainer, dense_model, lora, moe_model, token_rows
from tests.train.planted import Book, VirtualClock, plant

SECONDS = {
    "embedding": 1.0,
    "input_norm": 2.0,
    "attention": 4.0,
    "post_attention_norm": 8.0,
    "moe": 16.0,
    "router": 32.0,
    "experts": 64.0,
    "mlp": 128.0,
    "final_norm": 256.0,
}


def plant_everywhere(model: Any, book: Book) -> None:
    """Plant by the names of this architecture, not by what the timer found."""
    base = model.model
    plant(base.embed_tokens, book, (None, "embedding"), SECONDS["embedding"])
    plant(base.norm, book, (None, "final_norm"), SECONDS["final_norm"])
    for index, layer in enumerate(base.layers):
        parts = {
            "input_norm": layer.input_layernorm,
            "attention": layer.self_attn,
            "post_attention_norm": layer.post_attention_layernorm,
        }
        if hasattr(layer.mlp, "experts"):
            parts |= {"router": layer.mlp.gate, "experts": layer.mlp.experts, "moe": layer.mlp}
        else:
            parts["mlp"] = layer.mlp
        for kind, module in parts.items():
            plant(module, book, (index, kind), SECONDS[kind])


def measured(log: Log) -> dict[str, dict[Any, float]]:
    sums: dict[str, dict[Any, float]] = {p: defaultdict(float) for p in ("forward", "recompute", "backward")}
    for record in log.of(r.Layers):
        rows = zip(record.layers, record.kinds, record.forward_s, record.recompute_s, record.backward_s, strict=True)
        for layer, kind, *seconds in rows:
            for name, value in zip(sums, seconds, strict=True):
                if value:
                    sums[name][layer, kind] += value
    return sums


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dense": {"model": dense_model},
    "accumulation 3": {"gradient_accumulation_steps": 3, "max_steps": 2, "rows": token_rows([8, 6] * 6)},
    "eager experts": {"experts": "eager"},
    "router jitter": {"model": lambda: moe_model(router_jitter_noise=0.1)},
    "lora on attention": {"peft_config": lora()},
    "lora on experts": {"peft_config": lora_config(4)},
    "non-reentrant": {"checkpointing": True},
    "non-reentrant, accumulation, lora": {
        "checkpointing": True,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "peft_config": lora(),
    },
    "non-reentrant, lora on experts": {"checkpointing": True, "peft_config": lora_config(4)},
    "reentrant": {"checkpointing": True, "reentrant": True},
    "reentrant, lora": {"checkpointing": True, "reentrant": True, "peft_config": lora()},
    "selective": {"checkpointing": True, "selective": True},
    "bf16": {"bf16": True},
    "evaluation in between": {
        "eval_rows": token_rows([6, 4]),
        "eval_strategy": "steps",
        "eval_steps": 1,
        "checkpointing": True,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_every_kind_is_exact_in_a_real_trainer(
    case: str, virtual: VirtualClock, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    settings = dict(CASES[case])
    model = settings.pop("model", moe_model)()
    if "experts" in settings:
        model.set_experts_implementation(settings.pop("experts"))
    options: dict[str, Any] = {"use_reentrant": settings.pop("reentrant", False)}
    if settings.pop("selective", False):
        options["selective"] = True
    book = Book(virtual)
    plant_everywhere(model, book)
    trainer = make_trainer(
        [FtInsightCallback(tmp_path / "run.jsonl", layers_every=1)],
        model=model,
        **settings,
        **{name: options for name in ("activation_checkpointing_kwargs",) if settings.get("checkpointing")},
    )
    evaluate = trainer.evaluate

    def unrecorded(*args: Any, **kwargs: Any) -> Any:
        book.recording = False
        try:
            return evaluate(*args, **kwargs)
        finally:
            book.recording = True

    trainer.evaluate = unrecorded
    trainer.train()
    log = Log(tmp_path / "run.jsonl")
    assert log.notices == []
    assert len(log.of(r.Layers)) == settings.get("max_steps", 4)
    assert measured(log) == {name: dict(rows) for name, rows in book.done.items()}
    if settings.get("checkpointing"):
        assert book.done["recompute"]
    for step in log.steps:
        layers = next(x for x in log.of(r.Layers) if x.step == step.step)
        assert sum(layers.forward_s) == step.phases_s["forward"] + step.phases_s.get("loss", 0)
        assert sum(layers.backward_s) == step.phases_s["backward"]
        assert sum(layers.recompute_s) == step.phases_s.get("recompute", 0)


# small nets, on which other ways to time modules fail or crash


class Block(nn.Module):
    def __init__(self, book: Book, index: int, variant: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=variant == "in-place activation"))
        self.variant = variant
        plant(self.norm, book, (index, "norm"), 2.0)
        plant(self.mlp, book, (index, "mlp"), 32.0)
        if variant in ("tuple", "dataclass"):
            inner = self.mlp.forward
            self.mlp.forward = lambda x: (inner(x), "word") if variant == "tuple" else Packed(inner(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mlp(self.norm(x))
        if self.variant == "twice":
            y = self.mlp(y)
        if self.variant == "tuple":
            y = y[0]
        if self.variant == "dataclass":
            y = y.tensor
        if self.variant == "in-place residual":
            y += x
            return y
        return x + y


@dataclass
class Packed:
    tensor: torch.Tensor


class Net(nn.Module):
    def __init__(self, book: Book, variant: str, reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(book, i, variant) for i in range(2)])
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize(
    "variant", ["plain", "twice", "in-place residual", "in-place activation", "tuple", "dataclass"]
)
def test_small_nets(variant: str, reentrant: bool | None, virtual: VirtualClock) -> None:
    book = Book(virtual)
    net = Net(book, variant, reentrant)
    layers = [Part(f"layers.{i}", b, "layer", i) for i, b in enumerate(net.layers)]
    parts = list(layers)
    parts += [
        Part(f"{layer.name}.{kind}", getattr(layer.module, kind), kind, layer.layer, layer)
        for layer in layers
        for kind in ("norm", "mlp")
    ]
    failures: list[Any] = []
    timer = LayerTimer(parts, HostClock(), Guard(lambda *failure: failures.append(failure)))
    plain = Net(Book(virtual), variant, reentrant)
    plain.load_state_dict(net.state_dict())
    x = torch.randn(3, 8, requires_grad=True)
    plain(x.detach().requires_grad_()).sum().backward()

    timer.install()
    timer.micro_begins()
    timer.mark("forward")
    loss = net(x).sum()
    timer.mark("backward")
    loss.backward()
    timer.mark("backward end")
    timer.micro_ends()
    timer.remove()
    record = layer_record(timer.take(), parts, HostClock(), 1, 0.0)

    assert failures == []
    assert record is not None
    got = {p: {} for p in book.done}  # type: ignore[var-annotated]
    for layer, kind, *seconds in zip(
        record.layers, record.kinds, record.forward_s, record.recompute_s, record.backward_s, strict=True
    ):
        for name, value in zip(got, seconds, strict=True):
            if value:
                got[name][layer, "norm" if "norm" in kind else kind] = value
    assert got == {name: dict(rows) for name, rows in book.done.items()}
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_a_graph_kept_beyond_its_step_is_silent(virtual: VirtualClock) -> None:
    book = Book(virtual)
    net = Net(book, "plain", None)
    parts = [Part("layers.0", net.layers[0], "layer", 0)]
    timer = LayerTimer(parts, HostClock(), Guard(lambda *_: None))
    timer.install()
    timer.micro_begins()
    loss = net(torch.randn(3, 8)).sum()
    timer.micro_ends()
    timer.remove()
    timer.take()
    timer.install()
    timer.micro_begins()
    loss.backward()
    assert [m.what for m in timer.take()] == ["micro"]


def test_hooks_live_only_on_sampled_steps(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    seen: dict[int, int] = {}
    model = moe_model()

    class Watching(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            hooks = sum(len(m._forward_hooks) for m in model.model.layers.modules())
            seen[len(seen) + 1] = hooks
            return super().step(closure)

    trainer = make_trainer([FtInsightCallback(tmp_path / "run.jsonl")], model=model, max_steps=6)
    trainer.optimizer = Watching(model.parameters(), lr=0.1)
    trainer.train()
    # by default the third step is the first to be looked at; the routers' own counting hooks are there all the time
    assert seen[3] > seen[1]
    assert {seen[step] for step in (1, 2, 4, 5, 6)} == {seen[1]}
    assert [x.step for x in Log(tmp_path / "run.jsonl").of(r.Layers)] == [3]


def test_no_layers_on_request(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make_trainer([FtInsightCallback(tmp_path / "run.jsonl", layers_every=0)]).train()
    assert Log(tmp_path / "run.jsonl").of(r.Layers) == []


@pytest.mark.parametrize("every", [-1, 1.5, "often"])
def test_a_bad_interval_is_refused(every: Any) -> None:
    with pytest.raises(ValueError, match="layers_every"):
        FtInsightCallback(layers_every=every)


def test_parts_of_a_model_under_peft(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(model=moe_model(), peft_config=lora_config(4))
    kinds = sorted(p.kind for p in find_parts(trainer.model) if p.layer == 0)
    assert kinds == ["attention", "experts", "layer", "moe", "norm", "norm", "router"]
    assert [p.name for p in find_parts(trainer.model) if p.kind == "experts"] == [
        "model.layers.0.mlp.experts",
        "model.layers.1.mlp.experts",
    ]


def test_a_post_hook_that_is_missing_ends_with_the_next_part() -> None:
    parts = [Part("layers.0", nn.Identity(), "layer", 0), Part("layers.0.mlp", nn.Identity(), "mlp", 0)]
    whats = [("micro", -1), ("backward", -1), ("begin", 1), ("recompute", 1), ("begin", 0), ("backward end", -1)]
    marks = [Mark(what, part, float(t), None) for t, (what, part) in enumerate([*whats, ("micro end", -1)])]
    times = replay(marks, parts, HostClock())
    assert times is not None
    assert (times.recompute_s, times.backward_s) == ({1: 1.0}, {HEAD_AND_LOSS: 1.0, 1: 1.0, 0: 1.0})
