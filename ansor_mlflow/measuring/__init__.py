"""Measures what is compiled, and checks what it computes: contenders in processes of their own, in turns."""

from ansor_mlflow.measuring.checking import (
    QUANTIZED_TOLERANCE,
    TOLERANCES,
    Deviation,
    compare_outputs,
    compare_tensors,
    compare_with_reference,
    deviation_of,
    expected_of,
    is_finite,
    outputs_of,
    require_broken_stays_broken,
    tolerance_for,
    what_to_do,
)
from ansor_mlflow.measuring.compare import (
    Inference,
    MakeInference,
    Ratio,
    ReferenceSession,
    SequentialTest,
    Verdict,
    is_quantized,
    library_inference,
    random_operators,
    reference_inference,
    timed_call,
    tuned_inference,
)
from ansor_mlflow.measuring.inputs import (
    choose_examples,
    require_examples,
    same_for_all,
    seeded_inputs,
    stack_column,
    typical_inputs,
)
from ansor_mlflow.measuring.kernels import (
    KernelTimes,
    seeded_examples,
    time_kernels,
    time_parts,
    time_parts_in_onnxruntime,
)
from ansor_mlflow.measuring.rivals.table import (
    RIVALS,
    choose_rivals,
    require_rivals,
    rival_inference,
    rival_titles,
    version_of,
)
from ansor_mlflow.measuring.rivals.task import Rival, RivalTask
from ansor_mlflow.measuring.timing import (
    Latency,
    MachineNoise,
    MakeCall,
    ProbeTime,
    Turn,
    call_once,
    is_disturbed,
    lost_share,
    measure_in_turns,
    measure_turn,
    measure_watched,
    probe_noise,
    take_turns,
    time_first_calls,
    time_probe,
    turn_in_process,
    watched,
)
