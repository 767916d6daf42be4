"""Counts per expert of all families of transformers, against the rows that the experts' weights really multiply."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ft_insight import FtInsightCallback
from ft_insight import records as r
from ft_insight.callbacks.expert_watch import ExpertWatch, _record
from ft_insight.callbacks.guard import Guard
from ft_insight.callbacks.router_adapters import OUTPUT, Choice, Heard
from ft_insight.callbacks.routers import RouterCounter, find_routers
from ft_insight.callbacks.seams import Seams
from tests.train import families
from tests.train.conftest import Log, MakeTrainer, moe_model, token_rows
from tests.train.families import FAMILIES, build, inputs
from tests.train.families_truth import ExpertRows, less, weightless_rows

ALL = 48
SOURCES = {families.OUTPUT: {"output"}, families.ADAPTER: {"output"}, families.ARGUMENT: {"argument"}}


class Collector:
    """The real collector, hooked up as a session does it."""

    def __init__(self, model: nn.Module) -> None:
        watch = ExpertWatch(model)
        assert watch.counter is not None, "no router found"
        self.counter: RouterCounter = watch.counter
        self.failures: list[str] = []
        guard = Guard(lambda collector, reason: self.failures.append(reason))
        self.observer: Any = SimpleNamespace(guard=guard, router_chose=self.counter.count)
        self.seams = Seams()
        for index, router in enumerate(self.counter.routers):
            self.seams.hook_router(self.observer, index, router.tap)

    def begin(self, mask: torch.Tensor | None = None, mode: str | None = "train") -> None:
        self.counter.begin_forward(mode, mask)

    def take(self) -> r.Experts:
        assert not self.failures
        (flush,) = self.counter.flush()
        return _record(flush, 1, 0.0)


def counted(model: nn.Module, arguments: dict[str, torch.Tensor]) -> r.Experts:
    collector = Collector(model)
    collector.begin(arguments.get("attention_mask"))
    model(**arguments)
    record = collector.take()
    collector.seams.remove()
    return record


def as_lists(record: r.Experts) -> list[list[int]]:
    return [list(row) for row in record.counts]


@pytest.mark.newest
def test_no_family_is_overlooked() -> None:
    assert set(families.enumerate_families()) == set(FAMILIES)


def test_the_documentation_is_that_of_the_table() -> None:
    path = Path(__file__).parents[2] / "docs" / "routers.md"
    assert path.read_text(encoding="utf-8") == families.table(), "python -m tests.train.families > docs/routers.md"


def test_the_readme_tells_how_many_families_there_are() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert f"[{len(FAMILIES)} MoE families](docs/routers.md) of transformers {families.VERSION}" in text


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", FAMILIES)
def test_counts_equal_what_the_experts_multiply(name: str, implementation: str) -> None:
    family = FAMILIES[name]
    if implementation != "eager" and not family.grouped:
        pytest.skip("this family has eager experts only, as the table says")
    model = build(name).train()
    if family.grouped:
        model.set_experts_implementation(implementation)
    truth, idle = ExpertRows(model), weightless_rows(model)
    collector = Collector(model)
    collector.begin()
    with truth:
        model(**inputs(name))
    sources = {str(router.choice.source) for router in collector.counter.routers if router.choice.source}
    record = collector.take()
    assert as_lists(record) == less(truth.rows, idle)
    assert sum(map(sum, truth.rows)) > 0
    assert any(map(any, idle)) == (name == "longcat_flash")
    assert set(record.tokens) == {ALL}
    assert (record.method, record.padding_counted) == ("exact", False)
    assert sources == SOURCES.get(family.read, sources)

    # with the first five tokens of the second row for padding
    mask = torch.ones(families.ROWS, families.TOKENS, dtype=torch.int64)
    mask[1, :5] = 0
    collector.begin(mask)
    model(**inputs(name), attention_mask=mask)
    record = collector.take()
    assert not family.encoder_decoder or record.padding_counted
    for layer, tokens in zip(record.layers, record.tokens, strict=True):
        assert tokens == (ALL if family.encoder_decoder and "decoder" in layer.split(".") else ALL - 5)


# what routers do


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "dbrx", "llama4", "jetmoe"])
def test_dense_mode_gives_every_expert_every_token(name: str) -> None:
    options: dict[str, Any] = {"num_experts_per_tok": 8}
    if name == "deepseek_v3":
        options |= {"n_group": 1, "topk_group": 1}
    if name == "dbrx":
        options = {**FAMILIES[name].options}
        options["ffn_config"] = {**options["ffn_config"], "moe_top_k": 8}
    if name == "jetmoe":  # every expert is a query head of its own
        options |= {"num_attention_heads": 16, "num_key_value_heads": 2}
    record = counted(build(name, **options), inputs(name))
    assert all(row == (ALL,) * 8 for row in record.counts)


@pytest.mark.parametrize(("name", "gate"), [("mixtral", "gate"), ("llama4", "router"), ("deepseek_v3", "gate")])
def test_a_router_forced_to_one_expert(name: str, gate: str) -> None:
    options: dict[str, Any] = {"n_group": 1, "topk_group": 1} if name == "deepseek_v3" else {}
    model = build(name, num_experts_per_tok=1, **options)
    for layer in model.model.layers:
        block = layer.mlp if hasattr(layer, "mlp") else layer.feed_forward
        router = getattr(block, gate)
        with torch.no_grad():
            router.weight.zero_()
        router.register_forward_pre_hook(_pull(router, 5))
    record = counted(model, inputs(name))
    assert all(row == (0, 0, 0, 0, 0, ALL, 0, 0) for row in record.counts)


def _pull(router: Any, expert: int) -> Callable[..., Any]:
    """Make the hidden states and the router's weights such that one expert wins every token."""

    def pull(module: nn.Module, args: Any) -> Any:
        with torch.no_grad():
            router.weight[expert] = 1.0
            if hasattr(router, "e_score_correction_bias"):
                router.e_score_correction_bias.zero_()
        return (args[0].abs() + 1.0, *args[1:])

    return pull


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "dots1", "minimax_m2", "lfm2_moe"])
def test_the_best_logits_would_be_another_choice(name: str) -> None:
    """Groups and corrected scores: what makes the families' test above a test."""
    model = build(name)
    collector = Collector(model)
    heard: list[Any] = []
    for router in collector.counter.routers:
        router.module.register_forward_hook(lambda module, args, output: heard.append(output))
    collector.begin()
    model(**inputs(name))
    record = collector.take()
    best = [torch.bincount(o[0].topk(2, dim=-1).indices.flatten(), minlength=8).tolist() for o in heard]
    assert as_lists(record) != best


