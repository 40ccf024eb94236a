"""The step `promote`: a version of a registered model becomes the champion if it is right and faster."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ansor_mlflow import measuring, names, tracking
from ansor_mlflow.device import CPU, Device, DeviceFingerprint
from ansor_mlflow.errors import ModelError, UndecidedError, UserInputError
from ansor_mlflow.foreign import Report, Reported
from ansor_mlflow.model import threads_here
from ansor_mlflow.parameters import AliasOptions, PromoteOptions
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.steps.promotion.contest import Contender, Contest, Promotion, PromotionOutcome, common_sizes, compete
from ansor_mlflow.tensors import Arrays, NetworkShapes, all_sizes

CHAMPION = "champion"
Decided = Callable[..., Promotion]
"""Makes a promotion of an outcome, a reason, and what else was found."""
_ROLLED_BACK = "rolled_back"
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
    measuring.require_examples(options.data)
    measuring.require_rivals("champion", rivals_of(options))
    if not options.dry_run:
        tracking.finish_moves(options.model)
    version = tracking.find_version(options.model, options.candidate)
    with tracking.step_run("promote", options, f"promote {options.model}/{version}") as run:
        return _promote(options, version, run)


def _promote(options: PromoteOptions, version: str, run: tracking.StepRun) -> Promotion:
    candidate = Contender.of_version(options.model, version, run.directory)
    tracking.take_model(run.run_id, tracking.logged_model_of(candidate.directory))
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
    now = tracking.aliases_of(options.model)
    wanted = [target_alias(device), *([options.alias] if options.alias else [])]
    seen = {alias: now.get(alias, "") for alias in wanted}
    decided = partial(
        Promotion,
        run_id=run.run_id,
        model=options.model,
        candidate=version,
        target=device.description,
        aliases=seen,
        dry_run=options.dry_run,
        confidence=options.confidence,
    )
    if options.data:
        examples = measuring.choose_examples(options.data, all_sizes(candidate.manifest), options.seed)
        run.log_data(options.data, examples[0])
    promotion = _decide(options, candidate, decided, seen, run.directory)
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


def _decide(
    options: PromoteOptions, candidate: Contender, decided: Decided, seen: Mapping[str, str], scratch: Path
) -> Promotion:
    """Checks the candidate, and lets it compete with the rival, and each version that has one of the aliases."""
    rivals = [candidate.as_rival(rival, scratch, trust=options.trust) for rival in rivals_of(options)]
    if set(seen.values()) == {candidate.version} and not rivals:
        return decided(outcome=PromotionOutcome.ALREADY_CHAMPION, reason="nothing was measured")
    champions = []
    for version in dict.fromkeys(seen.values()):
        if version not in ("", candidate.version):
            try:
                champions.append(Contender.of_version(options.model, version, scratch))
            except ModelError as err:
                return decided(outcome=PromotionOutcome.NOT_MEASURABLE, reason=_not_measurable(version, err))
    for champion in champions:
        candidate.require_interface_of(champion)
    try:
        return _compare(options, candidate, decided, [*rivals, *champions])
    except ModelError as err:
        _errors(options, candidate, [])  # this raises it again if it is the candidate that cannot be loaded
        versions = " or ".join(champion.version for champion in champions)
        return decided(outcome=PromotionOutcome.NOT_MEASURABLE, reason=_not_measurable(versions, err))


def _compare(
    options: PromoteOptions, candidate: Contender, decided: Decided, champions: Sequence[Contender]
) -> Promotion:
    """Checks what the candidate computes, and measures it against each champion until it does not win."""
    network, num_threads = candidate.network, threads_here(candidate.entry)
    dtype = LoweringSettings.among(candidate.entry.provenance).dtype
    errors = _errors(options, candidate, champions)
    error = errors[candidate.version].max_rel_error
    examples = measuring.choose_examples(options.data, all_sizes(candidate.manifest), options.seed, network)
    tolerance = measuring.allowed_error(error, options.tolerance, network, dtype, num_threads, examples)
    if not error <= tolerance:
        reason = f"its outputs differ from ONNX Runtime's by max_rel_error={error:.3g}, allowed is {tolerance:g}"
        advice = measuring.what_to_do(network, num_threads, examples, tolerance)
        wrong = f"{reason}; {advice}"
        return decided(outcome=PromotionOutcome.WRONG, reason=wrong, tolerance=tolerance, errors=errors)
    if broken := _why_contract_broken(candidate, champions, examples):
        return decided(outcome=PromotionOutcome.WRONG, reason=broken, tolerance=tolerance, errors=errors)
    contests: list[Contest] = []
    for champion in champions:
        contests.append(compete(candidate, champion, options))
        if contests[-1].verdict is not measuring.Verdict.FASTER:
            break
    outcome, reason = _outcome(contests)
    return decided(outcome=outcome, reason=reason, tolerance=tolerance, errors=errors, contests=tuple(contests))


def _errors(
    options: PromoteOptions, candidate: Contender, champions: Sequence[Contender]
) -> dict[str, measuring.Deviation]:
    """How far the outputs of the candidate, and of champions with the same network, are from the reference."""
    same = [champion for champion in champions if champion.has_network_of(candidate)]
    in_sizes: dict[tuple[NetworkShapes, ...], dict[str, measuring.MakeInference]] = {}
    for contender in (candidate, *same):
        runs = in_sizes.setdefault(tuple(common_sizes(candidate, contender)), {})
        runs[contender.version] = contender.make_inference
    errors: dict[str, measuring.Deviation] = {}
    for sizes, runs in in_sizes.items():
        examples = measuring.choose_examples(options.data, sizes, options.seed, candidate.network)
        _log.info("comparing outputs with ONNX Runtime's on %d inputs", len(examples))
        errors |= measuring.compare_with_reference(runs, candidate.network, threads_here(candidate.entry), examples)
    return errors


def _why_contract_broken(candidate: Contender, champions: Sequence[Contender], examples: Sequence[Arrays]) -> str:
    """Why a quantised candidate loses more than it may, beside a champion with the float network; empty where it does
    not. A loss of the user's own is code, which a model's word is not enough to run.
    """
    terms = candidate.entry.provenance.get("quantization") or {}
    contract = terms.get("contract", {})
    if contract.get("loss") not in measuring.LOSSES:
        return ""
    for champion in champions:
        if champion.entry.provenance.get("network_sha256") == terms["float_sha256"]:
            outputs = (measuring.outputs_of(each.make_inference, examples) for each in (champion, candidate))
            loss = measuring.find_loss(contract["loss"])(*outputs)
            _log.info("%s beside the float champion, version %s: %.3g", contract["loss"], champion.version, loss)
            if not loss <= contract["max_loss"]:
                return (
                    f"it is quantised, and {contract['loss']} beside the float champion, version {champion.version}, "
                    f"is {loss:.3g}, allowed is {contract['max_loss']:g}; quantise it with more of such data"
                )
    return ""


def _outcome(contests: Sequence[Contest]) -> tuple[PromotionOutcome, str]:
    """What the last contest, which decides, means; with a sentence on it."""
    if not contests:
        return PromotionOutcome.NO_CHAMPION, "its outputs are right, and there was no champion to compare it with"
    last = contests[-1]
    took = f"it takes {last.text}"
    if last.verdict is measuring.Verdict.FASTER:
        return PromotionOutcome.PROMOTED, f"it takes {' and '.join(contest.text for contest in contests)}"
    if last.verdict is measuring.Verdict.NOT_FASTER:
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
            tracking.move_aliases(promotion.model, promotion.candidate, promotion.aliases, promotion.run_id)
        except UndecidedError as err:
            promotion = replace(promotion, outcome=PromotionOutcome.OVERTAKEN, reason=str(err))
    # the run has the rest
    tags = {names.TAG_PROMOTION: promotion.outcome.value, names.TAG_PROMOTION_RUN: promotion.run_id}
    tracking.tag_version(promotion.model, promotion.candidate, tags)
    return promotion


def _log_evidence(
    promotion: Promotion, device: DeviceFingerprint, options: PromoteOptions, run: tracking.StepRun
) -> None:
    run.log_metrics(promotion.metrics())
    run.log_tags(
        {
            **promotion.tags(),
            "mlflow.runName": f"promote {options.model}/{promotion.candidate} · {promotion.outcome.value}",
        }
    )
    run.log_json(promotion, names.PROMOTION_FILE)
    run.log_text(promotion.page(tracking.command_lines("promote", options)), names.PROMOTION_REPORT_FILE)
    run.log_json(tracking.describe_environment(device), names.ENVIRONMENT_FILE)


@dataclass(frozen=True, kw_only=True)
class Rollback(Reported):
    """The last promotion, taken back."""

    run_id: str
    model: str
    aliases: dict[str, tuple[str, str]]
    """The version that each alias pointed to, and the one that it points to now; empty where it was removed."""

    def report(self) -> Report:
        moved = {alias: f"points to version {now} again" for alias, (_, now) in self.aliases.items() if now}
        lines = [
            f"{alias} of {self.model} {moved.get(alias, 'is removed again')}, it pointed to version {before}"
            for alias, (before, _) in self.aliases.items()
        ]
        return Report("; ".join(lines), where={"run": self.run_id})


def roll_back(options: PromoteOptions) -> Rollback:
    """Lets the aliases that the last promotion moved point to where they pointed before. Nothing is measured.

    Can be done again, for the promotion before that one; after one that was killed it does the rest of that, no more.
    """
    if options.dry_run or options.candidate:
        given = "dry_run=true" if options.dry_run else f"candidate={options.candidate}"
        raise UserInputError(
            f"rollback=true and {given}: a rollback takes the aliases back to where they pointed before, and measures "
            "nothing; leave one of them out"
        )
    moves = tracking.finish_moves(options.model)
    is_done = bool(moves) and options.alias in ("", *moves)  # this is the rollback that was killed, given again
    if not is_done:
        tracking.undoable_moves(options.model, options.alias)  # before there is a run of what cannot be done
    with tracking.step_run("promote", options, f"roll back {options.model}") as run:
        if not is_done:
            moves = tracking.undo_moves(options.model, options.alias)
        aliases = {alias: (move.after, move.before) for alias, move in moves.items()}
        tags = {names.TAG_PROMOTION: _ROLLED_BACK, names.TAG_PROMOTION_ALIASES: " ".join(aliases)}
        run.log_tags({**tags, "mlflow.runName": f"promote {options.model} · {_ROLLED_BACK}"})
        of_version = {names.TAG_PROMOTION: _ROLLED_BACK, names.TAG_PROMOTION_RUN: run.run_id}
        for version in {before for before, _ in aliases.values()}:
            tracking.tag_version(options.model, version, of_version)
        for version in {now for _, now in aliases.values() if now}:
            if (
                tracking.tags_of_version(options.model, version).get(names.TAG_PROMOTION) == _ROLLED_BACK
            ):  # an earlier one
                tracking.tag_version(options.model, version, dict.fromkeys(of_version, ""))
        return Rollback(run_id=run.run_id, model=options.model, aliases=aliases)
