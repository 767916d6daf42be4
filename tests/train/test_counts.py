"""Slots, real tokens and loss tokens against counts made by hand, and experts against what they really multiply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.nn import functional

from ft_insight import FtInsightCallback
from ft_insight import records as r
from ft_insight.callbacks.facts import dataset_facts, model_facts
from ft_insight.demo.tiny import lora_config
from tests.train.conftest import Log, MakeTrainer, lora, moe_model, token_rows

# Three rows of 5, 3 and 4 tokens. The labels of the first two tokens of each are -100; none of these is counted, and
# the shift by one drops only a label at position 0, which is -100 anyway: 3 + 1 + 2 loss tokens.
THREE_ROWS = token_rows([5, 3, 4])


def counts(log: Log) -> list[list[tuple[int | None, ...]]]:
    return [[(m.queries, m.slots, m.real_tokens, m.loss_tokens) for m in s.micro] for s in log.steps]


def run(make_trainer: MakeTrainer, path: Path, **settings: Any) -> Log:
    make_trainer([FtInsightCallback(path)], **settings).train()
    return Log(path)


def in_order(trainer_settings: dict[str, Any]) -> dict[str, Any]:
    return {"train_sampling_strategy": "sequential", "max_steps": -1, "num_train_epochs": 1, **trainer_settings}


def test_accumulation_1(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    log = run(make_trainer, tmp_path / "run.jsonl", **in_order({"rows": THREE_ROWS}))
    # rows of 5 and 3 padded to 5: 10 slots, 8 real, 3 + 1 with loss; then the row of 4 alone
    assert counts(log) == [[(2, 10, 8, 4)], [(1, 4, 4, 2)]]


def test_accumulation_2(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    log = run(make_trainer, tmp_path / "run.jsonl", **in_order({"rows": THREE_ROWS, "gradient_accumulation_steps": 2}))
    assert counts(log) == [[(2, 10, 8, 4), (1, 4, 4, 2)]]


def test_labels_at_position_0_carry_no_loss(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    log = run(make_trainer, tmp_path / "run.jsonl", **in_order({"rows": token_rows([5, 3, 4], prompt=0)}))
    # language modelling: a row of n tokens has n - 1 predictions
    assert counts(log) == [[(2, 10, 8, 4 + 2)], [(1, 4, 4, 3)]]


def test_padding_free_rows_are_told_apart(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    log = run(
        make_trainer,
        tmp_path / "run.jsonl",
        **in_order({"rows": THREE_ROWS, "padding_free": True, "max_length": None}),
    )
    assert counts(log) == [[(2, 8, 8, 4)], [(1, 4, 4, 2)]]


def test_padding_at_the_end_of_a_flattened_batch_is_no_row(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    log = run(
        make_trainer,
        tmp_path / "run.jsonl",
        **in_order({"rows": THREE_ROWS, "padding_free": True, "max_length": None, "pad_to_multiple_of": 8}),
    )
    assert [c[0][:3] for c in counts(log)] == [(2, 8, 8), (1, 8, 4)]


def test_packed_rows_are_still_rows(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    rows = token_rows([5, 3, 4, 6, 2, 4])
    log = run(
        make_trainer,
        tmp_path / "run.jsonl",
        **in_order({"rows": rows, "packing": True, "max_length": 8, "per_device_train_batch_size": 1}),
    )
    assert sum(c[0][0] for c in counts(log)) == 6
    assert sum(c[0][2] for c in counts(log)) == 24
    assert log.header.dataset.queries == 6
    assert log.header.dataset.query_unit == "row"


def test_wrapped_packing_says_that_rows_are_gone(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    rows = token_rows([5, 3, 4, 6, 2, 4])  # 24 tokens: 3 chunks of 8
    log = run(
        make_trainer,
        tmp_path / "run.jsonl",
        **in_order({"rows": rows, "packing": True, "packing_strategy": "wrapped", "max_length": 8}),
    )
    assert (log.header.dataset.queries, log.header.dataset.query_unit) == (3, "chunk")


def test_header_tells_the_lengths_of_all_rows(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    log = run(make_trainer, tmp_path / "run.jsonl", rows=token_rows([5, 3, 4, 4, 9]), max_length=8)
    data = log.header.dataset
    assert (data.queries, data.length_values, data.length_counts) == (5, (3, 4, 5, 8), (1, 2, 1, 1))
    assert (data.longest, data.lengths_from) == (8, "all rows")


@pytest.mark.parametrize("workers", [0, 1])
def test_header_tells_who_loads_the_data(workers: int, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    log = run(make_trainer, tmp_path / "run.jsonl", rows=token_rows([5, 3, 4, 4]), dataloader_num_workers=workers)
    assert log.header.train.loader_workers == workers


def test_lengths_of_a_selection_are_those_of_the_selection() -> None:
    class Args:
        packing = False

    data = dataset_facts(Dataset.from_dict({"input_ids": [[1] * n for n in (5, 3, 9, 4)]}).select([2, 0]), Args())
    assert (data.queries, data.length_values) == (2, (5, 9))


def test_model_facts_count_by_hand() -> None:
    # embeddings and head 2 x 300 x 32; a layer: q 32x32, k and v 32x16 each, o 32x32, two norms of 32, router 32x4,
    # four experts of 3 x 32 x 48; a final norm of 32
    facts = model_facts(moe_model())
    experts = 2 * 4 * 3 * 32 * 48
    rest = 2 * 300 * 32 + 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 2 * 32 + 32 * 4) + 32
    assert facts.parameters == facts.trainable_parameters == experts + rest
    assert facts.active_parameters == experts // 2 + rest
    assert (facts.layers, facts.experts, facts.experts_per_token) == (2, 4, 2)


def test_lora_counts_only_its_adapters_as_trainable(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    log = run(make_trainer, tmp_path / "run.jsonl", peft_config=lora())
    # rank 4 on q (32 -> 32) and v (32 -> 16), two layers
    assert log.header.model.trainable_parameters == 2 * 4 * ((32 + 32) + (32 + 16))
    assert (log.header.train.method, log.header.train.lora_rank) == ("lora", 4)


# experts


class ExpertRows:
    """Counts the rows that each expert's own weights multiply, knowing nothing of routers."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[int, list[int]] = {}
        self.active = True
        places = {}
        for layer, block in enumerate(model.model.layers):
            weights = block.mlp.experts.down_proj
            self.rows[layer] = [0] * weights.shape[0]
            for expert in range(weights.shape[0]):
                places[weights[expert].data_ptr()] = (layer, expert)
        linear = functional.linear

        def counting(tensor: torch.Tensor, weight: torch.Tensor, *args: Any) -> torch.Tensor:
            place = places.get(weight.data_ptr())
            recomputing = torch._C._current_graph_task_id() != -1
            if place is not None and self.active and not recomputing:
                self.rows[place[0]][place[1]] += tensor.shape[0]
            return linear(tensor, weight, *args)

        monkeypatch.setattr(functional, "linear", counting)