def test_tokens_beyond_an_experts_capacity_are_not_counted() -> None:
    record = counted(build("switch_transformers"), inputs("switch_transformers"))
    # per row, no expert takes more than three of 24 tokens
    assert all(max(row) <= 3 * families.ROWS for row in record.counts)
    assert all(sum(row) < tokens == ALL for row, tokens in zip(record.counts, record.tokens, strict=True))


def test_text_and_images_have_experts_of_their_own() -> None:
    model = build("ernie4_5_vl_moe").train()
    truth = ExpertRows(model, skip=("shared",))
    collector = Collector(model)
    kinds = torch.zeros(families.ROWS, families.TOKENS, dtype=torch.int64)
    kinds[0, :7] = 1
    collector.begin(torch.ones_like(kinds))
    with truth:
        model(**inputs("ernie4_5_vl_moe"), moe_mm_token_type_ids=kinds)
    record = collector.take()
    assert as_lists(record) == truth.rows
    assert record.tokens == (ALL - 7, 7) * 2
    assert record.padding_counted  # nobody tells which of its tokens a router is given


def test_skipped_tokens_are_not_those_of_expert_0() -> None:
    model = build("zaya")
    for layer in model.model.layers:
        block = next(m for m in layer.modules() if hasattr(m, "gate") and hasattr(m, "experts"))
        block.gate.balancing_biases[-1] = 100.0
    record = counted(model, inputs("zaya"))
    assert all(not any(row) for row in record.counts)
    assert set(record.tokens) == {ALL}


