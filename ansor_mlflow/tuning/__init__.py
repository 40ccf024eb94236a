"""The tuner: our outer loop around MetaSchedule's search. Knows nothing of MLflow; observers listen to it."""

from ansor_mlflow.processes import Outcome, start_fork_server
from ansor_mlflow.tuning.candidates import candidate_of, log_lines
from ansor_mlflow.tuning.job import RunnerTask, TuningJob, directory_lock, runner_name, tune_job
from ansor_mlflow.tuning.ledger import Ledger, RoundLog
from ansor_mlflow.tuning.program_search import TaskSearch, make_cost_model
from ansor_mlflow.tuning.replay import COPIES_OF_ARGUMENTS, Replayer
from ansor_mlflow.tuning.roofline import Bound, Roofline, measure_roofline, quick_roofline
from ansor_mlflow.tuning.sketch_search import sketched_workloads
from ansor_mlflow.tuning.stopping import SECONDS_PER_TRIAL, StoppingRules, require_valid_trials, resolve_num_trials
