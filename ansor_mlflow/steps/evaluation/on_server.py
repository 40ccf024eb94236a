"""Models that run on a server of a fleet, as `evaluate` checks and times them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ansor_mlflow.measuring import Deviation, Latency, compare_outputs, is_disturbed
from ansor_mlflow.model import LibraryEntry, Manifest
from ansor_mlflow.processes import DISTURBED
from ansor_mlflow.tensors import Arrays
from ansor_mlflow.tuning import NetworkServer, NetworkWork

_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True)
class ModelOnServer:
    """A model, and the server that it runs on."""

    server: NetworkServer
    manifest: Manifest
    entry: LibraryEntry

    @property
    def why_no_rivals(self) -> str:
        """Why runtimes of this host take no part."""
        return f"it runs on this host, the model on server {self.server.address}"

    def compare(self, library: Path, examples: Sequence[Arrays], expected: Sequence[Arrays]) -> Deviation:
        """How far its outputs are from what is expected.

        Args:
            library: The model's.
            examples: Inputs.
            expected: What ONNX Runtime computes of them.

        Raises:
            MachineError: The server is lost.
        """
        pairs = zip(self.outputs(library, examples), expected, strict=True)
        return Deviation.worst([compare_outputs(*pair) for pair in pairs])

    def outputs(self, library: Path, examples: Sequence[Arrays]) -> Sequence[Arrays]:
        """Its outputs for some inputs.

        Raises:
            MachineError: The server is lost.
        """
        return self.server.run(self._work(library, self.entry, examples, None)).outputs

    def measure(
        self,
        libraries: Mapping[str, tuple[Path, LibraryEntry]],
        of_each_size: Sequence[Arrays],
        turns: int,
        measure_s: float,
    ) -> tuple[dict[str, Latency], str]:
        """Times libraries, each with its entry, in turns.

        Returns:
            Their latencies, and why they cannot be trusted; empty where they can.

        Raises:
            MachineError: The server is lost.
        """
        samples_s: dict[str, list[float]] = {name: [] for name in libraries}
        waited = []
        for _ in range(turns):
            for name, (library, entry) in libraries.items():
                reply = self.server.run(self._work(library, entry, of_each_size, measure_s))
                samples_s[name] += reply.samples_s
                waited.append(reply.waited)
        num_disturbed = sum(share > DISTURBED for share in waited)
        distrust = ""
        if is_disturbed(num_disturbed, len(waited)):
            distrust = (
                f"other programs used the CPUs of server {self.server.address} during {num_disturbed} of {len(waited)} "
                "measurements; measure again when it is quiet"
            )
        return {name: Latency(np.array(seconds) * 1e3) for name, seconds in samples_s.items()}, distrust

    def _work(
        self, library: Path, entry: LibraryEntry, examples: Sequence[Arrays], measure_s: float | None
    ) -> NetworkWork:
        return NetworkWork(
            library=library, network=self.manifest, entry=entry, examples=tuple(examples), measure_s=measure_s
        )
