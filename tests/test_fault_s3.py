"""What a run knows when the store of its artifacts goes away."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.site import AWAY, Site, assert_told_once, wait_until
from helpers.tuner_process import tuning
from test_faults import assert_exactly

from ansor_mlflow import names

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


def test_an_s3_server_that_is_away_for_a_while_gets_everything(
    small_onnx: Path, site: Site, tmp_path: Path, short_path: Path
) -> None:
    parameters = {"trials": 64, "num_trials_per_round": 8, "min_repeat_ms": 200}  # takes longer than the outage
    env = {**site.environment, names.UPLOADS_VARIABLE: "3"}
    with tuning(small_onnx, short_path / "cwd", env, **parameters) as tuner:
        tuner.wait_for_rounds(1)
        site.s3.stop()
        wait_until(lambda: AWAY in tuner.stderr, tuner)
        tuner.wait_for_rounds(tuner.num_rounds + 2)  # the tuning goes on
        site.s3.start()
        finished = tuner.wait()
    assert finished.exit_code == 0, finished.stderr
    assert_exactly(site.only_run(), site.download(tmp_path / "run"), 64, tmp_path)
    assert_told_once(site, tuner)
    assert site.parts() == []
