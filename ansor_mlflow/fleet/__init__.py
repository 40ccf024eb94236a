"""Devices behind TVM's RPC tracker: leases of servers, measurements on them, and servers of our own."""

from ansor_mlflow.fleet.programs import (
    NetworkReply,
    NetworkWork,
    ReferenceKernel,
    build_reference_kernel,
    run_network,
    run_reference_kernel,
)
from ansor_mlflow.fleet.runner import RpcRunner
from ansor_mlflow.fleet.server import run_server, run_tracker
from ansor_mlflow.fleet.session import FleetSettings, ServerSession, device_of_fleet, fleet_settings, open_session
from ansor_mlflow.fleet.tracker import HostPort, KeyState, ServerLease, servers_by_key
