"""The commands `fleet`: trackers and servers, what a tracker knows, and whether its servers are fit to measure."""

from ansor_mlflow.steps.fleet.self_test import FleetTest, TestedServer, self_test
from ansor_mlflow.steps.fleet.serving import serve, track
from ansor_mlflow.steps.fleet.status import FleetStatus, fleet_status
