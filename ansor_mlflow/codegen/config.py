"""What every build passes to TVM's passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ansor_mlflow.device import is_cpu

if TYPE_CHECKING:
    from tvm.target import Target


def pass_config(target: Target) -> dict[str, bool]:
    """The `config` of the `PassContext` in which code for `target` is generated.

    For CPUs, functions such as exp become vector arithmetic; see `codegen.functions`. Other devices have instructions
    for them. A candidate has to be measured as it will be compiled, so that both take this.
    """
    if not is_cpu(target):
        return {}
    from ansor_mlflow.codegen.functions import RULES_FOR

    return {RULES_FOR: True}