def test_experts_that_do_nothing_are_not_counted() -> None:
    model = build("longcat_flash")
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias[8:] = 100.0
    record = counted(model, inputs("longcat_flash"))
    assert all(row == (0,) * 8 for row in record.counts)


# where the choice stands


def heard(*parts: Any) -> Heard:
    return Heard(OUTPUT, tuple(parts))


def bins(chosen: torch.Tensor | None, experts: int) -> list[int]:
    assert chosen is not None
    return [int((chosen == expert).sum()) for expert in range(experts)]


def test_indices_of_all_experts_are_no_mask() -> None:
    logits = torch.randn(10, 4)
    indices = logits.topk(4).indices
    assert bins(Choice(4).read(heard(logits, logits, indices)), 4) == [10] * 4
    mask = nn.functional.one_hot(torch.tensor([0, 2, 2, 3]), 4)
    assert bins(Choice(4).read(heard(logits, mask)), 4) == [1, 0, 2, 1]
    assert bins(Choice(4).read(heard(logits, mask.bool())), 4) == [1, 0, 2, 1]


def test_of_several_integer_outputs_the_third_is_the_choice() -> None:
    others, indices = torch.zeros(10, 1, dtype=torch.int64), torch.full((10, 2), 3)
    assert bins(Choice(4).read(heard(torch.randn(10, 4), others, indices, others)), 4) == [0, 0, 0, 20]


@pytest.mark.parametrize(("name", "place"), [("mixtral", "router"), ("dbrx", "experts")])
def test_a_router_is_listened_to_in_one_place(name: str, place: str) -> None:
    model = build(name)
    collector = Collector(model)
    collector.begin()
    model(**inputs(name))
    blocks = [m for m in model.modules() if hasattr(m, "experts")]
    for block in blocks:
        router = block.gate if hasattr(block, "gate") else block.router
        hooks = {"router": len(router._forward_hooks), "experts": len(block.experts._forward_pre_hooks)}
        assert hooks == {"router": int(place == "router"), "experts": int(place == "experts")}


