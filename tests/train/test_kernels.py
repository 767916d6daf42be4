"""Kernels by role, against counts and shapes worked out by hand."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as fn
from transformers import TrainerCallback

from ft_insight import records as r
from ft_insight.callbacks.guard import Guard, Hook
from ft_insight.callbacks.kernel_scopes import Scope, weight_roles
from ft_insight.callbacks.kernels import KernelWindow, from_json, summarise
from ft_insight.callbacks.modules import Part, find_parts
from ft_insight.catalog import find_gpu
from ft_insight.demo.tiny import lora_config
from tests.train.conftest import MakeTrainer, moe_model

HIDDEN, INNER, EXPERTS, LAYERS = 32, 48, 4, 2
MOE = ("moe", "router", "experts")
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


def no_failure(collector: str, reason: str) -> None:
    raise AssertionError(f"{collector}: {reason}")


def window(model: nn.Module, **options: Any) -> KernelWindow:
    return KernelWindow(find_parts(model), Guard(no_failure), root=model, **options)


def profiled(model: nn.Module, step: Callable[[], object], **options: Any) -> r.Kernels:
    recorder = window(model, **options)
    recorder.open()
    step()
    assert not recorder._stacks.opened  # also where recomputation stopped early
    trace = recorder.close()
    assert trace is not None
    return summarise(trace, gpu=None)


def batch(rows: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    tokens = torch.randint(0, 300, (rows, length))
    return {"input_ids": tokens, "labels": tokens}


def train(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Callable[[], None]:
    def step() -> None:
        model(**inputs).loss.backward()

    return step


def pick(kernels: r.Kernels, role: str, when: str = "forward", kind: str | None = None) -> r.KernelRole:
    found = [x for x in kernels.roles if x.role == role and x.pass_name == when and (kind is None or x.kind == kind)]
    assert len(found) == 1, [(x.kind, x.role, x.pass_name) for x in kernels.roles]
    return found[0]


def share_of_other(kernels: r.Kernels, kinds: tuple[str, ...] = MOE) -> float:
    within = [x for x in kernels.roles if x.kind in kinds]
    return sum(x.seconds for x in within if x.role == "other") / sum(x.seconds for x in within)


def chosen(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[set[int]]:
    """The experts that get a token, by layer."""
    hit: list[set[int]] = []
    handles = [
        layer.mlp.gate.register_forward_hook(lambda m, a, out: hit.append(set(out[2].flatten().tolist())))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return hit


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_matmuls_of_experts_and_router_match_hand_counts(implementation: str) -> None:
    model = moe_model().train()
    model.set_experts_implementation(implementation)
    inputs = batch()
    hits = sum(len(h) for h in chosen(model, inputs))
    kernels = profiled(model, train(model, inputs))

    rows = 24 * 2 * LAYERS  # tokens times top-2
    assert pick(kernels, "matmul_w1_w3").flops == 2 * rows * HIDDEN * 2 * INNER
    assert pick(kernels, "matmul_w2").flops == 2 * rows * HIDDEN * INNER
    assert pick(kernels, "matmul_router").flops == 2 * 24 * LAYERS * HIDDEN * EXPERTS
    calls = hits if implementation == "eager" else LAYERS
    for role in ("matmul_w1_w3", "matmul_w2"):
        forward, backward = pick(kernels, role), pick(kernels, role, "backward")
        assert forward.calls == calls
        assert backward.calls == 2 * calls  # for the input's gradient and the weight's
        assert backward.flops == 2 * forward.flops
    assert pick(kernels, "matmul_router").calls == LAYERS
    assert pick(kernels, "matmul_router", "backward").flops == 2 * pick(kernels, "matmul_router").flops
    assert share_of_other(kernels) < 0.05
    assert "recompute" not in {x.pass_name for x in kernels.roles}


def test_attention_and_head_match_hand_counts() -> None:
    model = moe_model().train()
    kernels = profiled(model, train(model, batch()))
    heads, keys = 2 * 16, 16
    projections = 2 * 24 * LAYERS * HIDDEN * (heads + 2 * keys + heads)
    assert pick(kernels, "attention_matmul").flops == projections
    assert pick(kernels, "attention_matmul").calls == 4 * LAYERS
    # two products of every pair of positions: by queries, and by values
    assert pick(kernels, "attention").flops == LAYERS * 2 * 2 * (2 * 2 * 12 * 12 * 16)
    assert pick(kernels, "head_matmul").flops == 2 * 24 * HIDDEN * 300
    assert pick(kernels, "norm", kind="final_norm").seconds > 0
    assert all(pick(kernels, role, kind=kind).seconds > 0 for kind, role in (("head", "loss"), ("attention", "rotary")))
    assert pick(kernels, "embedding").calls == 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_told_from_forward(implementation: str, adapters: bool, reentrant: bool) -> None:
    model = moe_model()
    model.set_experts_implementation(implementation)
    if adapters:
        import peft

        model = peft.get_peft_model(model, lora_config(4))
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()
    kernels = profiled(model, train(model, batch()))
    for role in ("matmul_w1_w3", "matmul_w2", "matmul_router", "attention_matmul"):
        forward, again, backward = (pick(kernels, role, p) for p in ("forward", "recompute", "backward"))
        assert forward.flops == again.flops, role
        # with LoRA in the experts' weights, the sum of both is what has a gradient; attention's weights are frozen
        once = adapters and role == "attention_matmul"
        assert backward.flops == forward.flops * (1 if once else 2), role
    # sums of the residual stream, made by the layer itself, which checkpointing does not call again
    assert pick(kernels, "elementwise", "recompute", "layer").calls in (LAYERS, 2 * LAYERS)
    assert share_of_other(kernels) < 0.05
    lora = [x for x in kernels.roles if x.role == "lora"]
    kinds = {(x.kind, x.pass_name) for x in lora}
    passes = ("forward", "recompute", "backward")
    assert kinds == ({(k, p) for k in ("experts", "router", "attention") for p in passes} if adapters else set())


def test_eager_attention_keeps_its_scores_apart_from_rotation() -> None:
    model = moe_model(attn_implementation="eager").train()
    kernels = profiled(model, train(model, batch()))
    attention = pick(kernels, "attention")
    assert attention.flops == LAYERS * 2 * 2 * (2 * 2 * 12 * 12 * 16)
    # queries and keys: two products and a sum each, and half of it negated
    assert pick(kernels, "rotary", kind="attention").calls >= LAYERS * 2 * 4


def test_an_expert_without_tokens_changes_nothing() -> None:
    model = moe_model().train()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.fill_(1)
            gate = layer.mlp.gate
            gate.weight.zero_()  # all experts alike: the same two win every token
    inputs = batch()
    assert all(len(h) == 2 for h in chosen(model, inputs))
    kernels = profiled(model, train(model, inputs))
    assert pick(kernels, "matmul_w1_w3").calls == pick(kernels, "matmul_w2").calls == 2 * LAYERS
    assert pick(kernels, "matmul_w1_w3").flops == 2 * pick(kernels, "matmul_w2").flops == 2 * 96 * HIDDEN * 2 * INNER


class Odd(nn.Module):
    """Fused experts of square weights, W3 used twice and W2 three times: only following the weights tells them."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("w1", "w3", "w2"):
            self.register_parameter(name, nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / 8))

    def forward(self, x: torch.Tensor, experts: list[int]) -> torch.Tensor:
        for e in experts:
            up = fn.linear(x, self.w3[e]) + torch.einsum("th,ih->ti", x, self.w3[e])
            inner = fn.silu(x @ self.w1[e].mT) * up
            stacked = torch.stack([self.w2[e], self.w2[e]]).to(torch.float64).to(torch.float32)
            inner = torch.bmm(inner.expand(2, -1, -1), stacked.transpose(1, 2)).sum(0)
            x = x + torch.addmm(inner, inner, self.w2[e].contiguous().t()) + torch.matmul(inner, self.w2[e, :, :].T)
        return x