def expert_counts(log: Log, mode: str = "train") -> dict[int, list[int]]:
    sums: dict[int, list[int]] = {}
    for record in log.of(r.Experts):
        if record.mode == mode:
            for layer, row in enumerate(record.counts):
                sums[layer] = [a + b for a, b in zip(sums.get(layer, [0] * len(row)), row, strict=True)]
    return sums


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_expert_counts_equal_what_the_experts_multiply(
    checkpointing: bool,
    accumulation: int,
    top_k: int,
    make_trainer: MakeTrainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = moe_model(num_experts_per_tok=top_k)
    model.set_experts_implementation("eager")
    truth = ExpertRows(model, monkeypatch)
    log = run(
        make_trainer,
        tmp_path / "run.jsonl",
        model=model,
        rows=token_rows([8] * 12),  # no padding, which experts do multiply and which is no token
        checkpointing=checkpointing,
        gradient_accumulation_steps=accumulation,
        max_steps=2,
    )
    assert expert_counts(log) == truth.rows
    assert sum(truth.rows[0]) == 2 * accumulation * 2 * 8 * top_k


def test_padding_is_not_counted(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    padded = run(make_trainer, tmp_path / "a.jsonl", model=moe_model(), **in_order({"rows": THREE_ROWS}))
    flat = run(
        make_trainer,
        tmp_path / "b.jsonl",
        model=moe_model(),
        **in_order({"rows": THREE_ROWS, "padding_free": True, "max_length": None}),
    )
    for log in (padded, flat):
        tokens = [sum(record.tokens[i] for record in log.of(r.Experts)) for i in range(2)]
        assert tokens == [12, 12]
        assert sum(expert_counts(log)[0]) == 24
        assert sum(record.queries for record in log.of(r.Experts)) == 3
    assert not any(record.padding_counted for record in padded.of(r.Experts))


def test_evaluation_is_apart(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    log = run(
        make_trainer,
        tmp_path / "run.jsonl",
        model=moe_model(),
        eval_rows=token_rows([6, 4]),
        eval_strategy="steps",
        eval_steps=2,
        rows=token_rows([8] * 8),
    )
    assert sum(expert_counts(log)[0]) == 4 * 16 * 2
    assert sum(expert_counts(log, "evaluation")[0]) == 2 * 10 * 2


def test_adapters_on_the_experts_do_not_hide_the_router(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    log = run(
        make_trainer,
        tmp_path / "run.jsonl",
        model=moe_model(),
        peft_config=lora_config(4),
        checkpointing=True,
        rows=token_rows([8] * 8),
    )
    assert log.of(r.Experts)[0].layers == ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate")
    assert sum(expert_counts(log)[1]) == 4 * 16 * 2


def test_a_router_forced_to_one_expert(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    model = moe_model(num_experts_per_tok=1)
    gate = model.model.layers[1].mlp.gate
    router = gate.forward

    def forced(hidden: torch.Tensor) -> Any:
        logits, scores, indices = router(hidden)
        return logits, scores, torch.full_like(indices, 3)

    gate.forward = forced
    log = run(make_trainer, tmp_path / "run.jsonl", model=model, rows=token_rows([8] * 8))
    assert expert_counts(log)[1] == [0, 0, 0, 4 * 16]