class Handing(nn.Module):
    """Hands its choice on to another module that takes one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden, top_k_index, top_k_weights)


def test_a_choice_that_is_handed_on_is_counted_once() -> None:
    model = build("dbrx")
    before = counted(model, inputs("dbrx"))
    for block in [m for m in model.modules() if hasattr(m, "experts")]:
        block.experts = Handing(block.experts)
        block.router = Unknown(block.router)
    assert counted(model, inputs("dbrx")) == before


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_where_the_choice_stands_is_decided_once(dtype: torch.dtype) -> None:
    choice = Choice(4)
    dense = torch.tensor([[3, 2, 1, 0], [0, 1, 2, 3]], dtype=dtype)
    assert bins(choice.read(heard(dense)), 4) == [2] * 4
    # were it decided anew, these would look like a mask
    assert bins(choice.read(heard(torch.tensor([[0, 1, 0, 0]], dtype=dtype))), 4) == [3, 1, 0, 0]


def test_of_two_experts_both_chosen_is_no_mask() -> None:
    assert bins(Choice(2).read(heard(torch.tensor([[0, 1], [1, 0]]))), 2) == [2, 2]
    assert bins(Choice(2).read(heard(torch.tensor([[1, 1], [1, 0]]))), 2) == [2, 1]
    assert bins(Choice(1).read(heard(torch.tensor([[0], [0]]))), 1) == [2]


def test_a_router_that_tells_nothing_is_an_error() -> None:
    with pytest.raises(TypeError, match="no expert indices"):
        Choice(4).read(heard(torch.randn(10, 4)))


def test_indices_that_are_none_of_an_expert_harm_nothing() -> None:
    model = build("mixtral")
    gate = model.model.layers[0].mlp.gate
    collector = Collector(model)
    collector.begin()
    indices = torch.tensor([[0, -1], [7, 8], [-100, 10**9]])
    collector.counter.count(0, heard(None, None, indices))
    assert collector.take().counts == ((1, 0, 0, 0, 0, 0, 0, 1),)
    assert gate is collector.counter.routers[0].module


def test_only_what_belongs_to_a_mode_is_counted() -> None:
    model = build("mixtral")
    collector = Collector(model)
    collector.begin(mode=None)
    model(**inputs("mixtral"))
    assert collector.counter.flush() == []
    for mode in ("train", "evaluation"):
        collector.begin(mode=mode)
        model(**inputs("mixtral"))
    assert [(f.mode, f.counts.table()[0][-1]) for f in collector.counter.flush()] == [("train", 48), ("evaluation", 48)]


# recomputation


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "dbrx", "gpt_oss", "llama4", "zaya"])
def test_recomputation_is_not_counted(name: str, reentrant: bool) -> None:
    model = build(name).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    truth, collector = ExpertRows(model), Collector(model)
    calls: list[int] = []
    collector.counter.routers[0].module.register_forward_hook(lambda *_: calls.append(1))
    collector.begin()
    with truth:
        loss = model(**inputs(name), labels=inputs(name)["input_ids"]).loss
    loss.backward()
    assert len(calls) == 2
    assert as_lists(collector.take()) == truth.rows


# what is wrapped around models


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v4", "dbrx"])
@pytest.mark.parametrize("where", ["attention", "experts", "saved"])
def test_adapters_change_nothing(name: str, where: str) -> None:
    model = build(name)
    before = counted(model, inputs(name))
    attention = {"dbrx": "Wqkv", "deepseek_v4": "kv_proj"}.get(name, "q_proj")
    options: dict[str, Any] = {"target_modules": [attention]}
    router = "router" if name in ("gpt_oss", "dbrx") else "gate"
    if where == "experts" and name != "dbrx":
        options["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", f"mlp.{router}.weight"]
    if where == "saved":
        options["modules_to_save"] = [router]
    wrapped = get_peft_model(model, LoraConfig(r=2, lora_dropout=0.0, task_type="CAUSAL_LM", **options))
    after = counted(wrapped, inputs(name))
    assert after == before
    assert all(layer.endswith(f".{router}") and "base" not in layer for layer in after.layers)


class ListedExperts(nn.Module):
    """Experts as lists of their matrices, as 4-bit ones have to be."""

    def __init__(self, fused: Any, linear: Callable[[torch.Tensor], nn.Module]) -> None:
        super().__init__()
        self.gate_up = nn.ModuleList([linear(w) for w in fused.gate_up_proj])
        self.down = nn.ModuleList([linear(w) for w in fused.down_proj])

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for number, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            token, place = torch.where(top_k_index == number)
            if len(token):
                gate, up = gate_up(hidden[token]).chunk(2, dim=-1)
                out.index_add_(0, token, down(nn.functional.silu(gate) * up) * top_k_weights[token, place, None])
        return out


def _linear(weight: torch.Tensor) -> nn.Module:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data.copy_(weight)
    return linear


def _linear4(weight: torch.Tensor) -> nn.Module:
    import bitsandbytes as bnb

    linear = bnb.nn.Linear4bit(weight.shape[1], weight.shape[0], bias=False, quant_type="nf4")
    linear.load_state_dict({"weight": weight.detach().clone()})
    return linear.to("cpu")


@pytest.mark.parametrize("make", [_linear, _linear4])
@pytest.mark.parametrize("registered", [True, False])
def test_experts_that_are_lists_of_4_bit_matrices(make: Callable[..., nn.Module], registered: bool) -> None:
    model = build("mixtral", hidden_size=64, intermediate_size=64)
    rows = [[0] * 8, [0] * 8]
    for index, layer in enumerate(model.model.layers):
        layer.mlp.experts = ListedExperts(layer.mlp.experts, make)
        for number, down in enumerate(layer.mlp.experts.down):
            down.register_forward_pre_hook(_count_rows(rows[index], number))
        if not registered:  # a router of a class that nobody knows
            layer.mlp.gate = Unknown(layer.mlp.gate)
    record = counted(model, inputs("mixtral"))
    assert as_lists(record) == rows
    assert record.method == "exact"
    assert [name.endswith("mlp.gate") for name in record.layers] == [True, True]


class Unknown(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = [inner]

    def forward(self, *args: Any) -> Any:
        return self.inner[0](*args)


def _count_rows(rows: list[int], number: int) -> Callable[..., None]:
    def count(module: nn.Module, args: Any) -> None:
        rows[number] += args[0].shape[0]

    return count


# models of one's own


class Expert(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(hidden, 16)
        self.linear_fc2 = nn.Linear(16, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(nn.functional.gelu(self.linear_fc1(x)))


def _by_scores(scores: torch.Tensor) -> torch.Tensor:
    return scores.topk(2, dim=-1).indices


def _balanced(scores: torch.Tensor) -> torch.Tensor:
    for _ in range(8):  # Sinkhorn's iterations
        scores = scores / scores.sum(0, keepdim=True)
        scores = scores / scores.sum(1, keepdim=True)
    return scores.topk(2, dim=-1).indices


def _dropping(scores: torch.Tensor) -> torch.Tensor:
    chosen = scores.topk(2, dim=-1).indices
    chosen[: len(chosen) // 3, 1] = -1
    return chosen


class SwitchBlock(nn.Module):
    """A mixture in the manner of BlackMamba."""

    def __init__(self, hidden: int, experts: int, choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts)
        nn.init.normal_(self.router.bias, std=0.5)
        self.local_experts = nn.ModuleList([Expert(hidden) for _ in range(experts)])
        self.choose = choose
        self.chosen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scores = torch.sigmoid(self.router(flat))
        picks = self.choose(scores)
        self.chosen.append(picks.detach())
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.local_experts):
            token, _ = torch.where(picks == number)
            if len(token):
                out = out.index_add(0, token, expert(flat[token]) * scores[token, number, None])
        return out.reshape(x.shape)


class Stack(nn.Module):
    def __init__(self, *mixers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(families.VOCABULARY, 32)
        self.layers = nn.ModuleList(mixers)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


def black_mamba(choose: Callable[[torch.Tensor], torch.Tensor] = _by_scores) -> Stack:
    torch.manual_seed(0)
    return Stack(*(SwitchBlock(32, 4, choose) for _ in range(2)))


def chosen_counts(model: Stack, keep: torch.Tensor | None = None) -> list[list[int]]:
    counts = []
    for layer in model.layers:
        picks = torch.cat(layer.chosen)
        counts.append(bins(picks if keep is None else picks[keep.flatten().bool()], 4))
    return counts


PADDED = torch.ones(families.ROWS, families.TOKENS, dtype=torch.int64)
PADDED[1, 15:] = 0


@pytest.mark.parametrize("choose", [_by_scores, _balanced, _dropping])
def test_experts_of_a_list_are_counted_by_their_rows(choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = black_mamba(choose)
    record = counted(model, inputs("mixtral"))
    assert as_lists(record) == chosen_counts(model)
    assert (record.layers, record.tokens) == (("layers.0.router", "layers.1.router"), (ALL, ALL))
    assert (record.method, record.padding_counted) == ("exact", False)


def test_padding_of_listed_experts_is_left_out_where_the_scores_are_the_choice() -> None:
    model = black_mamba()
    record = counted(model, {**inputs("mixtral"), "attention_mask": PADDED})
    assert as_lists(record) == chosen_counts(model, PADDED)
    assert (record.tokens, record.padding_counted) == ((39, 39), False)


@pytest.mark.parametrize("choose", [_balanced, _dropping])
def test_padding_of_listed_experts_is_told_where_they_are_not(choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = black_mamba(choose)
    record = counted(model, {**inputs("mixtral"), "attention_mask": PADDED})
    assert as_lists(record) == chosen_counts(model)
    assert (record.tokens, record.padding_counted) == ((ALL, ALL), True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_listed_experts_over_several_forwards_with_recomputation(reentrant: bool) -> None:
    model = black_mamba()
    blocks = [layer.forward for layer in model.layers]
    for layer, call in zip(model.layers, blocks, strict=True):
        layer.forward = lambda x, call=call: torch.utils.checkpoint.checkpoint(call, x, use_reentrant=reentrant)
    collector = Collector(model)
    for mask in (None, PADDED, PADDED):
        collector.begin(mask)
        model(**inputs("mixtral")).sum().backward()
    record = collector.take()
    once, padded = chosen_counts(_fresh(model)), chosen_counts(_fresh(model), PADDED)
    assert as_lists(record) == [[a + 2 * b for a, b in zip(*x, strict=True)] for x in zip(once, padded, strict=True)]
    assert record.tokens == (ALL + 2 * 39,) * 2


def _fresh(model: Stack) -> Stack:
    fresh = black_mamba()
    fresh.load_state_dict(model.state_dict())
    fresh(**inputs("mixtral"))
    return fresh


class OldGate(nn.Module):
    """Returns indices first, as gates do in code that comes with a checkpoint."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, hidden))

    def forward(self, x: torch.Tensor) -> Any:
        scores = torch.sigmoid(nn.functional.linear(x.reshape(-1, x.shape[-1]), self.weight))
        corrected = scores + torch.linspace(0, 0.5, len(self.weight))
        return corrected.topk(2, dim=-1).indices, scores, None