@pytest.mark.parametrize("hit", [[0, 1, 2, 3], [3], []])
def test_bare_weights_of_equal_shape_are_followed(hit: list[int]) -> None:
    module = Odd()
    recorder = KernelWindow([Part("layers.0.experts", module, "experts", 0)], Guard(no_failure))
    recorder.open()
    module(torch.randn(5, HIDDEN, requires_grad=True), hit).sum().backward()
    kernels = summarise(recorder.close(), gpu=None)
    found = {(x.role, x.pass_name): x for x in kernels.roles if x.role.startswith("matmul")}
    if not hit:
        assert not found
        return
    one = 2 * 5 * HIDDEN * HIDDEN * len(hit)
    assert {role for role, _ in found} == {"matmul_w1", "matmul_w2", "matmul_w3"}
    for role, calls, products in (("matmul_w1", 1, 1), ("matmul_w3", 2, 2), ("matmul_w2", 3, 4)):
        assert found[role, "forward"].calls == calls * len(hit)
        assert found[role, "forward"].flops == products * one
        assert found[role, "backward"].flops == 2 * products * one
    assert share_of_other(kernels) < 0.05


def test_adapters_of_separate_experts() -> None:
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["linear_fc1", "linear_fc2", "in_proj"])
    model = peft.get_peft_model(Hybrid(), config)
    kernels = profiled(model, train(model, batch()))
    rows = 24 * 2 * 2
    for role in ("matmul_w1", "matmul_w2"):
        assert pick(kernels, role).flops == 2 * rows * HIDDEN * INNER
        assert pick(kernels, role, "backward").flops == pick(kernels, role).flops  # for the input alone
    assert pick(kernels, "lora", kind="experts").flops == 2 * 2 * rows * 4 * (HIDDEN + INNER)
    assert pick(kernels, "lora", kind="mamba").flops == 2 * 2 * 24 * 4 * (HIDDEN + 2 * HIDDEN)
    assert share_of_other(kernels) < 0.05


