"""Names of metrics, params, tags and artifacts. Dashboards and queries of users depend on them."""

from __future__ import annotations

from collections.abc import Collection

from ansor_mlflow.trials import TrialStatus

# -- metrics of a tuning run; the step is the number of trials measured so far
BEST_LATENCY_MS = "best_latency_ms"  # estimated latency end to end: Σ weight × best task latency. Never rises
CONFIRMED_LATENCY_MS = "confirmed_latency_ms"
"""The estimate with the winners' second measurements; at the end of the tuning."""
OPTIMISM = "optimism"
"""`confirmed_latency_ms` over `best_latency_ms`: by how much the first measurements promised too much."""
TRIALS_MEASURED = "trials/measured"
TRIALS_PER_MINUTE = "speed/trials_per_minute"
TIME_SEARCH_S = "time/search_s"
TIME_BUILD_S = "time/build_s"
TIME_RUN_S = "time/run_s"
TIME_CONFIRM_S = "time/confirm_s"
TIME_LOG_S = "time/log_s"
PROBE_SPREAD = "machine/probe_spread"
"""The ninth decile of a fixed computation's times over its undisturbed time, less 1; of evaluations, too."""

FLEET_UTILISATION = "fleet/utilisation"  # share of their time in which the servers of a fleet measured


def server_metric(server: str, figure: str) -> str:
    """A figure of one server of a fleet: trials, failures, set_aside, utilisation or calibration_ms."""
    return f"fleet/{server}/{figure}"


def task_latency_us(task: str) -> str:
    """Best latency of one task in microseconds."""
    return f"task_latency_us/{task}"


def task_gflops(task: str) -> str:
    """GFLOP/s that the best schedule of a task reaches."""
    return f"task_gflops/{task}"


def trials_with(status: TrialStatus) -> str:
    """Number of trials that ended with a status."""
    return f"trials/{status.value}"


TUNING_METRICS = (BEST_LATENCY_MS, CONFIRMED_LATENCY_MS, OPTIMISM, TRIALS_MEASURED, TRIALS_PER_MINUTE)
"""What the run that evaluates a tuned model, and the pipeline's parent, repeat of the tuning run."""
SEARCH_PARAMS = ("space", "strategy", "cost_model", "algorithm", "dtype", "seed")
"""Params that are repeated, too, and logged in any case, so that runs are compared by them; the tuning run's name says
those that differ from the default."""

WARM_START_APPLIED = "warm_start/applied"  # records of this device that a tuning began with
WARM_START_TASKS = "warm_start/tasks"  # tasks that had such a record to begin with
WARM_START_TRANSFERRED = "warm_start/transferred"  # records of similar devices that taught the cost model

# -- metrics of a compile run and of the pipeline's parent
COVERAGE_TASKS = "coverage_tasks"  # tasks with a record over all tasks, 0 to 1
COVERAGE_FLOPS = "coverage_flops"  # the covered tasks' share of the floating point operations, 0 to 1
LIBRARY_GROWTH_MIB = "library_growth_mib"
"""By how much the weights are larger than they would be with all layers computed directly."""

QUANTIZATION_LOSS = "quantization_loss"  # of a tuning run with quantize=int8, on inputs that it was not quantised with
QUANTIZED_SHARE = "quantized_share"  # operations in 8 bits over those of all layers that may be, 0 to 1
QUANTIZATION_METRICS = (QUANTIZATION_LOSS, QUANTIZED_SHARE)

RECORDS_LOST = "records_lost"
"""Number of workloads that `allow_missing` left out: their records do not apply, or the network has them no more."""

# -- metrics of an evaluate run and of the pipeline's parent
LATENCY_MS = "latency_ms"
LATENCY_P90_MS = "latency_p90_ms"
LATENCY_P99_MS = "latency_p99_ms"
LATENCY_STD_MS = "latency_std_ms"
THROUGHPUT_PER_S = "throughput_per_s"
UNTUNED_LATENCY_MS = "untuned_latency_ms"  # of what TVM builds by itself
INSTANT_LATENCY_MS = "instant_latency_ms"  # of what our sketches choose without any trial; only where it was asked for
SPEEDUP_VS_UNTUNED = "speedup_vs_untuned"
SPEEDUP_VS_BEST = "speedup_vs_best"  # over the fastest rival whose outputs are right
MAX_ABS_ERROR = "max_abs_error"
MAX_REL_ERROR = "max_rel_error"
ESTIMATE_RATIO = "estimate_ratio"  # measured over estimated latency
ONNXRUNTIME_SHARE = "onnxruntime_share"
"""Share of the latency in parts that stay with ONNX Runtime, 0 to 1; only where there are some."""


def rival_latency_ms(rival: str) -> str:
    """Median latency of a rival."""
    return f"{rival}_latency_ms"


def speedup_vs(rival: str) -> str:
    """Latency of a rival over that of the model."""
    return f"speedup_vs_{rival}"


