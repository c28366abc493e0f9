"""What all sections of a run share: devices, report, and what is known already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import limits
from inputs import Inputs
from jax.sharding import Mesh
from operations import Operation, expected_us, jax_ep_operations
from report import Report
from stopwatch import Stopwatch
from timing import AXIS, Stats
from workloads import Workload

import jax_ep


class Session:
    """Measures on the first devices of a run, and remembers.

    Attributes:
      devices: of the run; a workload uses as many as it has ranks.
      workload: what the run is about.
      report: where results go.
      num_sms: that an operation of ours may use, one after the other; [None] on a
        CPU.
      quick: fewer repetitions.
      others_us: medians of what JAX offers, by name.
      failed: whether an operation of ours failed or was wrong.
    """

    def __init__(
        self,
        devices: list[jax.Device],
        workload: Workload,
        report: Report,
        num_sms: list[int | None],
        quick: bool,
    ):
        self.devices = devices
        self.mesh = _mesh(devices)
        self.on_gpu = devices[0].platform == "gpu"
        self.native = "cuda" if self.on_gpu else "cpu"
        self.workload = workload
        self.report = report
        self.num_sms = num_sms
        self.quick = quick
        self.others_us: dict[str, float] = {}
        self.failed = False
        self._limits: dict[Workload, limits.Limits] = {}
        self._stopwatches: dict[Mesh, Stopwatch] = {}
        self._known: dict[tuple[Workload, int | None], dict[str, float]] = {}

    def limits_of(self, workload: Workload) -> limits.Limits:
        """The ceilings for a workload's bytes, measured and printed once."""
        if workload not in self._limits:
            report, quick = self.report, self.quick
            devices = self.devices[: workload.num_ranks]
            if jax.process_count() > 1:
                found = limits.Limits(workload)  # one process measures them
            elif self.on_gpu:
                counts = [n for n in self.num_sms if n]
                found = limits.measure_gpu(report, devices, workload, counts, quick)
            else:
                found = limits.measure_cpu(report, _mesh(devices), workload, quick)
            self._limits[workload] = found
        return self._limits[workload]

    def stopwatch(self, mesh: Mesh) -> Stopwatch:
        if mesh not in self._stopwatches:
            quick = self.quick
            self._stopwatches[mesh] = Stopwatch(
                mesh,
                self.on_gpu,
                seconds=0.4 if quick else 3.0,
                few=2 if quick else 5,
            )
        return self._stopwatches[mesh]

    def times_us(
        self,
        workload: Workload,
        num_sms: int | None,
        names: Sequence[str],
    ) -> dict[str, float]:
        """Medians of our native operations by name; those that failed are not in it.

        Args:
          workload: on as many devices as it has ranks.
          num_sms: that an operation may use.
          names: of operations.
        """
        known = self._known.setdefault((workload, num_sms), {})
        missing = [name for name in names if name not in known]
        if missing:
            mesh = _mesh(self.devices[: workload.num_ranks])
            inputs = Inputs(mesh, workload)
            with self.communicator(self.native, num_sms, mesh) as comm:
                wanted = [
                    op for op in jax_ep_operations(inputs, comm) if op.name in missing
                ]
                found = self.measured(
                    wanted, self.native, mesh, guess_us=self._expected(workload)
                )
                for op, stats in found:
                    known[op.name] = stats.median
        return known

    def _expected(self, w: Workload) -> Callable[[Operation], float | None]:
        """About what an operation takes on a GPU, from its bytes."""
        return lambda op: (expected_us(w) if op.moves else 15) if self.on_gpu else None

    def remember(
        self, workload: Workload, num_sms: int | None, medians: Mapping[str, float]
    ) -> None:
        """What times_us need not measure again."""
        self._known.setdefault((workload, num_sms), {}).update(medians)

    def measured(
        self,
        operations: Sequence[Operation],
        backend: str,
        mesh: Mesh | None = None,
        guess_us: Callable[[Operation], float | None] = lambda op: None,
        stopwatch: Stopwatch | None = None,
    ) -> Iterator[tuple[Operation, Stats]]:
        """Those that ran and were right; the others become a line of their own."""
        stopwatch = stopwatch or self.stopwatch(mesh or self.mesh)
        plain = backend == "xla" or (backend == "jax" and not self.on_gpu)
        found = stopwatch.measure(operations, plain=plain, guess_us=guess_us)
        for op, result in found:
            if isinstance(result, Stats):
                yield op, result
            else:
                self.failure(op.name, backend, result)

    def failure(self, name: str, backend: str, e: Exception) -> None:
        reason = " ".join(str(e).split())
        wrong = isinstance(e, AssertionError)
        what = "WRONG RESULT" if wrong else "did not run"
        self.report.say(f"{name} ({backend}) {what}: {reason[:120]}")
        self.report.record("failure", operation=name, backend=backend, why=reason)
        self.failed |= wrong or backend == self.native

    def communicator(
        self, backend: str, num_sms: int | None, mesh: Mesh | None = None
    ) -> jax_ep.Communicator:
        return jax_ep.Communicator(
            mesh or self.mesh, AXIS, backend=backend, num_sms=num_sms
        )


def _mesh(devices: Sequence[jax.Device]) -> Mesh:
    return jax.make_mesh((len(devices),), (AXIS,), devices=devices)
