"""A real Ceph cluster with an S3 gateway: one monitor, one disk in a file, no manager. As root or not."""

from __future__ import annotations

import base64
import secrets
import struct
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from helpers.servers import ACCESS_KEY, SECRET_KEY, S3Service, Server, answers, free_port, program, running

CONFIG = """
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{monitor_port}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind msgr1 = false
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = {directory}/keyring
admin socket = ""
crash dir = {directory}/crash

mon data = {directory}/mon
mon cluster log file = {directory}/cluster.log
mon allow pool size one = true

osd data = {directory}/osd
osd pool default size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd crush initial weight = 1
# A gateway that was killed is forgotten after so many seconds; until then changes of a user wait for its answer.
osd client watch timeout = 10
bluestore block size = {disk_bytes}

rgw data = {directory}/gateway
rgw frontends = beast endpoint=127.0.0.1:{gateway_port}
rgw thread pool size = 64
"""
CAPABILITIES = {
    "mon.": {"mon": "allow *"},
    "client.admin": {"mon": "allow *", "osd": "allow *", "mgr": "allow *"},
    "osd.0": {"mon": "allow profile osd", "osd": "allow *"},
    "client.rgw": {"mon": "allow rw", "osd": "allow rwx"},
}
"""What each part of the cluster may do."""
DISK_BYTES = 3 * 2**30


@dataclass(frozen=True)
class Cluster:
    """A cluster's files, and its programs with their configuration."""

    directory: Path

    def command(self, name: str, *arguments: str) -> list[str]:
        return [program(name), f"--conf={self.directory / 'ceph.conf'}", *arguments]

    def run(self, name: str, *arguments: str) -> None:
        command = self.command(name, *arguments)
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{name} {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")

    def running(self, name: str, *arguments: str, url: str = "") -> AbstractContextManager[subprocess.Popen[bytes]]:
        """Runs a server of the cluster in the foreground; one that has a URL is ready when it answers."""
        log = self.directory / f"{name}.log"
        return running(self.command(name, *arguments, "-d"), log, lambda: not url or answers(url))


class CephS3(S3Service):
    """The gateway of a cluster."""

    def __init__(self, cluster: Cluster, port: int) -> None:
        super().__init__(f"http://127.0.0.1:{port}", self._gateway)
        self._cluster = cluster

    @contextmanager
    def another_secret_key(self) -> Iterator[None]:
        """Has the gateway refuse `SECRET_KEY` for a while."""
        self._set_secret_key("another-secret-key")
        try:
            yield
        finally:
            self._set_secret_key(SECRET_KEY)

    def _set_secret_key(self, secret_key: str) -> None:
        keys = [f"--access-key={ACCESS_KEY}", f"--secret-key={secret_key}"]
        self._cluster.run("radosgw-admin", "key", "create", "--uid=tests", "--key-type=s3", *keys)

    @contextmanager
    def _gateway(self) -> Iterator[Server]:
        with self._cluster.running("radosgw", "--name=client.rgw", url=self.url) as process:
            yield Server(process, self.url)


@contextmanager
def ceph_s3(directory: Path, *buckets: str) -> Iterator[CephS3]:
    """Runs a cluster and its gateway. Direct input and output must work in the directory."""
    cluster, monitor_port, gateway_port = Cluster(directory), free_port(), free_port()
    fsid, disk = str(uuid.uuid4()), str(uuid.uuid4())
    monitors = str(directory / "monmap")
    for name in ("mon", "osd", "gateway", "crash"):
        (directory / name).mkdir(parents=True)
    (directory / "keyring").write_text(keyring())
    (directory / "ceph.conf").write_text(
        CONFIG.format(
            fsid=fsid, directory=directory, monitor_port=monitor_port, gateway_port=gateway_port, disk_bytes=DISK_BYTES
        )
    )
    with ExitStack() as stack:
        cluster.run(
            "monmaptool", "--create", f"--fsid={fsid}", "--addv", "a", f"[v2:127.0.0.1:{monitor_port}]", monitors
        )
        cluster.run("ceph-mon", "--mkfs", "--id=a", f"--monmap={monitors}", f"--keyring={directory / 'keyring'}")
        stack.enter_context(cluster.running("ceph-mon", "--id=a"))
        cluster.run("ceph", "--connect-timeout=60", "osd", "new", disk)
        cluster.run("ceph-osd", "--mkfs", "--id=0", f"--osd-uuid={disk}")
        stack.enter_context(cluster.running("ceph-osd", "--id=0"))
        keys = [f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}"]
        cluster.run("radosgw-admin", "user", "create", "--uid=tests", "--display-name=tests", *keys)
        s3 = CephS3(cluster, gateway_port)
        stack.callback(s3.stop)
        s3.start()
        for bucket in buckets:
            s3.client().create_bucket(Bucket=bucket)
        yield s3


def keyring() -> str:
    """New keys for all parts of a cluster, as `ceph-authtool` makes them: type, time and length before the key."""
    lines = []
    for name, capabilities in CAPABILITIES.items():
        key = struct.pack("<hiih", 1, int(time.time()), 0, 16) + secrets.token_bytes(16)
        lines += [f"[{name}]", f"key = {base64.b64encode(key).decode()}"]
        lines += [f'caps {service} = "{allowed}"' for service, allowed in capabilities.items()]
    return "\n".join([*lines, ""])
