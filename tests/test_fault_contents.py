"""What a run knows when a store refuses, damages what it holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.servers import SECRET_KEY
from helpers.site import BUCKET, Site, assert_machine_error, sync, wait_until
from helpers.tuner_process import tuning
from test_faults import assert_complete, assert_exactly

from ansor_mlflow import names

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


@pytest.mark.nightly
def test_a_secret_key_that_is_replaced_in_the_middle(
    small_onnx: Path, site: Site, tmp_path: Path, short_path: Path
) -> None:
    """Nothing is lost, and no secret is told."""
    cwd = short_path / "cwd"
    with tuning(small_onnx, cwd, site.environment, trials=48, min_repeat_ms=200) as tuner:
        tuner.wait_for_rounds(1)
        with site.s3.another_secret_key():
            assert tuner.process.poll() is None, tuner.stderr
            finished = tuner.wait()
            assert_machine_error(finished, r"are undelivered \(.*(SignatureDoesNotMatch|403|Forbidden)")
            assert_machine_error(sync(cwd, site.environment), "AWS_SECRET_ACCESS_KEY")
    assert SECRET_KEY not in finished.stderr
    assert sync(cwd, site.environment).exit_code == 0
    assert_complete(site.only_run(), site.download(tmp_path / "run"), 48, tmp_path)


@pytest.mark.parametrize("which", [0, pytest.param(-1, marks=pytest.mark.nightly)], ids=["first", "last"])
def test_a_flipped_bit_in_a_part_costs_the_trials_behind_it(
    small_onnx: Path, site: Site, tmp_path: Path, short_path: Path, which: int
) -> None:
    """The tuner is killed, and goes on on another machine, as it were."""
    trials = 96  # more than a part holds
    parameters, env = {"trials": 5000, "num_trials_per_round": 16}, {**site.environment, names.UPLOADS_VARIABLE: "3"}
    with tuning(small_onnx, short_path / "killed", env, **parameters) as tuner:
        tuner.wait_for_rounds(1)
        wait_until(lambda: len(site.parts()) >= 2, tuner)
        tuner.process.kill()
        tuner.process.wait()
    client, key = site.s3.client(), site.parts()[which]
    content = bytearray(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    content[len(content) // 2] ^= 1
    client.put_object(Bucket=BUCKET, Key=key, Body=bytes(content))
    parameters = {"trials": trials, "num_trials_per_round": 16, "resume_run": site.only_run().info.run_id}
    with tuning(small_onnx, short_path / "resumed", site.environment, **parameters) as tuner:
        finished = tuner.wait()
    assert finished.exit_code == 0, finished.stderr
    assert f"{Path(key).name} is damaged; what it and later parts hold is measured again" in finished.stderr
    assert_exactly(site.only_run(), site.download(tmp_path / "run"), trials, tmp_path)
    assert site.parts() == []
