"""The demo's training: a real SFTTrainer run of a tiny random Mixtral with LoRA and gradient checkpointing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_LENGTH = 512
LEARNING_RATE = 5e-3


def text_of(row: dict[str, Any]) -> str:
    """Return all text of a row, whatever its shape, for training a tokenizer on."""
    if "messages" in row:
        return "\n".join(m["content"] for m in row["messages"])
    return "".join(str(row[key]) for key in ("prompt", "completion", "text") if key in row)


def make_trainer(
    rows: Sequence[dict[str, Any]],
    output_dir: Path,
    *,
    callbacks: Sequence[Any],
    steps: int | None = None,
    epochs: float = 1.0,
    batch: int = 4,
    accumulation: int = 1,
    top_k: int = 2,
    evaluation_rows: int = 0,
    seed: int = 0,
) -> Any:
    """Build an ``SFTTrainer`` on a tiny random Mixtral (8 experts) over ``rows``; ``steps`` ends it early.

    The last ``evaluation_rows`` rows are held out and evaluated four times during the run.
    """
    # imported here: the command line that starts a demo has no need of torch
    import torch
    from datasets import Dataset
    from transformers.utils import logging
    from trl import SFTConfig, SFTTrainer

    from ft_insight.demo.tiny import build_tiny_mixtral, build_tokenizer, lora_config

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.set_verbosity_error()
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(text_of(row) for row in rows)
    model = build_tiny_mixtral(
        len(tokenizer),
        top_k=top_k,
        seed=seed,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model.config.name_or_path = "tiny-mixtral"
    split = len(rows) - evaluation_rows
    training = Dataset.from_list(list(rows[:split]))
    held_out = Dataset.from_list(list(rows[split:])) if evaluation_rows else None
    planned = steps or max(1, round(len(training) * epochs / (batch * accumulation)))
    config = SFTConfig(
        output_dir=str(output_dir),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=steps or -1,
        num_train_epochs=epochs,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="cosine",
        max_length=MAX_LENGTH,
        **checkpointing_options(SFTConfig),
        bf16=torch.cuda.is_available(),
        logging_steps=1,
        eval_strategy="steps" if held_out is not None else "no",
        eval_steps=max(1, planned // 4),
        save_strategy="no",
        report_to=[],
        seed=seed,
        dataset_num_proc=None,
    )
    return SFTTrainer(
        model=model,
        args=config,
        train_dataset=training,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=lora_config(),
        callbacks=list(callbacks),
    )


def checkpointing_options(config: Any) -> dict[str, Any]:
    """Return the options for non-reentrant checkpointing under the name that this transformers uses."""
    renamed = "activation_checkpointing" in config.__dataclass_fields__
    name = "activation_checkpointing" if renamed else "gradient_checkpointing"
    return {name: True, f"{name}_kwargs": {"use_reentrant": False}}
