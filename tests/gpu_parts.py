"""The parts into which run_gpu.py cuts the suite, each a pytest of its own."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

HERE = pathlib.Path(__file__).resolve().parent

# These run virtual CPU devices, or none.
LEFT_OUT = (
    *("build_files_test", "docs_test", "hosts_test", "nodes_test"),
    *("processes_test", "run_gpu_test"),
)
RANKS = (8, 5, 4, 3, 2)
SOME_RANKS = (8, 3)
# Files that take long by themselves; the others share a pytest, a few each.
LONG = (
    *("gated_mlp_test", "product_kernels_test", "fp8_mlp_test", "drops_test"),
    *("dispatch_permute_test", "overlap_test", "low_latency_test", "moe_test"),
    *("permute_test", "gpu_test", "programs_test", "every_case_test"),
    *("plan_dispatch_test", "transforms_test", "control_flow_test"),
    *("plan_dispatch_transforms_test", "examples_test", "large_test", "routers_test"),
    *("model_shapes_test", "permute_transforms_test", "fp8_test", "repetition_test"),
    *("layer_gradients_test", "low_latency_windows_test", "arguments_test"),
)
FILES_TOGETHER = 5


@dataclasses.dataclass(frozen=True)
class Part:
    """One pytest.

    Attributes:
      name: of its log and its JUnit file.
      arguments: files or tests.
      processes: how many compute at a time.
    """

    name: str
    arguments: tuple[str, ...]
    processes: int = 1


def plan() -> list[Part]:
    """All parts; those first that take longest, or most of the machine."""
    longest, *files = _files()
    ranks = sorted(_ranks(), key=lambda part: -part.processes)
    return [longest, *ranks, *_processes(), *files]


def _tests(name: str, file: str, tests: Sequence[str], processes: int) -> Part:
    return Part(name, tuple(f"tests/{file}.py::{test}" for test in tests), processes)


def _ranks() -> Iterator[Part]:
    file = "gpu_ranks_test"
    silent = "test_low_latency_process_that_never_calls"
    silent_ops = ("low_latency_dispatch-rank", "low_latency_combine-expert")
    for ranks in RANKS:
        tests = [f"test_exchanges[{ranks}-{path}]" for path in ("direct", "staged")]
        if ranks in SOME_RANKS:
            tests += [f"{silent}[{ranks}-{op}]" for op in silent_ops]
        for test in (
            *("test_300_low_latency_pairs", "test_another_operation_on_one_rank"),
            "test_lifetime",
        ):
            tests.append(f"{test}[{ranks}]")
        if ranks == min(RANKS):
            tests.append("test_killed_inside_a_dispatch")
        # They wait most of the time.
        yield _tests(f"ranks-{ranks}-others", file, tests, (ranks + 1) // 2)
    for ranks in RANKS:
        test = f"test_operations[{ranks}-direct]"
        yield _tests(f"ranks-{ranks}-direct", file, [test], ranks)
    for ranks in SOME_RANKS:
        for name, test in (
            ("staged", f"test_operations[{ranks}-staged]"),
            ("experts", f"test_experts[{ranks}]"),
            ("low-latency", f"test_low_latency[{ranks}]"),
        ):
            yield _tests(f"ranks-{ranks}-{name}", file, [test], ranks)


def _processes() -> Iterator[Part]:
    for place, processes in (("crossed", 4), ("crossed_staged", 4), ("apart", 2)):
        tests = (f"test_every_case_between_processes[{place}]",)
        yield _tests(f"nodes-{place}", "gpu_nodes_test", tests, processes)
    tests = ("test_300_steps_forward_and_backward",)
    yield _tests("nodes-steps", "gpu_nodes_test", tests, 3)
    tests = (
        *("test_several_chunks", "test_a_peer_node_is_killed", "test_lifetime"),
        "test_two_nodes_of_one_process",
    )
    yield _tests("nodes-others", "gpu_nodes_test", tests, 3)
    tests = ("test_operations_between_processes",)
    yield _tests("processes-operations", "gpu_processes_test", tests, 2)
    yield _tests("processes-exchanges", "gpu_processes_test", ("test_exchanges",), 6)
    tests = (
        *("test_low_latency", "test_low_latency_process_that_never_calls"),
        "test_example_has_the_losses_of_one_process",
        *("test_two_gpus_in_each_of_two_processes", "test_lifetime"),
        *("test_killed_inside_a_dispatch", "test_another_operation_on_one_rank"),
        "test_other_sizes_on_one_rank",
        "test_a_long_wait_is_told_while_it_lasts",
        "test_letting_go_does_not_wait_for_the_gpu",
        "test_plans_side_by_side",
        "test_two_launches_in_one_control_slot",
        "test_program_on_another_mesh",
    )
    yield _tests("processes-others", "gpu_processes_test", tests, 2)
    yield Part("fabric", ("tests/gpu_fabric_test.py",), 4)


def _files() -> Iterator[Part]:
    apart = {"gpu_ranks_test", "gpu_nodes_test", "gpu_processes_test"}
    apart |= {"gpu_fabric_test", *LEFT_OUT, *LONG}
    for name in LONG:
        yield Part(name.removesuffix("_test"), (f"tests/{name}.py",))
    rest = sorted(p.stem for p in HERE.glob("*_test.py") if p.stem not in apart)
    for begin in range(0, len(rest), FILES_TOGETHER):
        some = rest[begin : begin + FILES_TOGETHER]
        files = tuple(f"tests/{name}.py" for name in some)
        yield Part(f"files-{begin // FILES_TOGETHER + 1}", files)
