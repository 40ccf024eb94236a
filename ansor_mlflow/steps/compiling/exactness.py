"""Whether a network may have layers in other ways than the direct one: it must stay within the tolerance."""

from __future__ import annotations

import logging
from functools import partial

from ansor_mlflow.device import why_not_runnable
from ansor_mlflow.errors import AnsorMlflowError, CorrectnessError
from ansor_mlflow.measuring import (
    compare_with_reference,
    library_inference,
    outputs_of,
    require_broken_stays_broken,
    seeded_inputs,
    tolerance_for,
)
from ansor_mlflow.model import CompiledNetwork, Coverage, threads_here
from ansor_mlflow.tensors import all_sizes

_SEEDS = range(4)
_MARGIN = 0.75
"""Share of the tolerance that these inputs may take. The largest error differs between inputs: of eight random ones it
was up to 1.6 times as large for one as for another, and a fifth more than the largest of the first four."""
_log = logging.getLogger("ansor_mlflow")


def loses_digits(compiled: CompiledNetwork, coverage: Coverage) -> bool:
    """Whether a network with layers in other ways is off by more than `evaluate` lets pass, or nearly.

    A library that does not run here, or a network that ONNX Runtime cannot compute from random inputs, is not checked:
    `evaluate` does it where the model runs.
    """
    if not coverage.has_other_ways or why_not_runnable(compiled.fingerprint):
        return False
    runs = {"ways": partial(library_inference, compiled.library, compiled, compiled.entry)}
    threads = threads_here(compiled.entry)
    examples = seeded_inputs(compiled.network, all_sizes(compiled), _SEEDS)
    try:
        found = compare_with_reference(runs, compiled.network, threads, examples)["ways"]
        require_broken_stays_broken(partial(outputs_of, runs["ways"]), compiled.network, threads, examples[0])
    except CorrectnessError as err:
        _log.warning("with Winograd's convolutions, %s: all layers are direct", err)
        return True
    except AnsorMlflowError as err:
        _log.warning("the outputs of %s are not checked: %s", compiled.name, err)
        return False
    tolerance = tolerance_for("auto", compiled.network, str(compiled.provenance.get("dtype", "float32")))
    if found.max_rel_error <= _MARGIN * tolerance:
        return False
    _log.warning(
        "max_rel_error %.2g with Winograd's convolutions, near or above the %.2g allowed: all layers are direct",
        found.max_rel_error,
        tolerance,
    )
    return True
