from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

from ft_insight.demo.rows import generate_rows  # noqa: E402
from ft_insight.demo.tiny import build_tiny_mixtral, build_tokenizer, lora_config  # noqa: E402

LAYERS = 2  # half of the demo's, for speed


@pytest.fixture(autouse=True)
def _few_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, 2))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return generate_rows(120)


@pytest.fixture(scope="module")
def tokenizer(rows: list[dict[str, str]]) -> Any:
    return build_tokenizer((row["prompt"] + row["completion"] for row in rows), vocab_size=1024)


class _GradientsSeen(TrainerCallback):
    """Notes which trainable parameters ever had a gradient other than zero."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, parameter in kwargs["model"].named_parameters():
            if parameter.grad is not None and parameter.grad.abs().max() > 0:
                self.seen.add(name)


def _model(tokenizer: Any, **options: Any) -> Any:
    return build_tiny_mixtral(
        len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **options,
    )


def _train(
    tokenizer: Any, rows: list[dict[str, Any]], folder: Path, steps: int, **options: Any
) -> tuple[Any, list[float], set[str]]:
    callback = _GradientsSeen()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # renamed checkpointing options: the old names work everywhere
        config = SFTConfig(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=5e-3,
            lr_scheduler_type="constant",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **options,
        )
        trainer = SFTTrainer(
            model=_model(tokenizer, layers=LAYERS),
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=lora_config(),
            callbacks=[callback],
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trainer, [float(loss) for loss in losses], callback.seen


def test_pairs_train_through_every_adapter(tokenizer: Any, rows: list[dict[str, str]], tmp_path: Path) -> None:
    trainer, losses, seen = _train(tokenizer, rows, tmp_path, steps=6)
    assert len(losses) == 6
    assert all(math.isfinite(loss) for loss in losses)
    trainable = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name for name in trainable)
    # Attention q, k, v, o, and gate_up, down and the router, each with an A and a B, in each layer.
    assert len(trainable) == LAYERS * 7 * 2
    assert seen == trainable
    assert sum("mlp.experts" in name for name in trainable) == LAYERS * 2 * 2
    assert sum("mlp.gate" in name for name in trainable) == LAYERS * 2


def test_messages_train(tokenizer: Any, rows: list[dict[str, str]], tmp_path: Path) -> None:
    talks = [
        {
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["completion"]},
            ]
        }
        for row in rows[:16]
    ]
    _, losses, seen = _train(tokenizer, talks, tmp_path, steps=2, assistant_only_loss=True)
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)
    assert seen


def test_loss_falls(tokenizer: Any, rows: list[dict[str, str]], tmp_path: Path) -> None:
    _, losses, _ = _train(tokenizer, rows, tmp_path, steps=25)
    assert sum(losses[-5:]) / 5 < sum(losses[:3]) / 3 - 0.8


def test_tokenizer_is_the_same_each_time_and_loses_nothing(tokenizer: Any, rows: list[dict[str, str]]) -> None:
    again = build_tokenizer((row["prompt"] + row["completion"] for row in rows), vocab_size=1024)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert len(tokenizer) == 1024
    for text in (rows[0]["prompt"], "naïve 漢字 🙂\n\t x"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    special = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    assert len(set(special)) == 4
    with pytest.raises(ValueError, match="at least"):
        build_tokenizer(["a"], vocab_size=100)


def test_chat_template_marks_what_the_assistant_says(tokenizer: Any) -> None:
    talk = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    assert text == "<|user|>\none?<eos>\n<|assistant|>\ntwo<eos>\n"
    asked = tokenizer.apply_chat_template(talk[:1], tokenize=False, add_generation_prompt=True)
    assert text.startswith(asked)
    encoded = tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    assert tokenizer.decode([token for token, mine in pairs if mine]) == "two<eos>"


def test_model_is_small_the_same_each_time_and_leaves_the_random_state_alone() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    first = build_tiny_mixtral(2048, seed=3)
    assert torch.equal(torch.rand(3), expected)
    second, other = build_tiny_mixtral(2048, seed=3), build_tiny_mixtral(2048, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert 3e6 < sum(parameter.numel() for parameter in first.parameters()) < 5e6
    assert all(parameter.dtype == torch.float32 for parameter in first.parameters())
    assert first.config.num_key_value_heads < first.config.num_attention_heads
    assert not first.config.output_router_logits


@pytest.mark.parametrize("options", [{"hidden": 100}, {"hidden": 0}, {"top_k": 0}, {"top_k": 9}])
def test_model_refuses_sizes_that_cannot_be(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        build_tiny_mixtral(512, **options)


def test_dense_variant_routes_to_all_experts() -> None:
    model = build_tiny_mixtral(512, layers=1, experts=4, top_k=4)
    assert model.config.num_experts_per_tok == 4
    out = model(input_ids=torch.arange(12)[None], output_router_logits=True)
    assert torch.isfinite(out.logits).all()