# -- metrics of a promote run, beside those above for the candidate
CHAMPION_LATENCY_MS = "champion_latency_ms"
CHAMPION_MAX_REL_ERROR = "champion_max_rel_error"
LATENCY_RATIO = "latency_ratio"  # the candidate's latency over the champion's, with the interval that it lies in
LATENCY_RATIO_LOWER = "latency_ratio_lower"
LATENCY_RATIO_UPPER = "latency_ratio_upper"
NUM_TURNS = "num_turns"


# -- metrics of a sweep
SWEEP_DONE = "sweep/done"  # entries that have a model
SWEEP_FAILED = "sweep/failed"  # entries that have none yet
SWEEP_SPEEDUP_MEDIAN = "sweep/speedup_median"  # median of the entries' `speedup_vs_best`


def summary_metrics(rivals: Collection[str]) -> tuple[str, ...]:
    """What a model is judged by; those of a rival are there only where it was timed."""
    return (
        LATENCY_MS,
        SPEEDUP_VS_BEST,
        SPEEDUP_VS_UNTUNED,
        *map(speedup_vs, rivals),
        *map(rival_latency_ms, rivals),
        UNTUNED_LATENCY_MS,
        INSTANT_LATENCY_MS,
        LATENCY_P90_MS,
        LATENCY_P99_MS,
        LATENCY_STD_MS,
        THROUGHPUT_PER_S,
        MAX_ABS_ERROR,
        MAX_REL_ERROR,
        ESTIMATE_RATIO,
    )


FIRST_METRICS = (LATENCY_MS, SPEEDUP_VS_BEST, SPEEDUP_VS_UNTUNED, BEST_LATENCY_MS)
"""Metrics that are logged before others: MLflow's page of a run shows them in the order in which they came. Names with
a slash, those of counters, of tasks and of the machine, come last."""

# -- tags
TAG_STEP = "ansor.step"
TAG_NETWORK = "ansor.network"
TAG_NETWORK_SOURCE = "ansor.network_source"
"""The URI that the network was downloaded from; with a version, where the user gave an alias."""
TAG_TARGET = "ansor.target"
TAG_NUM_THREADS = "ansor.num_threads"
TAG_DTYPE = "ansor.dtype"  # of a model
TAG_COMPUTED_BY = "ansor.computed_by"  # the runtimes that compute a model: tvm, onnxruntime, openvino
TAG_SIZES = "ansor.sizes"  # the sizes of a model that has several, and whether what is between them is padded
TAG_NUM_TRIALS = "ansor.num_trials"
TAG_STOP_REASON = "ansor.stop_reason"
TAG_ERROR = "ansor.error"
TAG_EXIT_CODE = "ansor.exit_code"
END_TAGS = {TAG_ERROR, TAG_EXIT_CODE}  # tags of a run that did not succeed
TAG_UNRELIABLE = "ansor.unreliable"  # why the measurements of a run cannot be trusted; absent where they can
TAG_UNCHECKED = "ansor.unchecked"
"""Outputs that were the same for all inputs that a model was compared on, which says little of them; absent where there
are none."""
NOTE_SHA256 = "mlflow.ansor.note_sha256"
"""Digest of the description that we wrote: a description that a user has edited is left alone. MLflow's pages hide tags
that begin with "mlflow."."""
OLD_NOTE_SHA256 = "ansor.note_sha256"  # what it was called once; read
TAG_BEST_RIVAL = "ansor.best_rival"  # the fastest rival whose outputs are right
TAG_MODEL_URI = "ansor.model_uri"
TAG_TUNE_RUN = "ansor.tune_run"
TAG_DEVICE = "ansor.device"
"""Digest of the device that a tuning's records are for: with the next four, `warm_start=auto` finds the run."""
TAG_WORKLOADS = "ansor.workloads"
"""First digits of the hashes of its tasks' workloads; what one tag has no room for is in `ansor.workloads.2`, ...."""
TAG_TVM_VERSION = "ansor.tvm_version"
TAG_LOWERING_VERSION = "ansor.lowering_version"
TAG_TRIALS_PER_TASK = "ansor.trials_per_task"
"""Trials that a tuning was ready to give a task, on average; absent before its end."""
TAG_WARM_START = "ansor.warm_start"  # how many tasks began with records of which earlier tunings
TAG_EXTENDED_FROM = "ansor.extended_from"  # the model that this model, with more libraries, was made from
TAG_TARGET_MISMATCH = "ansor.target_mismatch"  # device that the applied records are for, where it is another

