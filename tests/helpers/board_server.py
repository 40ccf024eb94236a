"""Program of an emulated board: TVM's own RPC server, with nothing but TVM and NumPy beside it.

Arguments: the port to listen at, host and port of the tracker, and the key. What TVM starts as a process of its own is
a thread here, since an emulator runs the interpreter.
"""

from __future__ import annotations

import sys

from tvm.rpc.server import PopenRPCServerState


def main() -> None:
    own_port, host, port, key = sys.argv[1:]
    state = PopenRPCServerState("127.0.0.1", int(own_port), int(own_port) + 1, tracker_addr=(host, int(port)), key=key)
    state.thread.join()


if __name__ == "__main__":
    main()
