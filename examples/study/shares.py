"""The sections of ``study.md`` that are of shares: phases, layers, kernels."""

from __future__ import annotations

from collections.abc import Sequence

import svg
from study import paper
from study.layout import compared, figure
from study.measured import Measured

from ft_insight import units


def phases(ready: Sequence[Measured], figures: dict[str, str]) -> str:
    table, bars = compared(
        ready, lambda one: one.phases, paper.phases, ("rest of our step", lambda one: one.rest_of_step)
    )
    claims = paper.PUBLISHED["claims"]
    ours = {one.run.title: one.phases["optimizer"] for one in ready if one.phases and one.run.model == "blackmamba"}
    most = max(ours, key=ours.__getitem__, default=None)
    said = f"The paper: the optimizer takes up to {claims['optimizer_share_most']:.0%} ({claims['optimizer_where']})."
    if most is not None:
        said += f" Here: up to {units.share(ours[most])} of the three phases, {most}."
    words = "Shares of forward, backward (with recomputation) and optimizer. The rest is data, clipping and callbacks."
    picture = figure(figures, "fig04_phases", svg.stacked("Phases of a step (paper: Fig. 4)", bars))
    return "\n\n".join(["## Phases (Fig. 4)", words, table, picture, said])


def layers(ready: Sequence[Measured], figures: dict[str, str]) -> str:
    table, bars = compared(
        ready, lambda one: one.layers, paper.layers, ("rest of our model", lambda one: one.rest_of_model)
    )
    claims = paper.PUBLISHED["claims"]
    shares = [one.layers.get("MoE", 0.0) for one in ready if one.layers]
    said = f"The paper: MoE takes {claims['moe_share_of_layers']:.0%} of the layers' time ({claims['moe_where']})."
    if shares:
        said += f" Here: {units.share(sum(shares) / len(shares))}, the mean of {len(shares)} runs."
    words = "Shares of these layers, forward and backward. The rest of the model is embedding, head and loss, glue."
    picture = figure(figures, "fig05_layers", svg.stacked("Kinds of layers (paper: Fig. 5)", bars))
    return "\n\n".join(["## Layers (Fig. 5)", words, table, picture, said])


def kernels(ready: Sequence[Measured], figures: dict[str, str]) -> str:
    table, bars = compared(ready, lambda one: one.roles, None)
    forward, _ = compared(ready, lambda one: one.expert_forward, paper.expert_forward)
    clocks = {one.view.kernels.clock for one in ready if one.view.kernels}
    host = " Here they are operators on the host: there is no GPU." if clocks == {"host"} else ""
    picture = figure(figures, "fig06_moe_kernels", svg.stacked("Kernels of the MoE layer (paper: Fig. 6)", bars))
    return "\n\n".join(
        [
            "## Kernels of the MoE layer (Fig. 6)",
            f"Shares of all kernels of the MoE layer in one recorded step, all passes.{host}",
            table,
            picture,
            "The experts' matrices and their dequantisation alone, forward, against the paper's microseconds per call "
            "(which tell nothing of LoRA and backward):",
            forward,
        ]
    )
