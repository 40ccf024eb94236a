"""Tunes the networks of a file each night, as an Airflow task on a queue whose workers take one task at a time."""

from __future__ import annotations

from datetime import datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

with DAG("sweep", schedule="@daily", start_date=datetime(2026, 1, 1), catchup=False, max_active_runs=1):
    BashOperator(
        task_id="sweep",
        bash_command="ansor-mlflow sweep /srv/sweep.yaml --max-minutes 240",
        queue="tuning",
        retries=2,  # the same command goes on
        retry_delay=timedelta(minutes=5),
    )
