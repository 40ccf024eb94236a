"""A Ray cluster on loopback, in a process of its own: a head that builds nothing, and nodes with two CPUs each.

Says on standard output, as JSON, where it is reached, and for each line of standard input the process of a new node.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from ray.cluster_utils import Cluster

STORE_BYTES = 80 * 2**20
SOON = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 2,
    "health_check_timeout_ms": 2000,
}
"""A node that died is noticed in a second or two, and not in the quarter of a minute that Ray takes otherwise."""


def say(what: Any) -> None:
    sys.__stdout__.write(json.dumps(what) + "\n")
    sys.__stdout__.flush()


def main() -> None:
    common = {"object_store_memory": STORE_BYTES, "node_ip_address": "127.0.0.1", "include_dashboard": False}
    head = {**common, "num_cpus": 0, "ray_client_server_port": int(sys.argv[1]), "_system_config": SOON}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    say("ready")
    for _ in sys.stdin:
        node = cluster.add_node(num_cpus=2, **common)
        say(node.all_processes["raylet"][0].process.pid)


if __name__ == "__main__":
    main()