TAG_PROMOTION = "ansor.promotion"
"""How a promotion ended, in one word; on its run, and on the version that was the candidate."""
TAG_PROMOTION_RUN = "ansor.promotion_run"
TAG_PROMOTION_RATIO = "ansor.promotion_ratio"
TAG_PROMOTION_CHAMPION = "ansor.promotion_champion"  # version, or rival, that the candidate was compared with
TAG_PROMOTION_UNRELIABLE = "ansor.promotion_unreliable"
"""Why the times of a promotion cannot be trusted; absent where they can."""
TAG_PROMOTION_ALIASES = "ansor.promotion_aliases"
TAG_DRY_RUN = "ansor.dry_run"
TAG_SWEEP = "ansor.sweep"  # name of a sweep
TAG_SWEEP_DRIVER = "ansor.sweep_driver"  # host and process that ran a sweep last
TAG_SWEEP_SEEN = "ansor.sweep_seen"  # when that process was last there, in seconds since 1970
TAG_SWEEP_AGAINST = "ansor.sweep_against"  # run of the sweep that one is compared with
TAG_SWEEP_ENTRY = "ansor.sweep_entry"
"""Digest of the network, parameters, device and lowering of a sweep's entry, on the runs that were made of it."""
MOVES_PREFIX = "mlflow.ansor.moves."
"""Tag of a registered model, before an alias: the promotions that moved it. MLflow's pages hide tags that begin with
"mlflow."."""
OLD_MOVES_PREFIX = "ansor.moves."  # what it was called once; read, and replaced when the alias moves
TAG_MOVING = "ansor.moving"
"""Tag of a registered model: what a promotion or a rollback is about to do to aliases, until it has done it."""

# -- saved views of an experiment, which are tags of it
VIEW_PREFIX = "mlflow.sharedViewState."  # MLflow's name for a saved view, before the view's key
LEADERBOARD_VIEW = "ansor-leaderboard"
TUNING_CHARTS_VIEW = "ansor-tuning-charts"

# -- artifacts
RECORDS_DIR = "records"
BEST_DIR = "best"
SIMILAR_DIR = "similar"  # records of similar devices, which taught the cost model
FINGERPRINT_FILE = "fingerprint.json"
PROVENANCE_FILE = "provenance.json"
MANIFEST_FILE = "manifest.json"  # digests of the files of a tuning's records
SOURCES_FILE = "sources.json"  # what a merged or distilled database was made from
NETWORK_FILE = "network.onnx"
QUANTIZATION_FILE = "quantization.json"  # what each layer, and each candidate, loses by being quantised
QUANTIZATION_CHART = "quantization.png"
PARTS_FILE = "parts.json"  # the parts of a network that ONNX Runtime computes some of, with the time that each takes
CRASHES_DIR = "crashes"  # the smallest graphs that end TVM's compiler, as ONNX files
RIVALS_FILE = "rivals.json"  # the rivals of a model: versions, latencies and errors, or why one could not be timed
TURNS_FILE = "turns.json"  # the model's and its rivals' median in each turn, in milliseconds: what was paired
KERNELS_FILE = "kernels.json"
"""Each kernel's time within the network beside the one that its record promises, and the time between kernels."""
KERNELS_REPORT_FILE = "kernels.html"
SIZES_FILE = "sizes.json"  # the sizes of a network that has several, with the latency of each


def part_file(number: int) -> str:
    """A part of a network that stays with ONNX Runtime, beside the library."""
    return f"part{number}.onnx"


LOST_RECORDS_FILE = "lost_records.json"  # file with the workloads that `allow_missing` left out
WARM_START_FILE = "warm_start.json"  # what was taken of which source
PARAMETERS_FILE = "parameters.yaml"  # all parameters of a step, those with their default included
PARAMS_FILE = "params.json"  # what older runs have with a parameter that MLflow cuts short; read
TRIALS_TABLE = "trials.json"
TASKS_FILE = "tasks.json"
CONVERGENCE_FIGURE = "convergence.png"
TASK_SHARE_FIGURE = "task_share.png"
GAIN_FIGURE = "gain.png"
FAILURES_FIGURE = "failures.png"
ROOFLINE_FIGURE = "roofline.png"
LATENCY_FIGURE = "latency.png"
LATENCY_SAMPLES_FILE = "latency_samples.csv"  # every timed call of a model
REPORT_FILE = "report.html"
SWEEP_REPORT_FILE = "sweep.html"
SWEEP_FILE = "sweep.json"  # IDs of the pipelines by the names of the entries
SWEEP_CHART = "sweep.png"
PROMOTION_REPORT_FILE = "promotion.html"
PROMOTION_FILE = "promotion.json"
ENVIRONMENT_FILE = "environment.json"
COVERAGE_FILE = "coverage.json"
LOG_FILE = "tuning.log"
MODEL_NAME = "model"

# -- functions of a library
PART_WRITER = "_into"
"""Follows the name of a function that writes a part of a whole, before a number."""

# -- environment variables with seconds, which tests of lost servers shorten; promised to nobody
GRACE_VARIABLE = "ANSOR_MLFLOW_GRACE_S"
UPLOADS_VARIABLE = "ANSOR_MLFLOW_UPLOADS_S"

# -- the model flavor
FLAVOR_NAME = "tvm"
MODEL_FILE = "MLmodel"  # MLflow's description of a model, in the model's directory
