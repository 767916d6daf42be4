"""QLoRA of Mixtral as the paper does it: NF4 with double quantisation, LoRA on all experts and the router.

    python examples/mixtral/finetune.py --tiny                          # random weights, CPU, a minute
    python examples/mixtral/finetune.py --tiny --top-k 8                # dense
    python examples/mixtral/finetune.py --model mistralai/Mixtral-8x7B-v0.1 --dataset FILE.jsonl --price 2.49

The run is recorded by ft-insight; ``ft-insight watch`` shows it, ``ft-insight report`` and ``ft-insight project`` read
it. README.md beside this file says what real weights need.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common.py

from common import add_arguments, fail, load_data, make_and_train, resolve, tiny_tokenizer  # isort: skip
import torch
from experts4bit import Experts4bit, load_quantised, lora_config, quantise, storage_bytes

from ft_insight.demo.tiny import build_tiny_mixtral

RANK, ALPHA = 16, 32
WANTED = ["*.safetensors", "*.json", "tokenizer*"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--attention", default="sdpa", help="sdpa, eager, or flash_attention_2 as in the paper")
    return resolve(parser, parser.parse_args())


def tiny_model(tokenizer: Any, top_k: int) -> Any:
    model = build_tiny_mixtral(
        len(tokenizer),
        top_k=top_k,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model.config.name_or_path = "tiny-mixtral-4bit"
    gpu = torch.cuda.is_available()
    return quantise(model.to("cuda" if gpu else "cpu"), compute_dtype=torch.bfloat16 if gpu else torch.float32)


def real_model(name: str, top_k: int, attention: str) -> tuple[Any, Any]:
    """Return model and tokenizer from a folder or the hub."""
    from huggingface_hub import snapshot_download
    from transformers import AutoTokenizer

    gpu = torch.cuda.is_available()
    if not gpu:
        print("no GPU found: loading on the CPU")
    try:
        folder = Path(name).expanduser()
        if not folder.is_dir():
            folder = Path(snapshot_download(name, allow_patterns=WANTED, ignore_patterns="consolidated*"))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = load_quantised(
            folder,
            device="cuda" if gpu else "cpu",
            compute_dtype=torch.bfloat16 if gpu else torch.float32,
            top_k=top_k,
            attention=attention,
        )
    except (OSError, ValueError, ImportError) as error:
        fail(f"cannot load {name}: {error}")
    return model, tokenizer


def say_memory(model: Any) -> None:
    """Show what the experts take in 4 bits, and what they would have taken."""
    experts = [m for m in model.modules() if isinstance(m, Experts4bit)]
    weights = sum(p.quant_state.shape.numel() for m in experts for p in m.parameters())
    stored = sum(storage_bytes(m) for m in experts)
    print(
        f"experts: {weights:,} weights in {len(experts)} layers, {_megabytes(2 * weights)} in bf16, "
        f"{_megabytes(stored)} in 4 bits ({8 * stored / weights:.2f} bits each)"
    )
    print(f"whole model: {_megabytes(storage_bytes(model))}")


def _megabytes(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def main() -> int:
    arguments = parse()
    data = load_data(arguments)
    if arguments.tiny:
        tokenizer = tiny_tokenizer([*data[0], *data[1]])
        if arguments.top_k > 8:
            fail(f"--top-k {arguments.top_k}: the model has 8 experts")
        model = tiny_model(tokenizer, arguments.top_k)
    else:
        model, tokenizer = real_model(arguments.model, arguments.top_k, arguments.attention)
    say_memory(model)
    make_and_train(
        model,
        tokenizer,
        arguments,
        peft_config=lora_config(RANK, ALPHA, model.config.num_local_experts),
        data=data,
        cache=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