class OldBlock(SwitchBlock):
    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__(hidden, experts, _by_scores)
        self.gate, self.experts = OldGate(hidden, experts), self.local_experts
        del self.router, self.local_experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        picks, _, _ = self.gate(x)
        self.chosen.append(picks)
        flat = x.reshape(-1, x.shape[-1])
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, _ = torch.where(picks == number)
            out = out.index_add(0, token, expert(flat[token]))
        return out.reshape(x.shape)


def test_a_gate_that_returns_indices_tells_padding_too() -> None:
    torch.manual_seed(0)
    model = Stack(OldBlock(32, 4), OldBlock(32, 4))
    record = counted(model, {**inputs("mixtral"), "attention_mask": PADDED})
    assert as_lists(record) == chosen_counts(model, PADDED)
    assert (record.tokens, record.padding_counted) == ((39, 39), False)


class Fused(nn.Module):
    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(experts, hidden, hidden) * 0.1)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.einsum("teh,te->th", torch.einsum("th,ehg->teg", x, self.w), weights)


class FusedBlock(nn.Module):
    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = Fused(hidden, experts)
        self.top_k = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scores = self.gate(flat).softmax(-1)
        best = scores.topk(self.top_k, dim=-1)
        weights = torch.zeros_like(scores).scatter(1, best.indices, best.values)
        return self.experts(flat, weights).reshape(x.shape)


