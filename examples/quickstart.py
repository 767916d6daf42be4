"""Fine-tune a tiny random Mixtral on any data set file, on a CPU, with FtInsightCallback added.

    python examples/quickstart.py --dataset FILE.jsonl

FILE is JSON or JSONL with rows of prompt/completion, messages, text, or instruction/input/output. In another
terminal: ``ft-insight watch``; afterwards: ``ft-insight project --gpu h100``.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, required=True, metavar="FILE", help="JSON or JSONL")
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N rows")
    parser.add_argument("--steps", type=int, default=60, help="end after so many optimizer steps (0: all epochs)")
    parser.add_argument("--epochs", type=float, default=10.0, help="epochs of the job that is priced")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--top-k", type=int, default=2, help="experts per token, of 8")
    parser.add_argument("--price", type=float, metavar="USD", help="what this machine costs per hour")
    parser.add_argument("--log", type=Path, metavar="PATH", help="default: a new folder under ft_insight_runs/")
    parser.add_argument("--output", type=Path, default=Path("quickstart_output"), help="checkpoints go here")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    # before torch is loaded: threads that spin while they wait train many times slower on a machine that is not idle
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from ft_insight.demo.datasets import DatasetError, load_rows

    try:
        loaded = load_rows(arguments.dataset, arguments.limit)
    except DatasetError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 2
    print(f"{len(loaded.rows):,} rows of {loaded.shape} from {arguments.dataset} ({loaded.dropped} unusable dropped)")
    warnings.filterwarnings("ignore", category=FutureWarning)  # upstream's own deprecations

    from ft_insight import FtInsightCallback
    from ft_insight.demo.train import make_trainer

    trainer = make_trainer(
        loaded.rows,
        arguments.output,
        callbacks=[FtInsightCallback(path=arguments.log, price=arguments.price)],
        steps=arguments.steps or None,
        epochs=arguments.epochs,
        batch=arguments.batch,
        accumulation=arguments.accumulation,
        top_k=arguments.top_k,
        evaluation_rows=min(16, len(loaded.rows) // 10),
    )
    trainer.train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
