"""A version of a registered model against another one, or against a rival, on this host: which one is faster."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import mlflow
import numpy as np

from ansor_mlflow import names
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.measuring import (
    RIVALS,
    MachineNoise,
    MakeInference,
    Ratio,
    RivalTask,
    SequentialTest,
    Verdict,
    choose_examples,
    library_inference,
    rival_inference,
    timed_call,
    turn_in_process,
)
from ansor_mlflow.model import LibraryEntry, Manifest, choose_library, verified_manifest
from ansor_mlflow.parameters import PromoteOptions
from ansor_mlflow.steps.evaluation import rival_task
from ansor_mlflow.tensors import Arrays, NetworkShapes, TensorSpec, all_sizes
from ansor_mlflow.tracking import translated_errors

_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A version that was downloaded, with the library that is loaded here as it is; or a rival on its network."""

    version: str
    """Its number, or the name of the rival."""
    directory: Path
    manifest: Manifest
    entry: LibraryEntry
    rival_task: RivalTask | None = None
    """What a rival computes."""

    @staticmethod
    def of_version(name: str, version: str, scratch: Path) -> Contender:
        """Downloads a version into a directory and checks it."""
        scratch = scratch / version
        scratch.mkdir(parents=True)
        with translated_errors(f"read version {version} of {name}"):
            uri = f"models:/{name}/{version}"
            directory = Path(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=str(scratch)))
        manifest = verified_manifest(directory)
        entry = choose_library(directory, manifest)
        return Contender(version=version, directory=directory, manifest=manifest, entry=entry)

    def as_rival(self, rival: str, scratch: Path, *, trust: bool) -> Contender:
        """A rival in the place of the library, with as many threads."""
        task = rival_task((rival,), self.directory, self.manifest, self.entry, scratch, trust=trust)
        return replace(self, version=rival, rival_task=task)

    @property
    def network(self) -> Path:
        """The ONNX file that was compiled."""
        return self.directory / names.NETWORK_FILE

    @property
    def make_inference(self) -> MakeInference:
        """What is run in a child process."""
        if self.rival_task:
            return partial(rival_inference, self.version, self.rival_task)
        return partial(library_inference, self.directory / self.entry.path, self.manifest, self.entry)

    def has_network_of(self, other: Contender) -> bool:
        """Whether both were compiled from the same file, and from the same ones with its weights."""
        return self._network_files == other._network_files

    @property
    def _network_files(self) -> dict[str, str]:
        own = ("libraries/", "records/")
        return {name: digest for name, digest in self.manifest.files.items() if not name.startswith(own)}

    def require_interface_of(self, champion: Contender) -> None:
        """Checks that this version could take another one's place: only then can their times be compared."""
        for kind in ("inputs", "outputs"):
            given, wanted = _described(getattr(self.manifest, kind)), _described(getattr(champion.manifest, kind))
            if given != wanted:
                raise UserInputError(
                    f"candidate={self.version}: its {kind} are {given}, those of the champion, version "
                    f"{champion.version}, are {wanted}; register it as another model"
                )
        if not common_sizes(self, champion):
            raise UserInputError(
                f"candidate={self.version}: it has none of the sizes of the champion, version {champion.version}; "
                "compile it for one of them, too, or register it as another model"
            )


def _described(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(f"{spec.name}: {spec.dtype} {spec.shape}" for spec in specs)


def _called(version: str) -> str:
    """A version, or a rival, as a part of a sentence."""
    return f"version {version}" if version.isdigit() else RIVALS[version].title


@dataclass(frozen=True, kw_only=True)
class Contest:
    """A candidate against a champion."""

    champion: str
    """The champion's version, or the name of the rival."""
    verdict: Verdict
    ratio: Ratio
    """The candidate's latency over the champion's."""
    limit: float
    """What the ratio must be below for a promotion."""
    candidate_ms: tuple[float, ...]
    """The candidate's median latency in each turn."""
    champion_ms: tuple[float, ...]
    same_network: bool
    """Whether both were compiled from the same ONNX file; if not, this compares nothing but their speed."""
    probe_spread: float
    """How quiet the machine was: `MachineNoise.spread`."""
    unreliable: str
    """Why the times cannot be trusted; empty where they can."""

    @property
    def opponent(self) -> str:
        """The champion as a part of a sentence."""
        return _called(self.champion)

    @property
    def medians_ms(self) -> tuple[float, float]:
        """Latency of the candidate and of the champion."""
        return float(np.median(self.candidate_ms)), float(np.median(self.champion_ms))

    @property
    def text(self) -> str:
        """The ratio as a part of a sentence."""
        low, high = f"{self.ratio.lower:.3f}", f"{self.ratio.upper:.3f}"
        return f"{self.ratio.estimate:.3f} ({low} to {high}) of the time of {self.opponent}"


def compete(candidate: Contender, champion: Contender, options: PromoteOptions) -> Contest:
    """Times both in turns until it is clear which one is faster, or the turns are used up.

    Every turn starts both once, in processes of their own, one after the other; who is first alternates.
    """
    noise = MachineNoise()
    test = SequentialTest(confidence=options.confidence, margin=options.min_improvement, max_turns=options.max_turns)
    times: dict[str, list[float]] = {candidate.version: [], champion.version: []}
    examples = {}
    for contender, other in ((candidate, champion), (champion, candidate)):
        sizes = common_sizes(contender, other)
        chosen = choose_examples(options.data, sizes, options.seed, candidate.network)
        examples[contender.version] = chosen[: len(sizes)]
    _log.info("measuring version %s against %s", candidate.version, _called(champion.version))
    for look in test.looks:
        for turn in range(len(times[candidate.version]), look):
            pair = (champion, candidate) if turn % 2 == 0 else (candidate, champion)
            for contender in pair:
                times[contender.version].append(_median_ms(contender, examples[contender.version], noise, options))
        ratio = test.ratio(times[candidate.version], times[champion.version])
        verdict = test.verdict(ratio)
        _log.info("%d turns: ratio %.3f (%.3f to %.3f)", look, ratio.estimate, ratio.lower, ratio.upper)
        if verdict is not Verdict.OPEN:
            break
    return Contest(
        champion=champion.version,
        verdict=verdict,
        ratio=ratio,
        limit=1 - test.margin,
        candidate_ms=tuple(times[candidate.version]),
        champion_ms=tuple(times[champion.version]),
        same_network=candidate.has_network_of(champion),
        probe_spread=noise.spread,
        unreliable=noise.unreliable,
    )


def common_sizes(contender: Contender, other: Contender) -> list[NetworkShapes]:
    """The sizes of a contender that the other has, too: those in which both are compared."""
    others = {size.inputs for size in all_sizes(other.manifest)}
    return [size for size in all_sizes(contender.manifest) if size.inputs in others]


def _median_ms(contender: Contender, examples: Sequence[Arrays], noise: MachineNoise, options: PromoteOptions) -> float:
    make_call = partial(timed_call, contender.make_inference, examples)
    return float(np.median(noise.measure(partial(turn_in_process, make_call, options.measure_s)))) * 1e3