def test_a_compiled_model_is_profiled_without_hooks() -> None:
    model = moe_model().train()
    recorder = window(model, scoped=False)
    recorder.open()
    assert hooks(model) == 0
    train(model, batch())()
    kernels = summarise(recorder.close(), gpu=None)
    assert {x.kind for x in kernels.roles} == {"outside"}


def test_four_bit_experts_dequantise() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    model = Hybrid()
    for layer in model.layers:
        for expert in getattr(layer.mixer, "local_experts", ()):
            for name in ("linear_fc1", "linear_fc2"):
                dense = getattr(expert, name).weight.data
                packed = bnb.nn.Linear4bit(dense.shape[1], dense.shape[0], bias=False, quant_type="nf4")
                packed.weight = bnb.nn.Params4bit(dense, requires_grad=False, quant_type="nf4")
                setattr(expert, name, packed.to("cpu"))
    inputs = batch()
    train(model, inputs)()  # quantises
    kernels = profiled(model, train(model, inputs))
    rows = 24 * 2 * 2
    for role in ("matmul_w1", "matmul_w2"):
        assert pick(kernels, role).flops == pick(kernels, role, "backward").flops == 2 * rows * HIDDEN * INNER
    for when in ("forward", "backward"):
        assert pick(kernels, "dequantise", when).seconds > 0
    assert share_of_other(kernels) < 0.05


# a model in the manner of BlackMamba: separate experts of two layers, and a state-space mixer