def test_the_best_scores_are_marked_as_approximate() -> None:
    torch.manual_seed(0)
    model = Stack(FusedBlock(32, 4))
    scores: list[torch.Tensor] = []
    model.layers[0].gate.register_forward_hook(lambda module, args, output: scores.append(output))
    record = counted(model, inputs("mixtral"))
    assert as_lists(record) == [bins(scores[0].topk(2).indices, 4)]
    assert record.method == "approximate"


def test_a_record_is_as_weak_as_its_weakest_layer() -> None:
    torch.manual_seed(0)
    assert counted(Stack(FusedBlock(32, 4), SwitchBlock(32, 4, _by_scores)), inputs("mixtral")).method == "approximate"


def test_a_gate_without_experts_is_no_router() -> None:
    gated = nn.Sequential()
    gated.add_module("gate", nn.Linear(8, 8))
    gated.add_module("up", nn.Linear(8, 8))
    assert find_routers(gated) == []


def test_one_router_of_an_unknown_kind_does_not_stop_the_others(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Choice.read
    unknown: list[Choice] = []

    def reading(choice: Choice, heard: Heard) -> torch.Tensor | None:
        unknown.append(choice)
        nothing = Heard(OUTPUT, torch.zeros(3))
        return read(choice, nothing if choice is unknown[0] else heard)

    monkeypatch.setattr(Choice, "read", reading)
    make_trainer([FtInsightCallback(tmp_path / "run.jsonl")], model=moe_model()).train()
    log = Log(tmp_path / "run.jsonl")
    assert {layer for record in log.of(r.Experts) for layer in record.layers} == {"model.layers.1.mlp.gate"}
    assert log.notices == [
        "1 of 2 routers (model.layers.0.mlp.gate) tell nothing of their choice that is understood here, and are not "
        "counted"
    ]


# what counting costs

WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "histc", "is_nonzero", "equal"}
"""Operations whose result, or its shape, a GPU has to hand to the host."""


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "name", ["mixtral", "dbrx", "jetmoe", "llama4", "switch_transformers", "zaya", "doge", "listed"]
)
def test_counting_never_waits_for_the_device(name: str, padded: bool) -> None:
    model, arguments = (black_mamba(), inputs("mixtral")) if name == "listed" else (build(name), inputs(name))
    collector, seen = Collector(model), Operations()
    count = collector.counter.count

    def watched(index: int, heard: Heard) -> None:
        with seen:
            count(index, heard)

    collector.observer.router_chose = watched
    for _ in range(2):  # at the first call it may, once, to tell a mask from indices
        seen.names.clear()
        with seen:
            collector.begin(PADDED if padded else None)
        model(**arguments)
    with seen:
        flushed = collector.counter.flush()
    assert len(flushed) == 1
    assert "scatter_add_" in seen.names or (name == "listed" and not padded)
    assert not WAITING & set(seen.names)
    routers = len(collector.counter.routers)
    assert len(seen.names) <= 20 + (60 if name == "listed" else 30) * routers


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_counting_never_waits_for_a_gpu(name: str) -> None:
    model = build(name).cuda().train()
    arguments = {key: value.cuda() for key, value in inputs(name).items()}
    collector, heard = Collector(model), []
    collector.observer.router_chose = lambda index, what: heard.append((index, what))
    model(**arguments)
    collector.begin(PADDED.cuda())
    for index, what in heard:  # the first call may wait
        collector.counter.count(index, what)
    torch.cuda.set_sync_debug_mode("error")
    try:
        collector.begin(collector.counter._mask)
        for index, what in heard:
            collector.counter.count(index, what)
        flushes = collector.counter.flush()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert _record(flushes[0], 1, 0.0).tokens == (2 * 39,) * len(collector.counter.routers)


