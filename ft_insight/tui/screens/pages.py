"""The pages behind the tabs: which drawings stand where. How they are laid out is in ``app.tcss``."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, VerticalScroll

from ft_insight.tui.frame import Frame
from ft_insight.tui.widgets import (
    costs,
    expert_page,
    experts,
    gpu_page,
    gpus,
    kernels,
    layers,
    memory_page,
    notices,
    steps,
    work,
)
from ft_insight.tui.widgets.panel import Panel


class Page(VerticalScroll):
    """A page of panels; only the one that is seen is drawn."""

    def show(self, frame: Frame) -> None:
        """Draw another moment in all panels."""
        for panel in self.query(Panel):
            panel.show(frame)


class Overview(Page):
    """The answer first: the step, the work it does, the machine, the experts, and what to know."""

    def compose(self) -> ComposeResult:
        """Lay out the panels; pairs stand side by side on wide screens."""
        with Container(classes="body"):
            yield from self._panels()

    def show(self, frame: Frame) -> None:
        """Draw another moment; what there is nothing to be drawn of leaves its room to the others."""
        view, body = frame.view, self.query_one(".body")
        body.set_class(not view.gpus and not frame.waiting, "no-gpu")
        body.set_class(not view.experts and not frame.waiting, "no-experts")
        body.set_class(not view.layers, "no-layers")
        super().show(frame)

    def _panels(self) -> ComposeResult:
        yield Panel(steps.step_lines, steps.step_title, tall=True)
        yield Panel(layers.compact_line, "", classes="strip")
        with Container(classes="pair work"):
            yield Panel(work.throughput_lines, "throughput")
            yield Panel(work.loss_lines, "loss")
        with Container(classes="machine"):
            yield Panel(gpus.overview_lines, gpus.gpu_title, classes="gpu")
            yield Panel(experts.overview_lines, experts.expert_title, classes="experts", short=experts.short_title)
            yield Panel(layers.overview_lines, layers.layer_title, classes="layers", short=layers.short_title)
        yield Panel(notices.notice_lines, notices.notice_title, classes="notices", tall=True)


class TimePage(Page):
    """The ledger of time, inside and outside of steps, and by layer."""

    def show(self, frame: Frame) -> None:
        """Draw another moment; before any layer was timed, one line says so."""
        self.query_one(".decoder").display = bool(frame.view.layers)
        super().show(frame)

    def compose(self) -> ComposeResult:
        """Lay out the tables and the curve."""
        with Container(classes="pair tables"):
            yield Panel(steps.phase_table, steps.clock_title, classes="wider", tall=True)
            yield Panel(steps.outside_table, steps.outside_title, tall=True)
        with Container(classes="pair tables"):
            yield Panel(layers.kind_table, layers.layer_title, classes="wider", tall=True, short=layers.short_title)
            yield Panel(layers.decoder_lines, layers.decoder_title, classes="decoder", tall=True)
        yield Panel(steps.step_curve, steps.curve_title, classes="curve")


class KernelsPage(Page):
    """What one recorded step computed, by role."""

    def show(self, frame: Frame) -> None:
        """Draw another moment; without a record, there is only its reason."""
        self.query_one(".roles").display = frame.view.kernels is not None
        super().show(frame)

    def compose(self) -> ComposeResult:
        """Lay out the head, which stays where it is, and the rows, which scroll."""
        yield Panel(kernels.head_lines, kernels.kernel_title, classes="role-head", tall=True, short=kernels.short_title)
        yield Panel(kernels.role_lines, "", classes="roles", tall=True)


class ExpertsPage(Page):
    """Every layer's experts, one of them in detail. Keys move the selection: the heat map shows the rows around it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "app.layer(-1)", "layer before"),
        Binding("down,j", "app.layer(1)", "next layer"),
        Binding("pageup", "app.layer(-10)", "ten layers up"),
        Binding("pagedown", "app.layer(10)", "ten layers down"),
        Binding("home", "app.layer(-9999)", "first layer"),
        Binding("end", "app.layer(9999)", "last layer"),
    ]

    async def on_mouse_scroll_up(self) -> None:
        """Select the layer before."""
        await self.run_action("app.layer(-1)")

    async def on_mouse_scroll_down(self) -> None:
        """Select the next layer."""
        await self.run_action("app.layer(1)")

    def show(self, frame: Frame) -> None:
        """Draw another moment; without counts, there is only their reason."""
        self.query_one(".one-layer").display = bool(frame.view.experts)
        super().show(frame)

    def compose(self) -> ComposeResult:
        """Lay out the heat map above, the selected layer and the variance below."""
        yield Panel(expert_page.heat_lines, expert_page.heat_title, tall=True, short=expert_page.short_heat_title)
        with Container(classes="pair one-layer"):
            yield Panel(expert_page.detail_lines, expert_page.detail_title, classes="detail")
            yield Panel(expert_page.variance_lines, expert_page.variance_title, classes="variance")


class GpuPage(Page):
    """The GPUs over time, by phase, and what held them back."""

    def compose(self) -> ComposeResult:
        """Lay out the one panel that is as high as there are GPUs."""
        yield Panel(gpu_page.gpu_lines, gpu_page.page_title, tall=True)


class MemoryPage(Page):
    """What fills memory, the room that is left, and how the peak goes with the slots."""

    def compose(self) -> ComposeResult:
        """Lay out the stack, the room and the curves."""
        stack, short = memory_page.stack_title, memory_page.short_stack_title
        yield Panel(memory_page.stack_lines, stack, tall=True, short=short)
        yield Panel(memory_page.room_lines, "room", tall=True)
        with Container(classes="pair memory"):
            yield Panel(memory_page.peak_lines, memory_page.peak_title, classes="curve")
            yield Panel(memory_page.timeline_lines, memory_page.timeline_title, classes="curve")


class CostPage(Page):
    """Dollars: of this run, of the whole job, and the model behind them. Keys ask what-ifs."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(letter, f"app.what_if('{name}', {by})", name)
            for key, name in (("g", "gpu"), ("e", "epochs"), ("d", "price"), ("b", "batch"), ("t", "top_k"))
            for letter, by in ((key, 1), (key.upper(), -1))
        ),
        Binding("0", "app.as_it_was", "as it was"),
    ]

    def compose(self) -> ComposeResult:
        """Lay out the three."""
        yield Panel(costs.run_lines, "this run", tall=True)
        yield Panel(costs.projection_lines, costs.projection_title, tall=True)
        yield Panel(costs.fit_lines, costs.fit_title, classes="curve fit")


PAGES: tuple[tuple[str, str, str, type[Page]], ...] = (
    ("overview", "Overview", "Main", Overview),
    ("time", "Time", "Time", TimePage),
    ("kernels", "Kernels", "Kern", KernelsPage),
    ("experts", "Experts", "Experts", ExpertsPage),
    ("gpu", "GPU", "GPU", GpuPage),
    ("memory", "Memory", "Mem", MemoryPage),
    ("cost", "Cost", "Cost", CostPage),
)
"""Name, label, short label and class of every page, in the order of their keys."""
