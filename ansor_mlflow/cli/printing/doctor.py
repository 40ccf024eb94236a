"""What the command `doctor` prints."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.text import Text

from ansor_mlflow.cli.console import console, say
from ansor_mlflow.foreign import printable

if TYPE_CHECKING:
    from ansor_mlflow.steps.doctor import Check, Diagnosis


def print_check(check: Check) -> None:
    """Prints a line: the colour, what was looked at, what was found, and the fix."""
    fix = f"; {check.fix}" if check.fix else ""
    line = Text.assemble((f"{check.status:<8}", check.status), printable(f"{check.name:<17}{check.message}{fix}"))
    console().print(line, soft_wrap=True)


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Prints how many checks there were."""
    counts = Counter(check.status for check in diagnosis.checks)
    listed = ", ".join(f"{counts[status]} {status}" for status in ("green", "yellow", "red") if counts[status])
    say(f"\n{listed}, in {diagnosis.elapsed_s:.0f} s")
