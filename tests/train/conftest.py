"""Small real models and trainers for the tests that train."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from ft_insight import records as r
from ft_insight.callbacks import clock as clock_module
from ft_insight.callbacks import output as output_module
from ft_insight.demo.tiny import build_tokenizer
from ft_insight.demo.train import checkpointing_options
from ft_insight.runlog import read_records
from tests.train.nvml_library import cases, library  # noqa: F401 (fixtures)
from tests.train.planted import VirtualClock

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
VOCABULARY = 300


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """All clocks of the callback stand still, but for the work that a test plants."""
    clock = VirtualClock()
    monkeypatch.setattr(clock_module, "perf_counter", clock)
    monkeypatch.setattr(output_module, "perf_counter", clock)
    return clock


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in a fixed order, and the other core for the machine
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(["one two three four"], vocab_size=VOCABULARY)


def dense_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
        )
    )


def moe_model(seed: int = 0, **options: Any) -> MixtralForCausalLM:
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 128,
        **options,
    }
    return MixtralForCausalLM(MixtralConfig(**settings))


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)


def token_rows(lengths: Sequence[int], prompt: int = 2, seed: int = 0) -> Dataset:
    """Tokenised rows of given lengths; the first ``prompt`` tokens carry no loss."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(10, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    return Dataset.from_dict(
        {"input_ids": ids, "labels": [[-100] * min(prompt, len(row)) + row[prompt:] for row in ids]}
    )


MakeTrainer = Callable[..., SFTTrainer]


@pytest.fixture
def make_trainer(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> MakeTrainer:
    def make(
        callbacks: Sequence[Any] = (),
        *,
        model: Any = None,
        rows: Dataset | None = None,
        eval_rows: Dataset | None = None,
        peft_config: Any = None,
        checkpointing: bool = False,
        trainer_class: type[SFTTrainer] = SFTTrainer,
        data_collator: Any = None,
        **settings: Any,
    ) -> SFTTrainer:
        options: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "max_steps": 4,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "bf16": False,
            "use_cpu": True,
            "disable_tqdm": True,
            "shuffle_dataset": False,
            "dataloader_pin_memory": False,
            "seed": 1,
            **checkpointing_options(SFTConfig),
            **settings,
        }
        for name in [n for n in options if n in ("activation_checkpointing", "gradient_checkpointing")]:
            options[name] = checkpointing
        return trainer_class(
            model=dense_model() if model is None else model,
            args=SFTConfig(**options),
            train_dataset=token_rows([12, 7, 9, 12, 5, 8, 11, 6]) if rows is None else rows,
            eval_dataset=eval_rows,
            processing_class=tokenizer,
            peft_config=peft_config,
            callbacks=list(callbacks),
            data_collator=data_collator,
        )

    return make


class Log:
    """A finished log, by record type."""

    def __init__(self, path: Path) -> None:
        self.follower, stream = read_records(path)
        self.records = list(stream)

    def of(self, kind: type[Any]) -> list[Any]:
        return [x for x in self.records if isinstance(x, kind)]

    @property
    def header(self) -> r.Header:
        return self.of(r.Header)[-1]

    @property
    def steps(self) -> list[r.Step]:
        return self.of(r.Step)

    @property
    def end(self) -> r.End:
        return self.of(r.End)[-1]

    @property
    def notices(self) -> list[str]:
        """All but the word that there is no GPU here, which every run on a CPU has."""
        return [n.text for n in self.of(r.Notice) if not n.text.startswith("no GPU:")]
