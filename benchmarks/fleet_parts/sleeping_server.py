"""A simulated device: python sleeping_server.py SECONDS --tracker … --key … --port …

A server of programs like any other, but that it sleeps in the place of timing what was uploaded, so that many of them
fit on one machine.
"""

from __future__ import annotations

import json
import random
import sys
import time
from functools import partial

from ansor_mlflow.cli.main import main
from ansor_mlflow.fleet import remote

_CALLS = 50
"""Calls of a program that the time would be the mean of."""


def sleep(seconds: float, _: str) -> str:
    """Takes as long as a measurement, and says that a call took its share, give or take a half."""
    time.sleep(seconds)
    return json.dumps({"run_s": [random.uniform(0.5, 1.5) * seconds / _CALLS], "waited": 0.0})


if __name__ == "__main__":
    given, *arguments = sys.argv[1:]
    remote._measure = partial(sleep, float(given))
    main(["fleet", "server", *arguments])
