"""The step `promote`: a version of a registered model becomes the champion if it is right and faster."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ansor_mlflow import names
from ansor_mlflow.device import CPU, Device, DeviceFingerprint
from ansor_mlflow.errors import ModelError, UndecidedError, UserInputError
from ansor_mlflow.files import write_text
from ansor_mlflow.measuring import (
    Deviation,
    MakeInference,
    Verdict,
    choose_examples,
    compare_with_reference,
    require_examples,
    require_rivals,
    tolerance_for,
    what_to_do,
)
from ansor_mlflow.model import threads_here
from ansor_mlflow.parameters import AliasOptions, PromoteOptions
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.steps.promotion.contest import Contender, Contest, common_sizes, compete
from ansor_mlflow.steps.promotion.decision import Promotion, PromotionOutcome
from ansor_mlflow.tensors import NetworkShapes, all_sizes
from ansor_mlflow.tracking import (
    StepRun,
    aliases_of,
    command_lines,
    describe_environment,
    find_version,
    finish_moves,
    move_aliases,
    step_run,
    tag_version,
)

CHAMPION = "champion"
_log = logging.getLogger("ansor_mlflow")


def target_alias(device: DeviceFingerprint) -> str:
    """The alias of the champion on a device, such as `champion-llvm-znver4-x2-0123456789`."""
    return f"{CHAMPION}-{re.sub(r'[^A-Za-z0-9_-]', '-', device.name)}"


def promote(options: PromoteOptions) -> Promotion:
    """Compares a candidate with the champion on this host, and moves the aliases if it wins.

    The aliases are `champion-<target>` and the one that `options` names. The candidate must win against each version
    that loses an alias, and against the rival that `options` names as champion.
    """
    if not options.candidate:
        raise UserInputError("candidate='': it must be the number of a version, or an alias; or give rollback")
    require_examples(options.data)
    require_rivals("champion", rivals_of(options))
    if not options.dry_run:
        finish_moves(options.model)
    version = find_version(options.model, options.candidate)
    with step_run("promote", options, f"promote {options.model}/{version}") as run:
        return _promote(options, version, run)


def _promote(options: PromoteOptions, version: str, run: StepRun) -> Promotion:
    candidate = Contender.of_version(options.model, version, run.directory)
    device = host_of(candidate)
    run.log_tags(
        {
            names.TAG_NETWORK: candidate.manifest.network,
            names.TAG_TARGET: device.description,
            names.TAG_NUM_THREADS: str(device.num_threads),
            names.TAG_MODEL_URI: f"models:/{options.model}/{version}",
            names.TAG_DRY_RUN: str(options.dry_run).lower(),
        }
    )
    now = aliases_of(options.model)
    wanted = [target_alias(device), *([options.alias] if options.alias else [])]
    seen = {alias: now.get(alias, "") for alias in wanted}
    decision = _decide(options, candidate, seen, run.directory)
    promotion = Promotion(
        run_id=run.run_id,
        model=options.model,
        candidate=version,
        target=device.description,
        aliases=seen,
        dry_run=options.dry_run,
        confidence=options.confidence,
        **vars(decision),
    )
    run.log_unreliable(promotion.unreliable)
    _log_evidence(promotion, device, options, run)  # before an alias moves, so that none does without
    settled = promotion if options.dry_run else _carry_out(promotion)
    if settled is not promotion:
        _log_evidence(settled, device, options, run)
    return settled


def rivals_of(options: AliasOptions) -> tuple[str, ...]:
    """The rival that a candidate must beat, if there is one."""
    return (options.champion,) if options.champion else ()


def host_of(contender: Contender) -> DeviceFingerprint:
    """This host with the threads that a library runs on here; it may be made for another CPU and for more.

    For a library for a GPU it is the GPU of this host.
    """
    if contender.manifest.platform != CPU:
        return Device.resolve(contender.manifest.platform.kind, 1).fingerprint
    return Device.resolve("auto", threads_here(contender.entry)).fingerprint


@dataclass(frozen=True, kw_only=True)
class _Decision:
    """Fields of a `Promotion`."""

    outcome: PromotionOutcome
    reason: str
    tolerance: float | None = None
    errors: dict[str, Deviation] = field(default_factory=dict)
    contests: tuple[Contest, ...] = ()


def _decide(options: PromoteOptions, candidate: Contender, seen: Mapping[str, str], scratch: Path) -> _Decision:
    """Checks the candidate, and lets it compete with the rival, and each version that has one of the aliases."""
    rivals = [candidate.as_rival(rival, scratch, trust=options.trust) for rival in rivals_of(options)]
    if set(seen.values()) == {candidate.version} and not rivals:
        return _Decision(outcome=PromotionOutcome.ALREADY_CHAMPION, reason="nothing was measured")
    champions = []
    for version in dict.fromkeys(seen.values()):
        if version not in ("", candidate.version):
            try:
                champions.append(Contender.of_version(options.model, version, scratch))
            except ModelError as err:
                return _Decision(outcome=PromotionOutcome.NOT_MEASURABLE, reason=_not_measurable(version, err))
    for champion in champions:
        candidate.require_interface_of(champion)
    try:
        return _compare(options, candidate, [*rivals, *champions])
    except ModelError as err:
        _errors(options, candidate, [])  # this raises it again if it is the candidate that cannot be loaded
        versions = " or ".join(champion.version for champion in champions)
        return _Decision(outcome=PromotionOutcome.NOT_MEASURABLE, reason=_not_measurable(versions, err))


def _compare(options: PromoteOptions, candidate: Contender, champions: Sequence[Contender]) -> _Decision:
    """Checks what the candidate computes, and measures it against each champion until it does not win."""
    dtype = LoweringSettings.among(candidate.entry.provenance).dtype
    tolerance = tolerance_for(options.tolerance, candidate.network, dtype)
    errors = _errors(options, candidate, champions)
    error = errors[candidate.version].max_rel_error
    if not error <= tolerance:
        reason = f"its outputs differ from ONNX Runtime's by max_rel_error={error:.3g}, allowed is {tolerance:g}"
        examples = choose_examples(options.data, all_sizes(candidate.manifest), options.seed, candidate.network)
        advice = what_to_do(candidate.network, threads_here(candidate.entry), examples, tolerance)
        wrong = f"{reason}; {advice}"
        return _Decision(outcome=PromotionOutcome.WRONG, reason=wrong, tolerance=tolerance, errors=errors)
    contests: list[Contest] = []
    for champion in champions:
        contests.append(compete(candidate, champion, options))
        if contests[-1].verdict is not Verdict.FASTER:
            break
    outcome, reason = _outcome(contests)
    return _Decision(outcome=outcome, reason=reason, tolerance=tolerance, errors=errors, contests=tuple(contests))


def _errors(options: PromoteOptions, candidate: Contender, champions: Sequence[Contender]) -> dict[str, Deviation]:
    """How far the outputs of the candidate, and of champions with the same network, are from the reference."""
    same = [champion for champion in champions if champion.has_network_of(candidate)]
    in_sizes: dict[tuple[NetworkShapes, ...], dict[str, MakeInference]] = {}
    for contender in (candidate, *same):
        runs = in_sizes.setdefault(tuple(common_sizes(candidate, contender)), {})
        runs[contender.version] = contender.make_inference
    errors: dict[str, Deviation] = {}
    for sizes, runs in in_sizes.items():
        examples = choose_examples(options.data, sizes, options.seed, candidate.network)
        _log.info("comparing outputs with ONNX Runtime's on %d inputs", len(examples))
        errors |= compare_with_reference(runs, candidate.network, threads_here(candidate.entry), examples)
    return errors


def _outcome(contests: Sequence[Contest]) -> tuple[PromotionOutcome, str]:
    """What the last contest, which decides, means; with a sentence on it."""
    if not contests:
        return PromotionOutcome.NO_CHAMPION, "its outputs are right, and there was no champion to compare it with"
    last = contests[-1]
    took = f"it takes {last.text}"
    if last.verdict is Verdict.FASTER:
        return PromotionOutcome.PROMOTED, f"it takes {' and '.join(contest.text for contest in contests)}"
    if last.verdict is Verdict.NOT_FASTER:
        return PromotionOutcome.LOST, f"{took}, and must take less than {last.limit:.3f}; tune it longer"
    return PromotionOutcome.INCONCLUSIVE, (
        f"{took} after {last.ratio.num_turns} turns, and must take less than {last.limit:.3f}; give more max_turns, or "
        "run it on a host with nothing else to do"
    )


def _not_measurable(version: str, err: ModelError) -> str:
    return f"the champion, version {version}, cannot be compared on this host: {err}; or leave out alias"


def _carry_out(promotion: Promotion) -> Promotion:
    """Moves the aliases of a candidate that won, unless the champion changed meanwhile, and tags the candidate.

    The tags of a candidate that is the champion already stay: they say why it is.
    """
    if promotion.outcome is PromotionOutcome.ALREADY_CHAMPION:
        return promotion
    if promotion.is_won:
        try:
            move_aliases(promotion.model, promotion.candidate, promotion.aliases, promotion.run_id)
        except UndecidedError as err:
            promotion = replace(promotion, outcome=PromotionOutcome.OVERTAKEN, reason=str(err))
    of_contest = (names.TAG_PROMOTION_RATIO, names.TAG_PROMOTION_CHAMPION, names.TAG_PROMOTION_UNRELIABLE)
    without_contest = dict.fromkeys(of_contest, "")
    tags = {**without_contest, **promotion.tags(), names.TAG_PROMOTION_RUN: promotion.run_id}
    tag_version(promotion.model, promotion.candidate, tags)
    return promotion


def _log_evidence(promotion: Promotion, device: DeviceFingerprint, options: PromoteOptions, run: StepRun) -> None:
    """Says in the run what was decided and why."""
    run.log_metrics(promotion.metrics())
    run.log_tags(
        {
            **promotion.tags(),
            "mlflow.runName": f"promote {options.model}/{promotion.candidate} · {promotion.outcome.value}",
        }
    )
    texts = {
        names.PROMOTION_FILE: promotion.to_json(),
        names.PROMOTION_REPORT_FILE: promotion.page(command_lines("promote", options)),
        names.ENVIRONMENT_FILE: json.dumps(describe_environment(device), indent=1),
    }
    for name, text in texts.items():
        path = run.directory / name
        write_text(path, text)
        run.log_artifacts(path)
