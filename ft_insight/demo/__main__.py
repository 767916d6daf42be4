"""The training process of ``ft-insight demo``; its log goes where ``FT_INSIGHT_LOG`` says."""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

ROWS = 400
EPOCHS = 10.0
EVALUATION_ROWS = 16


def main() -> None:
    """Train the tiny Mixtral on generated rows: a probe of a few steps of a job of ten epochs."""
    parser = argparse.ArgumentParser(prog="python -m ft_insight.demo")
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    # upstream's own deprecations, and hints about a GPU that is not there
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*pin_memory.*")

    from ft_insight import FtInsightCallback
    from ft_insight.demo.rows import generate_rows
    from ft_insight.demo.train import make_trainer

    with tempfile.TemporaryDirectory(prefix="ft-insight-demo-") as folder:
        trainer = make_trainer(
            generate_rows(ROWS),
            Path(folder),
            callbacks=[FtInsightCallback()],
            steps=steps,
            epochs=EPOCHS,
            evaluation_rows=EVALUATION_ROWS,
        )
        trainer.train()


if __name__ == "__main__":
    main()
