"""A version of a registered model against another one, or a rival, on this host, and what is decided by it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path

import mlflow
import numpy as np

from ansor_mlflow import measuring, names
from ansor_mlflow.errors import CorrectnessError, ModelError, NotFasterError, UndecidedError, UserInputError
from ansor_mlflow.foreign import Code, Part, Report, Reported, Table, duration, time_unit
from ansor_mlflow.measuring import Deviation
from ansor_mlflow.model import LibraryEntry, Manifest, choose_library, verified_manifest
from ansor_mlflow.parameters import PromoteOptions
from ansor_mlflow.steps.evaluation import rival_task
from ansor_mlflow.tensors import Arrays, NetworkShapes, all_sizes
from ansor_mlflow.tracking import html_page, translated_errors

_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A version that was downloaded, with the library that is loaded here as it is; or a rival on its network."""

    version: str
    """Its number, or the name of the rival."""
    directory: Path
    manifest: Manifest
    entry: LibraryEntry
    rival_task: measuring.RivalTask | None = None

    @staticmethod
    def of_version(name: str, version: str, scratch: Path) -> Contender:
        scratch = scratch / version
        scratch.mkdir(parents=True)
        with translated_errors(f"read version {version} of {name}"):
            uri = f"models:/{name}/{version}"
            directory = Path(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=str(scratch)))
        manifest = verified_manifest(directory)
        entry = choose_library(directory, manifest)
        return Contender(version=version, directory=directory, manifest=manifest, entry=entry)

    def as_rival(self, rival: str, scratch: Path, *, trust: bool) -> Contender:
        task = rival_task((rival,), self.directory, self.manifest, self.entry, scratch, trust=trust)
        return replace(self, version=rival, rival_task=task)

    @property
    def network(self) -> Path:
        return self.directory / names.NETWORK_FILE

    @property
    def make_inference(self) -> measuring.MakeInference:
        if self.rival_task:
            return partial(measuring.rival_inference, self.version, self.rival_task)
        return partial(measuring.library_inference, self.directory / self.entry.path, self.manifest, self.entry)

    def has_network_of(self, other: Contender) -> bool:
        """Whether both were compiled from the same file, and from the same ones with its weights."""
        files = (contender.manifest.files.items() for contender in (self, other))
        mine, theirs = ({item for item in own if not item[0].startswith(("libraries/", "records/"))} for own in files)
        return mine == theirs

    def require_interface_of(self, champion: Contender) -> None:
        """Checks that this version could take another one's place: only then can their times be compared."""
        for kind in ("inputs", "outputs"):
            specs = (getattr(contender.manifest, kind) for contender in (self, champion))
            given, wanted = (", ".join(f"{s.name}: {s.dtype} {s.shape}" for s in found) for found in specs)
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


def _called(version: str) -> str:
    """A version, or a rival, as a part of a sentence."""
    return f"version {version}" if version.isdigit() else measuring.RIVALS[version].title


@dataclass(frozen=True, kw_only=True)
class Contest:
    """A candidate against a champion."""

    champion: str
    verdict: measuring.Verdict
    ratio: measuring.Ratio
    limit: float
    """What the ratio must be below for a promotion."""
    candidate_ms: tuple[float, ...]
    champion_ms: tuple[float, ...]
    same_network: bool
    """Whether both were compiled from the same ONNX file; if not, this compares nothing but their speed."""
    probe_spread: float
    unreliable: str

    @property
    def opponent(self) -> str:
        return _called(self.champion)

    @property
    def medians_ms(self) -> tuple[float, float]:
        """Latency of the candidate and of the champion."""
        return float(np.median(self.candidate_ms)), float(np.median(self.champion_ms))

    @property
    def text(self) -> str:
        low, high = f"{self.ratio.lower:.3f}", f"{self.ratio.upper:.3f}"
        return f"{self.ratio.estimate:.3f} ({low} to {high}) of the time of {self.opponent}"


def compete(candidate: Contender, champion: Contender, options: PromoteOptions) -> Contest:
    """Times both in turns until it is clear which one is faster, or the turns are used up.

    Every turn starts both once, in processes of their own, one after the other; who is first alternates.
    """
    noise = measuring.MachineNoise()
    test = measuring.SequentialTest(
        confidence=options.confidence, margin=options.min_improvement, max_turns=options.max_turns
    )
    times: dict[str, list[float]] = {candidate.version: [], champion.version: []}
    examples = {}
    for contender, other in ((candidate, champion), (champion, candidate)):
        sizes = common_sizes(contender, other)
        chosen = measuring.choose_examples(options.data, sizes, options.seed, candidate.network)
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
        if verdict is not measuring.Verdict.OPEN:
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