# through the trainer


def test_a_router_that_is_heard_at_its_experts_under_a_trainer(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    model = build("dbrx", vocab_size=300)
    make_trainer(
        [FtInsightCallback(tmp_path / "run.jsonl")], model=model, rows=token_rows([8] * 8), checkpointing=True
    ).train()
    records = Log(tmp_path / "run.jsonl").of(r.Experts)
    assert [sum(sum(record.counts[layer]) for record in records) for layer in (0, 1)] == [4 * 16 * 2] * 2
    hooks = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    assert not [h for h in hooks if type(h).__module__.startswith("ft_insight")]


# leaving no trace


@pytest.mark.parametrize("make", [lambda: build("dbrx"), lambda: build("mixtral"), black_mamba])
def test_hooks_are_taken_away_and_copies_have_none(make: Callable[[], nn.Module]) -> None:
    model = make()
    collector = Collector(model)
    if isinstance(model, Stack):
        for layer in model.layers:
            layer.choose = None  # type: ignore[assignment]
    same = copy.deepcopy(model)
    pickle.loads(pickle.dumps(model))  # noqa: S301 - our own bytes
    collector.begin()
    if not isinstance(model, Stack):
        same(**inputs("mixtral"))
    assert collector.counter.flush() == []
    collector.seams.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
