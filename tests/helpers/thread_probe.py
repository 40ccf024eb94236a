"""Prints, as JSON, on how many threads a parallel kernel really ran; run by `test_threads.py` in a fresh process.

Usage: python thread_probe.py NUM_THREADS...

For each number in turn: set it, run the kernel in this thread, then in a thread started afterwards.
"""

import json
import sys
import threading

import numpy as np
import tvm
from tvm.script import tirx as T  # noqa: N812 - TVMScript's own name

from ansor_mlflow.device import set_num_threads

NUM_ITERATIONS = 64


@T.prim_func
def record_threads(ids: T.Buffer((64,), "uint64"), work: T.Buffer((64,), "float32")):
    for i in T.parallel(64):
        for _ in range(100000):
            work[i] = work[i] * T.float32(0.999) + T.float32(1)
        ids[i] = T.call_extern("uint64", "pthread_self")


def count_threads(kernel) -> int:
    ids = tvm.runtime.tensor(np.zeros(NUM_ITERATIONS, "uint64"))
    kernel(ids, tvm.runtime.tensor(np.zeros(NUM_ITERATIONS, "float32")))
    return len(set(ids.numpy()))


def probe(kernel, num_threads: int) -> dict[str, int]:
    returned = set_num_threads(num_threads)
    here, later = count_threads(kernel), []
    thread = threading.Thread(target=lambda: later.append(count_threads(kernel)))
    thread.start()
    thread.join()
    return {"returned": returned, "here": here, "later": later[0]}


if __name__ == "__main__":
    kernel = tvm.compile(tvm.IRModule({"main": record_threads}), target="llvm")["main"]
    print(json.dumps([probe(kernel, int(number)) for number in sys.argv[1:]]))
