"""Progress of long work on stderr: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from typing_extensions import Self

    from lpes_bake.search.study import Trial

# Where stderr is not a terminal, a line at most so often, in seconds.
LINE_EVERY = 10.0


class Shown:
    """What all progress has: a bar, and words beside it. total: pieces of work at most."""

    def __init__(self, console: Console, total: int | None = None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self.console = console
        self._line_due = 0.0
        self._bar = Bar(
            # Names of models and tasks are data: no markup.
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}"),
            console=console,
            disable=not console.is_terminal or console.quiet,
        )
        self._task = self._bar.add_task("starting", total=total, detail="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def status(self, text: str) -> None:
        """Say what is being done."""
        self._bar.update(self._task, description=text, detail="")
        if not self.console.is_terminal:
            self._say(text)

    def warning(self, text: str) -> None:
        """Say what the user should know now."""
        self._say(f"warning: {text}")

    def _line(self, text: str, *, last: bool) -> None:
        """A line where there is no bar, now and then and at the end."""
        now = time.monotonic()
        if not self.console.is_terminal and (now >= self._line_due or last):
            self._line_due = now + LINE_EVERY
            self._say(text)

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True, highlight=False)


class Progress(Shown):
    """Progress of a search. total: trials at most."""

    def __init__(self, console: Console, total: int) -> None:
        super().__init__(console, total)
        self.total = total
        self.done = 0
        self._fresh = 0
        self._seconds = 0.0
        self._identity: float | None = None
        self._best: float | None = None

    def trial(self, trial: Trial) -> None:
        """Count one trial."""
        self.done += 1
        if not trial.replayed:
            self._fresh += 1
            self._seconds += trial.seconds
        if trial.score is not None and trial.complete:
            self._best = trial.score if self._best is None else max(self._best, trial.score)
            if self._identity is None and set(trial.factors) == {1.0}:
                self._identity = trial.score
        if trial.error is not None and not trial.replayed:
            self._say(f"trial {trial.number + 1} failed: {trial.error}")
        step = "gradient" if trial.gradient else "generation"
        self._bar.update(
            self._task, completed=self.done, description=f"{step} {trial.generation}", detail=self._detail()
        )
        if not trial.replayed:
            text = f"{step} {trial.generation}, trial {self.done} of {self.total} at most, {self._detail()}"
            self._line(text, last=self.done == self.total)

    def _detail(self) -> str:
        scores = [
            f"{name} {score:.4f}"
            for name, score in (("best", self._best), ("identity", self._identity))
            if score is not None
        ]
        if self._fresh:
            scores.append(f"{clock(self._seconds / self._fresh * max(0, self.total - self.done))} left")
        return ", ".join(scores)


class Counted(Shown):
    """Progress of work whose pieces are alike."""

    _began: tuple[float, int] | None = None

    def progress(self, done: int, total: int) -> None:
        """So many pieces are done. What is done when it is called first was done by an earlier run."""
        if self._began is None:
            self._began = time.monotonic(), done
        since, known = self._began
        left = ""
        if done > known:
            left = f"{clock((time.monotonic() - since) / (done - known) * (total - done))} left"
            self._line(f"{done} of {total}, {left}", last=done == total)
        self._bar.update(self._task, completed=done, total=total, detail=left)


def clock(seconds: float) -> str:
    """Seconds as 1:02:03."""
    left = round(seconds)
    return f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