class Expert(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(hidden, inner, bias=False)
        self.linear_fc2 = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(fn.gelu(self.linear_fc1(x)))


class SwitchBlock(nn.Module):
    def __init__(self, hidden: int, inner: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts, bias=False)
        self.local_experts = nn.ModuleList([Expert(hidden, inner) for _ in range(experts)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, picks = torch.topk(torch.sigmoid(self.router(flat)), 2, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.local_experts):
            token, place = torch.where(picks == number)
            if len(token):
                out = out.index_add(0, token, expert(flat[token]) * weights[token, place, None])
        return out.reshape(x.shape)


class Mixer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(hidden, 2 * hidden, bias=False)
        self.conv1d = nn.Conv1d(hidden, hidden, 4, groups=hidden, padding=3)
        self.A_log = nn.Parameter(torch.zeros(hidden))
        self.out_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u, gate = self.in_proj(x).chunk(2, dim=-1)
        u = fn.silu(self.conv1d(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        decay = torch.exp(-torch.exp(self.A_log))
        state, states = torch.zeros_like(u[:, 0]), []
        for position in u.unbind(1):
            state = state * decay + position
            states.append(state)
        return self.out_proj(torch.stack(states, 1) * fn.silu(gate))


class Block(nn.Module):
    def __init__(self, mixer: nn.Module, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.mixer = mixer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixer(self.norm(x))


class Hybrid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, HIDDEN)
        mixers = [Mixer(HIDDEN), SwitchBlock(HIDDEN, INNER, 3), Mixer(HIDDEN), SwitchBlock(HIDDEN, INNER, 3)]
        self.layers = nn.ModuleList([Block(m, HIDDEN) for m in mixers])
        self.final_norm = nn.LayerNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, 300, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.final_norm(x))
        loss = fn.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return type("Output", (), {"loss": loss})


def test_black_mamba_like_model() -> None:
    torch.manual_seed(0)
    model = Hybrid()
    kernels = profiled(model, train(model, batch()))
    rows = 24 * 2 * 2  # tokens, top-2, layers
    for role in ("matmul_w1", "matmul_w2"):
        assert pick(kernels, role).flops == 2 * rows * HIDDEN * INNER
        assert pick(kernels, role, "backward").flops == 2 * pick(kernels, role).flops
    assert pick(kernels, "matmul_router").flops == 2 * 24 * 2 * HIDDEN * 3
    assert pick(kernels, "mamba_matmul").flops == 2 * 24 * 2 * HIDDEN * 3 * HIDDEN
    assert pick(kernels, "mamba_convolution").calls == 2
    for when in ("forward", "backward"):
        scan = pick(kernels, "mamba_scan", when)
        assert scan.seconds > 0
        assert scan.calls >= 2 * 12 * 2  # a product and a sum for each position
    assert {"gather_scatter", "softmax_topk"} <= {x.role for x in kernels.roles if x.kind in MOE}
    assert share_of_other(kernels, (*MOE, "mamba")) < 0.05


def test_names_of_weights() -> None:
    def roles(**weights: tuple[int, ...]) -> dict[str, str]:
        module = nn.Module()
        for name, shape in weights.items():
            module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        found = weight_roles(module)
        return {name: found[id(w)] for name, w in module.named_parameters() if id(w) in found}

    assert roles(w1=(6, 4), w2=(4, 6), w3=(6, 4)) == {"w1": "w1", "w2": "w2", "w3": "w3"}
    assert roles(gate_proj=(6, 4), up_proj=(6, 4), down_proj=(4, 6)) == {
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
    }
    assert roles(gate_up_proj=(2, 12, 4), gate_up_proj_bias=(2, 12), down_proj=(2, 4, 6)) == {
        "gate_up_proj": "w1_w3",
        "down_proj": "w2",
    }
    assert roles(up_proj=(6, 4), down_proj=(4, 6)) == {"up_proj": "w1", "down_proj": "w2"}
    assert roles(input_linear=(12, 4), output_linear=(4, 6)) == {"input_linear": "w1_w3", "output_linear": "w2"}
    assert roles(w1=(6, 4), v1=(6, 4), w2=(6, 4)) == {"w1": "w1", "v1": "w3", "w2": "w2"}
    nameless = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert list(weight_roles(nameless).values()) == ["w1", "w2"]


# harmlessness


class Windowed(TrainerCallback):
    """Records the second step of a training."""

    def __init__(self) -> None:
        self.records: list[r.Kernels] = []
        self.recorder: KernelWindow | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.recorder = window(kwargs["model"])
            self.recorder.open()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trace = self.recorder.close() if self.recorder is not None else None
        if trace is not None:
            self.records.append(summarise(trace, gpu=None))


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def hooks(model: nn.Module) -> int:
    """Hooks of ours: transformers keeps some of its own."""
    all_hooks = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return sum(isinstance(hook, Hook) for hook in all_hooks)


@pytest.mark.parametrize("adapters", [False, True])
def test_a_window_changes_nothing_under_sft_trainer(make_trainer: MakeTrainer, adapters: bool) -> None:
    def run(*callbacks: TrainerCallback) -> tuple[list[float], dict[str, torch.Tensor], Any]:
        options = {"peft_config": lora_config(4)} if adapters else {}
        trainer = make_trainer(callbacks, model=moe_model(), checkpointing=True, max_steps=3, **options)
        values = losses(trainer)
        assert hooks(trainer.model) == 0
        return values, {n: p.detach().clone() for n, p in trainer.model.named_parameters()}, trainer

    callback = Windowed()
    plain, weights, _ = run()
    watched, watched_weights, _ = run(callback)
    assert plain == watched
    assert all(torch.equal(weights[n], watched_weights[n]) for n in weights)
    assert not torch._C._autograd._profiler_enabled()
    (kernels,) = callback.records
    assert share_of_other(kernels) < 0.05
    assert pick(kernels, "head_matmul").flops > 0  # computed by TRL, without calling the head
    assert pick(kernels, "optimizer", "optimizer").seconds > 0
    whole = sum(x.seconds for x in kernels.roles)
    assert sum(x.seconds for x in kernels.roles if x.role == "other") < 0.05 * whole
    assert kernels.busy_s == pytest.approx(whole, rel=1e-3)
    assert whole <= kernels.window_s
    assert sum(x.share for x in kernels.roles) == pytest.approx(1, abs=1e-2)


def test_model_can_be_copied_and_pickled_in_a_window() -> None:
    model = moe_model().train()
    inputs = batch()
    recorder = window(model)
    recorder.open()
    twin = copy.deepcopy(model)
    pickled = pickle.loads(pickle.dumps(model))  # noqa: S301
    loss = model(**inputs).loss
    assert torch.equal(twin(**inputs).loss, loss)
    assert torch.equal(pickled(**inputs).loss, loss)
    recorder.abandon()
    assert hooks(model) == 0


class Stop(BaseException):
    """Like KeyboardInterrupt: torch calls no hooks for it."""


@pytest.mark.parametrize("error", [RuntimeError, Stop])
def test_nothing_is_left_after_an_exception(error: type[BaseException]) -> None:
    model = moe_model().train()
    inputs = batch()
    expected = model(**inputs).loss
    recorder = window(model)
    recorder.open()

    def fail(module: nn.Module, args: Any) -> None:
        raise error

    handle = model.model.layers[1].mlp.experts.act_fn.register_forward_pre_hook(fail)
    with pytest.raises(error):
        model(**inputs)
    handle.remove()
    recorder.abandon()
    recorder.abandon()
    assert hooks(model) == 0
    assert torch.overrides._get_current_function_mode() is None
    assert not torch._C._autograd._profiler_enabled()
    assert torch.equal(model(**inputs).loss, expected)
    kernels = profiled(model, train(model, inputs))  # and a new window works
    assert pick(kernels, "matmul_w2").flops == 2 * 96 * HIDDEN * INNER


def test_a_window_survives_an_exception_that_the_model_handles() -> None:
    model = moe_model().train()
    inputs = batch()

    def step() -> None:
        handle = model.model.layers[0].mlp.experts.act_fn.register_forward_pre_hook(_fail)
        with pytest.raises(RuntimeError):
            model(**inputs)
        handle.remove()
        model(**inputs)

    kernels = profiled(model, step)
    assert pick(kernels, "matmul_w2").flops == 2 * 96 * HIDDEN * INNER


def _fail(module: nn.Module, args: Any) -> None:
    raise RuntimeError


def test_a_failure_within_turns_the_collector_off_and_leaves_no_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    model = moe_model().train()
    failures: list[str] = []
    recorder = KernelWindow(find_parts(model), Guard(lambda c, why: failures.append(c)), root=model)
    recorder.open()
    monkeypatch.setattr("ft_insight.callbacks.kernel_scopes.Follower._judge", lambda *args: 1 / 0)
    with pytest.warns(UserWarning, match="kernels is off"):
        model(**batch()).loss.backward()
    assert failures == ["kernels"]
    assert torch.overrides._get_current_function_mode() is None
    recorder.abandon()
    assert hooks(model) == 0


def test_another_profiler_is_left_alone() -> None:
    model = moe_model()
    recorder = window(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.raises(RuntimeError, match="another torch profiler"):
            recorder.open()
        assert torch._C._autograd._profiler_enabled()
    assert hooks(model) == 0
    assert recorder.close() is None


def test_trace_is_kept_on_request_and_may_be_read_in_a_thread(tmp_path: Path) -> None:
    model = moe_model().train()
    recorder = window(model, trace_path=tmp_path / "deep" / "step2.trace.json")
    recorder.open()
    train(model, batch())()
    trace = recorder.close()
    found: list[r.Kernels] = []
    thread = Thread(target=lambda: found.append(summarise(trace, gpu=None)))
    thread.start()
    train(model, batch())()  # training goes on meanwhile
    thread.join()
    assert found[0].trace == "step2.trace.json"
    assert json.loads((tmp_path / "deep" / "step2.trace.json").read_text())["traceEvents"]
    assert pick(found[0], "matmul_w2").flops == 2 * 96 * HIDDEN * INNER


# CUDA, by a trace written by hand


class Made:
    """A trace in the format of torch's profiler."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._correlation = 0

    def op(self, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> None:
        cat = "user_annotation" if name.startswith(("ft_insight::", "Optimizer")) else "cpu_op"
        self.add(ph="X", cat=cat, name=name, pid=1, tid=tid, ts=ts, dur=dur, args=args)

    def add(self, **event: Any) -> None:
        self.events.append(event)

    def launch(
        self, kernel: str, at: float, begin: float, dur: float, *, tid: int = 1, cat: str = "kernel", **args: Any
    ) -> None:
        self._correlation += 1
        common = {"correlation": self._correlation}
        api = "cuda_driver" if kernel.startswith("triton") else "cuda_runtime"
        self.add(ph="X", cat=api, name="cudaLaunchKernel", pid=1, tid=tid, ts=at, dur=1.0, args=common)
        self.add(ph="X", cat=cat, name=kernel, pid=0, tid=7, ts=begin, dur=dur, args=common | args)


def cuda_trace() -> dict[str, Any]:
    made = Made()
    half = {"Input type": ["c10::BFloat16", "c10::BFloat16"]}
    made.op("ft_insight::0", 0, 100)  # experts
    made.op("ft_insight::1", 1, 20)  # its W2
    made.op("aten::linear", 2, 15, **{"Sequence number": 5})
    made.op("aten::mm", 3, 10, **{"Sequence number": 6, "Input Dims": [[64, 256], [256, 128]], **half})
    occupancy = {"est. achieved occupancy %": 50, "blocks per SM": 2.0, "grid": [8, 4, 1], "block": [128, 1, 1]}
    made.launch("nvjet_tst_128x128", 4, 1000, 30, **occupancy)
    made.op("aten::copy_", 30, 5, **{"Sequence number": 7})
    made.launch("Memcpy DtoD (Device -> Device)", 31, 1030, 10, cat="gpu_memcpy", bytes=4096)
    made.op("MatMul4Bit", 40, 20, **{"Sequence number": 8})
    made.launch("void kDequantizeBlockwise<__nv_bfloat16, 512>(float*)", 42, 1050, 20, **{"blocks per SM": "inf"})
    made.launch("triton_red_fused_silu_mul_0", 70, 1060, 20)  # overlaps, on another stream; by no operator
    # backward, on a thread of its own
    name = "autograd::engine::evaluate_function: MmBackward0"
    made.op(name, 200, 50, tid=2, **{"Sequence number": 6, "Fwd thread id": 1})
    made.op("MmBackward0", 201, 40, tid=2, **{"Sequence number": 6, "Fwd thread id": 1})
    made.op("aten::mm", 202, 10, tid=2, **{"Input Dims": [[64, 128], [128, 256]], **half})
    made.launch("nvjet_tst_128x128", 203, 1100, 60, tid=2, **(occupancy | {"est. achieved occupancy %": 80}))
    made.op("Optimizer.step#AdamW.step", 300, 50)
    made.op("aten::_foreach_add_", 310, 10)
    made.launch("void multi_tensor_apply_kernel<...>(int)", 311, 1200, 40)
    made.add(ph="X", cat="kernel", name="graph replay", pid=0, tid=7, ts=1300, dur=5, args={"correlation": 999})
    made.add(ph="i", name="Record Window End", ts=1500)
    return {"schemaVersion": 1, "deviceProperties": [{"numSms": 108}], "traceEvents": made.events}


SCOPES = [Scope("experts"), Scope("experts", matmul="matmul_w2")]


def test_cuda_kernels_by_who_launched_them() -> None:
    gpu = find_gpu("A100")
    kernels = summarise(from_json(cuda_trace(), SCOPES), gpu=gpu)
    assert kernels.clock == "cuda"
    by = {(x.role, x.pass_name): x for x in kernels.roles}
    forward, backward = by["matmul_w2", "forward"], by["matmul_w2", "backward"]
    assert (forward.seconds, forward.calls) == (pytest.approx(30e-6), 1)
    assert (forward.theoretical_occupancy_percent, forward.blocks_per_sm) == (50, 2)
    assert (backward.theoretical_occupancy_percent, backward.seconds) == (80, pytest.approx(60e-6))
    assert forward.flops == backward.flops == 2 * 64 * 256 * 128
    assert forward.flops_share == pytest.approx(forward.flops / 30e-6 / (gpu.matmul_tflops * 1e12), rel=1e-2)
    moved = 2 * (64 * 256 + 256 * 128 + 64 * 128)
    assert forward.bytes == moved
    assert forward.bandwidth_share == pytest.approx(moved / 30e-6 / (gpu.bandwidth_gbs * 1e9), rel=1e-2)
    assert by["copy", "forward"].seconds == pytest.approx(10e-6)
    assert by["dequantise", "forward"].blocks_per_sm is None
    assert by["activation", "forward"].seconds == pytest.approx(20e-6)
    assert by["optimizer", "optimizer"].calls == 1
    assert by["other", "outside"].seconds == pytest.approx(5e-6)
    # 30 + 10, a gap, 20 and 20 overlapping by 10, and so on
    assert kernels.busy_s == pytest.approx((40 + 30 + 60 + 40 + 5) * 1e-6)
    assert kernels.window_s == pytest.approx(1305e-6)
    assert kernels.idle_s == pytest.approx(kernels.window_s - kernels.busy_s)
    assert kernels.names[0] == r.KernelName("nvjet_tst_128x128", "experts", "matmul_w2", "backward", 60e-6, 1, "8x4x1")


def test_infinite_figures_and_foreign_bytes_do_not_spoil_a_trace() -> None:
    text = json.dumps(cuda_trace()).replace('"blocks per SM": "inf"', '"blocks per SM": inf').encode()
    text = text.replace(b'"blocks per SM": 2.0', b'"blocks per SM": -Infinity')
    text = text.replace(b"graph replay", b"graph \xff replay")
    trace = from_json({}, SCOPES)
    trace.source = lambda path: Path(path).write_bytes(text)
    assert len(summarise(trace, gpu=None).roles) == len(summarise(from_json(cuda_trace(), SCOPES), gpu=None).roles)
    with pytest.raises(ValueError, match="not a trace"):
        summarise(from_json({"no": 1}, SCOPES), gpu=None)


@pytest.fixture(autouse=True)
def _no_profiler_left() -> Iterator[None]:
    yield
    assert not torch._C._autograd._profiler_enabled()
