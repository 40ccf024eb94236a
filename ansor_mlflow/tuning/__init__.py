"""The tuner: our outer loop around MetaSchedule's search. Knows nothing of MLflow; observers listen to it."""

from ansor_mlflow.processes import Outcome, WorkerPool, start_fork_server
from ansor_mlflow.tuning.fleet.programs import NetworkReply, NetworkWork, run_network
from ansor_mlflow.tuning.fleet.reference_kernel import ReferenceKernel, build_reference_kernel, run_reference_kernel
from ansor_mlflow.tuning.fleet.server import run_server, run_tracker
from ansor_mlflow.tuning.fleet.session import (
    FleetSettings,
    LeaseExpiredError,
    ServerSession,
    device_of_fleet,
    fleet_settings,
    open_session,
)
from ansor_mlflow.tuning.fleet.tracker import HostPort, KeyState, ServerLease, servers_by_key
from ansor_mlflow.tuning.job import TuningJob, directory_lock, tune_job
from ansor_mlflow.tuning.ledger import Ledger
from ansor_mlflow.tuning.replay import COPIES_OF_ARGUMENTS, Replayer
from ansor_mlflow.tuning.roofline import Bound, Roofline, measure_roofline, quick_roofline
from ansor_mlflow.tuning.round_log import RoundLog
from ansor_mlflow.tuning.search.candidates import log_lines
from ansor_mlflow.tuning.search.choice import sketched_workloads
from ansor_mlflow.tuning.search.program_search import make_cost_model
from ansor_mlflow.tuning.search.space import applies
from ansor_mlflow.tuning.search.task_search import TaskSearch
from ansor_mlflow.tuning.stopping import (
    SECONDS_PER_TRIAL,
    StoppingRules,
    require_valid_trials,
    resolve_num_trials,
)
from ansor_mlflow.tuning.workers.arguments import argument_bytes
from ansor_mlflow.tuning.workers.builder import Builder, LocalBuilder, as_metaschedule_builder
from ansor_mlflow.tuning.workers.runner import Runner
from ansor_mlflow.tuning.workers.timing import RunJob
