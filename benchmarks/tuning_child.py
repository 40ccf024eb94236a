"""One tuning of `tuning_throughput.py`, in a process of its own: `python tuning_child.py DIRECTORY`.

The directory holds the job and gets the outcome. Imports are inside of `main`, because worker processes of the tuner
import this file, too.
"""

import sys


def main() -> None:
    """Does the job in the directory that the command line names."""
    from pathlib import Path

    from throughput.job import JOB_FILE, OUTCOME_FILE, Job

    directory = Path(sys.argv[1])
    job = Job.model_validate_json((directory / JOB_FILE).read_text())
    if job.side == "stock":
        from throughput.stock import tune_stock as tune
    else:
        from throughput.ours import tune_ours as tune
    outcome = tune(job, directory)
    (directory / OUTCOME_FILE).write_text(outcome.model_dump_json())


if __name__ == "__main__":
    main()
