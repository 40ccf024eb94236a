"""The target of each side."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ansor_mlflow.device import resolve_target
from throughput.job import Job

if TYPE_CHECKING:
    from tvm.target import Target


def target_of(job: Job) -> Target:
    """This host's CPU as `resolve_target` describes it; for stock with TVM's own optimisation level."""
    from tvm.target import Target

    target = resolve_target("auto", job.num_threads)
    if job.side == "ours":
        return target
    attributes = json.loads(str(target))
    return Target({name: value for name, value in attributes.items() if name != "opt-level"})