def _median_ms(
    contender: Contender, examples: Sequence[Arrays], noise: measuring.MachineNoise, options: PromoteOptions
) -> float:
    make_call = partial(measuring.timed_call, contender.make_inference, examples)
    return float(np.median(noise.measure(partial(measuring.turn_in_process, make_call, options.measure_s)))) * 1e3


class PromotionOutcome(str, Enum):
    """How a promotion ended."""

    PROMOTED = "promoted"
    """The candidate is faster than the champion by as much as was asked for."""
    NO_CHAMPION = "no_champion"
    """There was no champion; the candidate's outputs are right, and it is the champion now."""
    ALREADY_CHAMPION = "already_champion"
    """The candidate is the champion; nothing was measured."""
    LOST = "lost"
    """The candidate is not faster by as much as was asked for."""
    INCONCLUSIVE = "inconclusive"
    """The turns were used up before it was clear."""
    WRONG = "wrong"
    """The candidate's outputs are not those of ONNX Runtime."""
    NOT_MEASURABLE = "not_measurable"
    """The champion cannot be loaded on this host."""
    OVERTAKEN = "overtaken"
    """The champion changed while this was measured."""


_ERRORS = {
    PromotionOutcome.LOST: NotFasterError,
    PromotionOutcome.INCONCLUSIVE: UndecidedError,
    PromotionOutcome.WRONG: CorrectnessError,
    PromotionOutcome.NOT_MEASURABLE: ModelError,
    PromotionOutcome.OVERTAKEN: UndecidedError,
}


