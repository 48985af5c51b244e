"""Screens of a terminal: a live bar for what is being done, and the checklist of ``eyas run``."""

from contextlib import AbstractContextManager
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Task, TaskID, TextColumn
from rich.progress import Progress as Rows

from eyas.progress import Progress, Screen
from eyas.progress_displays import duration, memory_text

_MARKS = {"waiting": "·", "running": "▸", "done": "✓", "kept": "✓", "failed": "✗"}
_STYLES = {"running": "bold", "waiting": "dim", "failed": "bold red"}
_BAR_WIDTH = 16


class Terminal(Screen):
    """A live row for the work in progress, with what is said above it; its last line stays."""

    every_s = 0.2

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._rows: Rows | None = None

    def say(self, text: str) -> None:
        console = self._rows.console if self._rows else self._console
        if console is None:
            super().say(text)
        else:
            _print(console, text)

    def begin(self, progress: Progress) -> None:
        self.show(progress, final=False)

    def show(self, progress: Progress, final: bool) -> None:
        if final:
            if self._rows:
                self._rows.stop()  # which takes the row away
            self._rows = None
            self.say(progress.text(final))
            return
        if self._rows is None:
            self._rows = _rows(self._console, transient=True)
            self._rows.add_task("", text="")
            self._rows.start()
        row = self._rows.task_ids[0]
        _update(self._rows, row, progress)
        self._rows.update(row, description=progress.counts_text(), refresh=True)


class Checklist(Screen, AbstractContextManager["Checklist"]):
    """The stages on a terminal: done with their time, running with bar, rate, time left and memory."""

    every_s = 0.2

    def __init__(self, stages: list[str], console: Console | None = None) -> None:
        self._rows = _rows(console, transient=False)
        self._ids = {stage: self._rows.add_task("", total=None, text="") for stage in stages}
        self._running: str | None = None
        for stage in stages:
            self.stage(stage, "waiting")

    def __enter__(self) -> "Checklist":
        self._rows.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._rows.refresh()
        self._rows.stop()

    def say(self, text: str) -> None:
        _print(self._rows.console, text)

    def begin(self, progress: Progress) -> None:
        self.show(progress, final=False)

    def show(self, progress: Progress, final: bool) -> None:
        if final:
            self.say(progress.text(final))
        if self._running is not None:
            _update(self._rows, self._ids[self._running], progress)
        self._rows.refresh()

    def stage(self, name: str, state: str, seconds: float = 0.0) -> None:
        self._running = name if state == "running" else None
        text = {"done": duration(seconds), "kept": "was done"}.get(state, "")
        style = _STYLES.get(state, "none")
        row = f"[{style}]{_MARKS[state]} {name:<11}[/]"
        self._rows.reset(self._ids[name], description=row, text=text, bar=False)
        self._rows.refresh()


class _Bar(BarColumn):
    """A bar for rows whose work is known in advance."""

    def render(self, task: Task) -> RenderableType:  # type: ignore[override]
        return super().render(task) if task.fields.get("bar") else ""


def _rows(console: Console | None, transient: bool) -> Rows:
    return Rows(
        TextColumn("{task.description}"),
        _Bar(bar_width=_BAR_WIDTH),
        TextColumn("{task.fields[text]}", markup=False),
        console=console or Console(stderr=True, highlight=False, emoji=False),
        auto_refresh=False,
        transient=transient,
        redirect_stdout=False,
    )


def _update(rows: Rows, row: TaskID, progress: Progress) -> None:
    left = progress.left_s
    parts = (
        progress.rate_text(),
        "" if left is None else f"{duration(left)} left",
        memory_text(),
        progress.note,
    )
    rows.update(
        row,
        total=progress.total,
        completed=progress.done,
        bar=progress.total is not None,
        text=", ".join(filter(None, parts)),
    )


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
