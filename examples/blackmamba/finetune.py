"""Fine-tune BlackMamba, all weights of it, with FtInsightCallback added.

    python examples/blackmamba/finetune.py --tiny
    python examples/blackmamba/finetune.py --model Zyphra/BlackMamba-2.8B --dataset FILE.jsonl --top-k 2

On a GPU real weights are trained in bfloat16, on a CPU in float32. In another terminal: ``ft-insight watch``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from blackmamba import checkpoint
from blackmamba.configuration import BlackMambaConfig
from blackmamba.modeling import BlackMambaForCausalLM, active_parameters
from blackmamba.scan import choose_scan
from common import add_arguments, fail, load_data, make_and_train, resolve, tiny_tokenizer

TOKENIZER = "EleutherAI/gpt-neox-20b"
PADDING = "<|padding|>"
EXPERTS = 8
"""How many experts there are in the tiny model, as in the released ones."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--tokenizer", metavar="NAME_OR_PATH", help=f"default: the model folder's, or else {TOKENIZER}")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward to save memory")
    return resolve(parser, parser.parse_args(), tiny={"lr": 1e-2})


def tiny_model(tokenizer: Any, top_k: int) -> BlackMambaForCausalLM:
    torch.manual_seed(0)
    config = BlackMambaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=4,
        moe_intermediate_size=128,
        num_local_experts=EXPERTS,
        num_experts_per_tok=top_k,
        initializer_range=64**-0.5,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config.name_or_path = "tiny-blackmamba"
    return BlackMambaForCausalLM(config)


def real_tokenizer(arguments: argparse.Namespace) -> Any:
    from transformers import AutoTokenizer

    own = Path(arguments.model) / "tokenizer_config.json"
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer or (arguments.model if own.exists() else TOKENIZER))
    if tokenizer.pad_token_id is None and PADDING in tokenizer.get_vocab():
        tokenizer.pad_token = PADDING
    return tokenizer


def prepare(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> tuple[Any, Any]:
    """Return (model, tokenizer)."""
    gpu = torch.cuda.is_available()
    if arguments.tiny:
        torch.set_num_threads(1)  # so small a model gains nothing from more, and loses much where others use the cores
        tokenizer = tiny_tokenizer(rows)
        model = tiny_model(tokenizer, arguments.top_k)
    else:
        dtype = torch.bfloat16 if gpu else torch.float32
        model = checkpoint.load(arguments.model, top_k=arguments.top_k, dtype=dtype)
        tokenizer = real_tokenizer(arguments)
    return model.to("cuda") if gpu else model, tokenizer


def main() -> int:
    arguments = parse()
    data = load_data(arguments)
    try:
        model, tokenizer = prepare(arguments, data[0])
    except (ValueError, OSError) as error:  # a checkpoint that does not fit, top-k out of range, no network
        fail(error)
    total, active = model.num_parameters(), active_parameters(model)
    experts, top_k = model.config.num_local_experts, model.config.num_experts_per_tok
    print(f"{total:,} parameters in {model.dtype}, {active:,} per token with {top_k} of {experts} experts")
    print(f"scan: {choose_scan(model)}")
    # real weights are bfloat16 already, which needs no autocast on top
    precision: dict[str, Any] = {} if arguments.tiny else {"bf16": False}
    make_and_train(model, tokenizer, arguments, data=data, checkpointing=arguments.checkpointing, **precision)
    return 0


if __name__ == "__main__":
    sys.exit(main())