@dataclass(frozen=True, kw_only=True)
class Promotion(Reported):
    """A decision with its evidence."""

    run_id: str
    model: str
    candidate: str
    target: str
    outcome: PromotionOutcome
    reason: str
    aliases: dict[str, str]
    """The aliases that were to be moved, with the versions that they pointed to; empty for a new one."""
    dry_run: bool
    confidence: float
    tolerance: float | None = None
    """Largest relative error that passes; None where nothing was checked."""
    errors: dict[str, Deviation] = field(default_factory=dict)
    """How far outputs are from ONNX Runtime's, by version or rival; the reference is the candidate's network."""
    contests: tuple[Contest, ...] = ()

    @property
    def is_won(self) -> bool:
        """Whether the candidate is, or with `dry_run` would be, the new champion."""
        return self.outcome in (PromotionOutcome.PROMOTED, PromotionOutcome.NO_CHAMPION)

    @property
    def headline(self) -> str:
        to = f"version {self.candidate} of {self.model}"
        if self.is_won:
            return f"{to} {'would be' if self.dry_run else 'is now'} {' and '.join(self.aliases)}"
        is_it = set(self.aliases.values()) == {self.candidate}
        return f"{to} is {'' if is_it else 'not '}{' and '.join(self.aliases)}"

    @property
    def unreliable(self) -> str:
        return "; ".join(contest.unreliable for contest in self.contests if contest.unreliable)

    def require_won(self) -> None:
        kind = _ERRORS.get(self.outcome)
        if kind is not None:
            raise kind(f"{self.headline} ({self.outcome.value}): {self.reason}")

    def metrics(self) -> dict[str, float]:
        """What the run shows: of several contests the one that was closest."""
        found = {}
        if self.candidate in self.errors:
            difference = self.errors[self.candidate]
            found = {names.MAX_ABS_ERROR: difference.max_abs_error, names.MAX_REL_ERROR: difference.max_rel_error}
        if self.contests:
            closest = max(self.contests, key=lambda contest: contest.ratio.estimate)
            latency_ms, champion_ms = closest.medians_ms
            found |= {
                names.LATENCY_MS: latency_ms,
                names.CHAMPION_LATENCY_MS: champion_ms,
                names.LATENCY_RATIO: closest.ratio.estimate,
                names.LATENCY_RATIO_LOWER: closest.ratio.lower,
                names.LATENCY_RATIO_UPPER: closest.ratio.upper,
                names.NUM_TURNS: closest.ratio.num_turns,
                names.PROBE_SPREAD: closest.probe_spread,
            }
            if closest.champion in self.errors:
                found[names.CHAMPION_MAX_REL_ERROR] = self.errors[closest.champion].max_rel_error
        return found

    def tags(self) -> dict[str, str]:
        tags = {names.TAG_PROMOTION: self.outcome.value, names.TAG_PROMOTION_ALIASES: " ".join(self.aliases)}
        if self.contests:
            ratios = (f"{c.ratio.estimate:.4f} [{c.ratio.lower:.4f}, {c.ratio.upper:.4f}]" for c in self.contests)
            tags[names.TAG_PROMOTION_RATIO] = "; ".join(ratios)
            tags[names.TAG_PROMOTION_CHAMPION] = " ".join(contest.champion for contest in self.contests)
        if self.unreliable:
            tags[names.TAG_PROMOTION_UNRELIABLE] = self.unreliable
        return tags

    def report(self) -> Report:
        medians = [
            f"medians of all turns: version {self.candidate} {duration(contest.medians_ms[0] / 1e3)}, "
            f"{contest.opponent} {duration(contest.medians_ms[1] / 1e3)}"
            for contest in self.contests
        ]
        aliases = self.aliases if self.is_won and not self.dry_run else ()
        moved = [f"models:/{self.model}@{alias}" for alias in aliases]
        return Report(f"{self.outcome.value}: {self.headline}: {self.reason}", [*medians, *moved], {"run": self.run_id})

    def page(self, commands: Sequence[str]) -> str:
        """All of it as a page that needs no network, with the commands that do it again."""
        facts = {"outcome": self.outcome.value, "model": self.model, "candidate": f"version {self.candidate}"}
        aliases = [(alias, f"version {before}" if before else "–") for alias, before in self.aliases.items()]
        errors = [(v, f"{error.max_rel_error:.4g}", f"{error.max_abs_error:.4g}") for v, error in self.errors.items()]
        parts: list[Part] = [self.reason, *self._notes(), Table([*facts.items()])]
        parts.append(Table(aliases, ("alias", "before"), "Aliases"))
        if errors:
            limit = f"Relative to the largest reference value; at most {self.tolerance or 0:.4g} passes."
            headers = ("version", ">relative error", ">absolute error")
            parts += [Table(errors, headers, "Outputs, against ONNX Runtime with the candidate's network"), limit]
        for contest in self.contests:
            parts += _contest_tables(contest, self.candidate)
            share = f"{100 * (1 - self.confidence):.3g}"
            parts.append(f"Each bound is wrong in at most {share} % of such comparisons.")
        parts += [Code(command, "" if index else "Again") for index, command in enumerate(commands)]
        title = self.headline[:1].upper() + self.headline[1:]
        return html_page(Report(title, [f"{self.target} · run {self.run_id}", *parts]))

    def _notes(self) -> list[str]:
        notes = ["This was a dry run: no alias was moved."] if self.dry_run else []
        if self.unreliable:
            notes.append(f"The times cannot be trusted: {self.unreliable}.")
        for contest in self.contests:
            error = self.errors.get(contest.champion)
            if not contest.same_network:
                notes.append(f"Version {contest.champion} is another network: speed was compared, not accuracy.")
            elif error and self.tolerance and not error.max_rel_error <= self.tolerance:
                notes.append(f"The outputs of {contest.opponent} are not those of the reference.")
        return notes


def _contest_tables(contest: Contest, candidate: str) -> list[Table]:
    ratio = contest.ratio
    bounds = {"ratio": ratio.estimate, "at least": ratio.lower, "at most": ratio.upper, "must be below": contest.limit}
    turns = enumerate(zip(contest.candidate_ms, contest.champion_ms, strict=True), 1)
    unit_s, unit = time_unit(max(contest.medians_ms) / 1e3)
    in_unit = 1e-3 / unit_s
    rows = [
        (str(turn), f"{mine * in_unit:.4g}", f"{theirs * in_unit:.4g}", f"{mine / theirs:.3f}")
        for turn, (mine, theirs) in turns
    ]
    title = f"Latency: version {candidate} against {contest.opponent}"
    return [
        Table([(label, f"{value:.3f}") for label, value in bounds.items()], title=title),
        Table(rows, (">turn", f">candidate ({unit})", f">champion ({unit})", ">ratio")),
    ]
