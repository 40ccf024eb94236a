"""What a tuning leaves in its run for people to read, besides what its observer logs: roofline, report, description."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ansor_mlflow import names, tracking
from ansor_mlflow.device import import_tensor_intrin
from ansor_mlflow.errors import one_line, only_warn
from ansor_mlflow.files import write_text
from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.model import fallback_clauses, part_entries
from ansor_mlflow.records import Database, RecordPair
from ansor_mlflow.steps.recorded import sketch_uses
from ansor_mlflow.steps.runtimes import estimated_parts
from ansor_mlflow.tensors import Sized
from ansor_mlflow.tuning import Roofline, TuningJob, quick_roofline
from ansor_mlflow.workers import argument_bytes

_NUM_SCHEDULES = 3
_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True, kw_only=True)
class TuningReport:
    """Where the report of a tuning comes from, and goes to."""

    history: tracking.TuningHistory
    job: TuningJob
    shapes: Sized
    outbox: tracking.Outbox
    directory: Path
    commands: Sequence[str]
    is_remote: bool = False
    """Whether this host is not what programs were measured on."""

    @contextlib.contextmanager
    def at_the_end(self) -> Iterator[None]:
        """Reports on the tuning that happens inside, however it ends. What goes wrong with that is a warning."""
        try:
            yield
        except BaseException as err:
            with only_warn("the run gets no report"):
                if self.history.result is not None:
                    self._put(may_measure=False)  # the user wants it to end
                elif self.history.plan is not None:
                    self.outbox.put(
                        tracking.Message(note=tracking.tuning_note(self.history, self.commands, one_line(err)))
                    )
            raise
        with only_warn("the run gets no report"):
            # without trials the user is in a hurry
            self._put(may_measure=bool(self.history.trials) and not self.is_remote)

    def _put(self, *, may_measure: bool) -> None:
        roofline = self._roofline() if may_measure and self.job.device.platform.in_process else None
        kernels: dict[str, tracking.KernelNote] = {}
        with only_warn("the run gets no sketches of the tasks"):
            kernels.update(self._kernels(roofline))
        schedules: list[tracking.ScheduleText] = []
        with only_warn("the run gets no schedules of the slowest tasks"):
            schedules += self._schedules()
        parts = part_entries(self.job.lowered)
        if may_measure and self.history.result and (estimated_s := self.history.result.estimated_latency_s) is not None:
            parts = estimated_parts(self.job.lowered, self.shapes, self.job.device, estimated_s)
        page = tracking.tuning_page(
            self.history,
            self.directory,
            run_id=self.directory.name,
            commands=self.commands,
            kernels=kernels,
            schedules=schedules,
            fallback=fallback_clauses(parts),
        )
        write_text(self.directory / names.REPORT_FILE, page)
        figures = [names.ROOFLINE_FIGURE] if roofline else []
        self.outbox.put(tracking.Message(artifacts=[(name, "") for name in (names.REPORT_FILE, *figures)]))

    def _roofline(self) -> Roofline | None:
        """Measures and draws the roofs of a CPU: no program is measured any more."""
        with only_warn("the run gets no roofline"):
            roofline = quick_roofline(self.job.device)
            num_bytes = {task.info.workload_hash: argument_bytes(task.mod) for task in self.job.lowered.tasks}
            figure = tracking.draw_roofline(self.history, roofline, num_bytes)
            tracking.save_figure(figure, self.directory / names.ROOFLINE_FIGURE)
            return roofline
        return None

    def _kernels(self, roofline: Roofline | None) -> dict[str, tracking.KernelNote]:
        """What is known of the fastest programs, by the hash of the workload."""
        pair = RecordPair.in_directory(self.job.records)
        if not pair.exists():
            return {}
        tasks = {task.info.workload_hash: task for task in self.job.lowered.tasks}
        best_s = {slow.state.info.workload_hash: slow.state.best_s for slow in self.history.slowest()}
        notes = {}
        for hash_, use in sketch_uses(pair, list(tasks.values()), self.job.device.target).items():
            note = tracking.KernelNote(sketch=use.sketch, own_ratio=use.own_ratio)
            if roofline is not None and tasks[hash_].info.flops and (seconds := best_s.get(hash_)):
                bound = roofline.bound(tasks[hash_].info.flops, argument_bytes(tasks[hash_].mod))
                note = replace(note, roof_share=bound.shortest_s / seconds, limit=bound.limit)
            notes[hash_] = note
        return notes

    def _schedules(self) -> list[tracking.ScheduleText]:
        pair = RecordPair.in_directory(self.job.records / names.BEST_DIR)
        if not pair.records.exists():
            return []
        import_tensor_intrin(self.job.device.platform.kind)  # reading a record applies it
        database = Database(pair)
        records = {database.hashes[record.workload]: database.fields(record) for record in database.records}
        tasks = {task.info.workload_hash: task for task in self.job.lowered.tasks}
        return [
            tracking.ScheduleText(task=slow.name, lines=_schedule_lines(tasks[hash_], records[hash_]))
            for slow in self.history.slowest()[:_NUM_SCHEDULES]
            if (hash_ := slow.state.info.workload_hash) in records
        ]


def _schedule_lines(task: TuningTask, record: str) -> list[str]:
    import tvm_ffi
    from tvm.s_tir.meta_schedule.database import TuningRecord, Workload

    fields = tvm_ffi.get_global_func("ffi.json.Parse")(record)
    trace = TuningRecord.from_json(fields, Workload(task.mod)).trace
    return [str(statement) for statement in trace.as_python()]
