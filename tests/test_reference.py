"""What is written about parameters is what the code says."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from ansor_mlflow.cli.main import cli

ROOT = Path(__file__).parents[1]


def test_the_reference_of_parameters_is_up_to_date() -> None:
    result = CliRunner().invoke(cli, ["parameters"])
    assert result.output == (ROOT / "docs" / "parameters.md").read_text(), (
        "run: ansor-mlflow parameters > docs/parameters.md"
    )


def test_help_explains_every_parameter() -> None:
    result = CliRunner().invoke(cli, ["tune", "--help"])
    assert result.exit_code == 0
    assert "--num-threads VALUE" in result.output
    assert "[default: resnet-18]" in " ".join(result.output.split())
