"""Plant one fault for each law, and check whether the law's tests detect it.

    python tests/faults.py [NAME...]

A fault is planted in a temporary copy of this checkout, where the tests that are named for it then
run. It is `caught` where one of them fails. A fault whose code is not found, or whose tests do not
run, is an error. The exit status is 0 where every fault is caught, else 1. NAME leaves out the
faults of other names; `--list` prints the names and runs none.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("dpbench", "benchmarks", "tests", "pyproject.toml")
PASSED, FAILED = 0, 1
"""Exit statuses of pytest; every other one means that tests did not run to their end."""


@dataclass(frozen=True)
class Fault:
    """Code, its replacement that breaks a law, and the tests that must detect it.

    `old` is code of dpbench, and `new` replaces it. Each is an expression, or a run of statements.
    `old` is found by its syntax tree, so that its formatting does not matter. Where the same code
    occurs elsewhere, `where` names its module, class or function below dpbench. `settings` are
    variables of the tests' environment, as NAME=VALUE.
    """

    name: str
    law: str
    old: str
    new: str
    tests: tuple[str, ...]
    where: str = ""
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Module:
    """A module of dpbench: its file, its name below dpbench, and its text."""

    path: Path
    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def words(self) -> set[str]:
        """The identifiers and the literal texts."""
        return words_of(self.tree)

    @cached_property
    def nodes(self) -> dict[type[ast.AST], list[tuple[str, list[ast.AST]]]]:
        """Each node with its following siblings, and its definition's name, by type of node."""
        found = defaultdict(list)
        for where, nodes in located(self.tree, self.name):
            found[type(nodes[0])].append((where, nodes))
        return found


class NotFoundError(LookupError):
    """The code to replace does not occur exactly once.

    It has changed, and the fault must follow it.
    """


def modules(root: Path) -> list[Module]:
    """Return the modules below `root`/dpbench."""
    top = root / "dpbench"
    return [
        Module(
            path,
            ".".join(path.relative_to(top).with_suffix("").parts),
            path.read_text(encoding="utf-8"),
        )
        for path in sorted(top.rglob("*.py"))
    ]


def code(text: str) -> list[ast.AST]:
    """Return the expression of a text, alone in a list, or else its statements."""
    body = ast.parse(textwrap.dedent(text)).body
    return [body[0].value] if len(body) == 1 and isinstance(body[0], ast.Expr) else list(body)


def words_of(tree: ast.AST) -> set[str]:
    """Return the identifiers and the literal texts of a syntax tree."""
    return {
        value for node in ast.walk(tree) for value in vars(node).values() if isinstance(value, str)
    }


def located(node: ast.AST, where: str) -> Iterator[tuple[str, list[ast.AST]]]:
    """Yield nodes below `node`, their following siblings, and their definition's dotted name."""
    for value in vars(node).values():
        children = [
            child
            for child in (value if isinstance(value, list) else [value])
            if isinstance(child, ast.AST)
        ]
        for i, child in enumerate(children):
            yield where, children[i:]
            definition = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            yield from located(child, f"{where}.{child.name}" if definition else where)


def places(fault: Fault, among: Sequence[Module]) -> Iterator[tuple[Module, list[ast.AST]]]:
    """Yield each module with the nodes that are the code to replace."""
    wanted = code(fault.old)
    trees = [ast.dump(node) for node in wanted]
    words = set().union(*map(words_of, wanted))
    for module in among:
        if not words <= module.words:
            continue
        for where, nodes in module.nodes[type(wanted[0])]:
            run = nodes[: len(wanted)]
            inside = not fault.where or f"{where}.".startswith(f"{fault.where}.")
            if inside and [ast.dump(node) for node in run] == trees:
                yield module, run


def place(fault: Fault, among: Sequence[Module]) -> tuple[Module, list[ast.AST]]:
    """Return the one place of the code to replace; NotFoundError unless it occurs exactly once."""
    found = list(places(fault, among))
    if len(found) != 1:
        lines = (
            ", ".join(f"{module.path}:{nodes[0].lineno}" for module, nodes in found) or "nowhere"
        )
        raise NotFoundError(
            f"this must occur exactly once in dpbench/{fault.where}, and occurs"
            f" {lines}:\n{fault.old}"
        )
    return found[0]


def planted(fault: Fault, among: Sequence[Module]) -> tuple[Path, str]:
    """Return the path of the module that has the code to replace, and its text with the fault."""
    module, nodes = place(fault, among)
    lines = module.text.encode().splitlines(keepends=True)
    text = b"".join(lines)
    first, last = nodes[0], nodes[-1]
    start = len(b"".join(lines[: first.lineno - 1])) + first.col_offset
    end = len(b"".join(lines[: last.end_lineno - 1])) + last.end_col_offset
    return (
        module.path,
        (text[:start] + _written(fault.new, first.col_offset).encode() + text[end:]).decode(),
    )


def _written(new: str, column: int) -> str:
    if isinstance(code(new)[0], ast.expr):
        return f"({new})"
    return textwrap.indent(textwrap.dedent(new), " " * column).strip()


def plant(fault: Fault, root: Path) -> None:
    """Write the fault into the one module below `root`/dpbench that has the code to replace."""
    path, text = planted(fault, modules(root))
    path.write_text(text, encoding="utf-8")


def copy_to(root: Path) -> None:
    """Copy to `root` all that the tests need."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, root / name)


def run_tests(tests: Sequence[str], root: Path, settings: Sequence[str]) -> tuple[int, str]:
    """Run tests of the copy in `root`; return pytest's exit status and its output."""
    command = [
        sys.executable,
        "-B",
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--timeout=120",
        "--all",
        *tests,
    ]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= dict(setting.split("=", 1) for setting in settings)
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def try_one(fault: Fault) -> str:
    """Return `caught`, `SURVIVED`, or `ERROR:` and the reason."""
    with tempfile.TemporaryDirectory(prefix="dpbench-fault-") as folder:
        root = Path(folder)
        copy_to(root)
        try:
            plant(fault, root)
        except (NotFoundError, SyntaxError) as error:
            return f"ERROR: the code to change was not found: {error}"
        status, output = run_tests(fault.tests, root, fault.settings)
    if status not in (PASSED, FAILED):
        return f"ERROR: the tests did not run (pytest ended with {status}):\n{output[-2000:]}"
    return "caught" if status == FAILED else "SURVIVED"


def sound(faults: Sequence[Fault]) -> str:
    """Return the output of the faults' tests on unchanged code where one fails.

    Empty where all pass.
    """
    with tempfile.TemporaryDirectory(prefix="dpbench-fault-") as folder:
        copy_to(Path(folder))
        for settings in dict.fromkeys(fault.settings for fault in faults):
            alike = [fault for fault in faults if fault.settings == settings]
            tests = dict.fromkeys(test for fault in alike for test in fault.tests)
            status, output = run_tests(list(tests), Path(folder), settings)
            if status != PASSED:
                return output
    return ""


def main(arguments: Sequence[str], table: Sequence[Fault]) -> int:
    """Plant the faults of these names, or all; print a line for each; return the exit status."""
    known = {fault.name: fault for fault in table}
    parser = argparse.ArgumentParser(
        description="Plant faults, and look whether the tests see them."
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="the faults to plant (default: all)"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the names and the laws, and run nothing"
    )
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    faults = [known[name] for name in given.names] or list(table)
    if given.list:
        print("\n".join(f"{fault.name}: {fault.law}" for fault in faults))
        return 0
    if output := sound(faults):
        print(f"ERROR: these tests must pass on unchanged code:\n{output[-4000:]}")
        return 1
    return report(faults)


def report(faults: Sequence[Fault]) -> int:
    """Try each fault, print how it ended, and return 0 where all were caught."""
    caught = 0
    for fault in faults:
        began = time.perf_counter()
        how = try_one(fault)
        caught += how == "caught"
        print(
            f"{time.perf_counter() - began:5.1f} s  {fault.name:24} {fault.law}: {how}", flush=True
        )
    print(f"{caught} of {len(faults)} faults caught")
    return 0 if caught == len(faults) else 1


FAULTS = (
    # -- engine
    Fault(
        "reduce-order",
        "gradients are added in replica order",
        "enumerate(parts[1:], start=1)",
        "enumerate(parts[:0:-1], start=1)",
        (
            "tests/engine/plain/test_verbs.py::test_reduce_adds_in_replica_order_and_spares_its_inputs",
        ),
    ),
    Fault(
        "blocking-launches",
        "NCCL over several GPUs is refused where launches block, because it would hang",
        "distinct and blocks and _has_nccl()",
        "False",
        (
            "tests/engine/fast/test_collectives.py::test_blocking_launches_are_refused_on_distinct_gpus",
        ),
    ),
    Fault(
        "buffers",
        "every step starts from replica 0's buffers on all replicas",
        "buffers = copies_of(cache.buffers, self._devices[:count], self._mark)",
        'buffers = self.__dict__.setdefault("_kept", copies_of(cache.buffers, self._devices,'
        " self._mark))",
        (
            "tests/engine/law/test_named_changes.py::test_every_step_begins_with_replica_0s_buffers_on_every_replica",
        ),
    ),
    Fault(
        "identity-memory",
        "data that is assigned between steps is seen",
        "not all(map(torch.Tensor.is_set_to, self._parameters, self._memory))",
        "False",
        (
            "tests/engine/law/test_named_changes.py::test_data_that_is_assigned_is_seen_with_and_without_sync",
        ),
    ),
    Fault(
        "identity-flags",
        "parameters that are frozen or thawed between steps are seen",
        "list(map(_requires_grad, self._parameters)) != self._wanted",
        "False",
        ("tests/engine/law/test_named_changes.py::test_freezing_and_unfreezing_are_seen",),
    ),
    Fault(
        "identity-hooks",
        "hooks that are registered between steps see the whole gradient once",
        "watching = bool(self._hooks)",
        "watching = False",
        (
            "tests/engine/law/test_named_changes.py::test_hooks_on_parameters_see_the_reduced_gradient_once",
        ),
    ),
    Fault(
        "hook-root",
        "a hook on several gradients is called when only one of them is left",
        "hooked.append((empty, empty.detach()))",
        "pass",
        (
            "tests/engine/law/test_noticed_changes.py::"
            "test_a_hook_on_several_gradients_of_which_one_is_left_is_called",
        ),
    ),
    Fault(
        "hooks-muted",
        "hooks on parameters are back after a step that failed",
        "            self._removed.restore()\n"
        "            set_gradients(self._parameters, self._before)",
        "            set_gradients(self._parameters, self._before)",
        ("tests/engine/law/test_named_changes.py::test_hooks_are_back_after_a_step_that_failed",),
    ),
    Fault(
        "hooks-of-nodes",
        "hooks on the nodes that accumulate gradients see the reduced gradient once",
        "any(self._of_nodes)",
        "False",
        (
            "tests/engine/law/test_noticed_changes.py::test_hooks_on_nodes_see_the_reduced_gradients_once",
        ),
    ),
    Fault(
        "default-notices",
        "the default schedule copies the weights in every step",
        "range(1, count)",
        "()",
        ("tests/engine/law/test_noticed_changes.py::test_the_default_schedule_needs_no_sync",),
        where="engine.fast.local.Local._replicas",
    ),
    Fault(
        "writes-in-forward",
        "weights that forward writes are those of replica 0",
        "self._weights.versions() != self._same_at or self._uncounted()",
        "self._uncounted()",
        (
            "tests/engine/law/test_noticed_changes.py::test_weights_that_forward_writes_are_those_of_replica_0",
        ),
    ),
    Fault(
        "scheduler-wrapper",
        "a step that is wrapped after a scheduler acts on the whole gradient",
        "not _only_counts(step, type(optimizer))",
        'not getattr(step, "_wrapped_by_lr_sched", False)',
        (
            "tests/engine/law/test_noticed_changes.py::test_a_step_wrapped_around_a_schedulers_acts_on_the_whole_gradient",
        ),
    ),
    Fault(
        "shared-memory",
        "memory that the module itself shares stays shared",
        "not recomputed",
        "False",
        (
            "tests/engine/law/test_noticed_changes.py::test_memory_that_the_module_itself_shares_stays_shared_or_is_refused",
        ),
    ),
    Fault(
        "equal-attributes",
        "an equal attribute is still another object",
        "type(value) is type(other) and type(value) in (int, str) and value == other",
        "type(value) is type(other) and bool(value == other)",
        (
            "tests/engine/law/test_noticed_changes.py::test_an_equal_attribute_is_still_another_object",
        ),
    ),
    Fault(
        "hooks-of-forward",
        "a hook that forward registers on its own weight is for one step",
        "if weight._backward_hooks:\n    weight._backward_hooks.clear()",
        "if False:\n    weight._backward_hooks.clear()",
        (
            "tests/engine/law/test_noticed_changes.py::test_a_replica_lists_no_parameters_and_its_own_hooks_are_for_one_step",
        ),
    ),
    Fault(
        "weights-moved-by-forward",
        "a weight that forward moves to other memory is trained in its own",
        "weight.data = own",
        "pass",
        (
            "tests/engine/fast/test_schedules_state.py::test_weights_that_forward_moves_are_trained_on_every_schedule",
        ),
    ),
    Fault(
        "copies-per-thread",
        "each thread that calls a wrapper has its own copies",
        "threading.local",
        "object",
        (
            "tests/engine/law/test_noticed_changes.py::test_threads_that_call_one_wrapper_get_their_own_rows",
        ),
        where="engine.fast.cached.CachedReplicas",
    ),
    Fault(
        "identity-groups",
        "a group that is added to the optimizer is stepped",
        """(
            is_watched(self._optimizer) != self.watched
            or len(groups) != len(self._groups)
            or not all(
                same(group["params"], before)
                for group, before in zip(groups, self._groups, strict=True)
            )
        )""",
        "is_watched(self._optimizer) != self.watched",
        ("tests/engine/law/test_named_changes.py::test_a_group_that_is_added_is_stepped",),
    ),
    Fault(
        "early-error",
        "a device that fails early stops no other device in the same stage",
        "meeting.goes_on(i)",
        "meeting.goes_on(i) and not team.errors",
        (
            "tests/engine/plain/test_autograd.py::test_a_device_that_fails_early_stops_no_other_device_in_the_same_stage",
        ),
    ),
    Fault(
        "one-by-one",
        "an update in one thread sends each device's share to the others",
        "run_on_devices(update.copy, self._devices, ONE_BY_ONE)",
        "pass",
        (
            "tests/engine/fast/test_schedules.py::test_an_update_in_one_thread_makes_the_weights_of_one_in_several",
        ),
    ),
    Fault(
        "turn-patience",
        "replicas that wait for each other in forward do not also wait for their turns",
        "self._ended[i - 1].wait(PATIENCE_S)",
        "self._ended[i - 1].wait()",
        (
            "tests/engine/fast/test_turns.py::test_replicas_that_wait_for_each_other_in_forward_are_not_kept_waiting",
        ),
    ),
    Fault(
        "hooks-owned",
        "hooks that forward adds are those of its replica",
        "attributes[name] = attributes[name].copy()",
        "pass",
        (
            "tests/engine/law/test_forward_writes.py::test_hooks_that_forward_adds_are_those_of_its_replica",
        ),
    ),
    Fault(
        "shared-turns",
        "forwards that share what they write run one after another",
        "InOrder(len(replicas)) if turns else None",
        "None",
        (
            "tests/engine/law/test_forward_writes.py::test_forwards_that_share_what_they_write_read_their_own",
        ),
    ),
    Fault(
        "shared-later",
        "forwards that begin to share later are refused once",
        "change.tensor",
        "False",
        (
            "tests/engine/law/test_forward_writes.py::test_forwards_that_begin_to_share_later_are_refused_once",
        ),
        where="engine.writes._refuse",
    ),
    Fault(
        "lost-writes",
        "the first write that is lost is named",
        "seen.lost = seen.lost or owned.written()",
        "pass",
        ("tests/engine/law/test_forward_writes.py::test_the_first_write_that_is_lost_is_named",),
    ),
    Fault(
        "turn-choice",
        "forwards run in turns only where this is faster",
        "median(in_turns) < median(free)",
        "median(in_turns) > median(free)",
        (
            "tests/engine/fast/test_turns.py::test_the_faster_kind_of_run_is_taken_once_both_were_tried",
        ),
    ),
    Fault(
        "first-use",
        "threads that are the first to dispatch an operator to Python do not crash the process",
        "load_operators()",
        "pass",
        (
            "tests/hardware/test_emulated.py::test_the_first_use_of_an_operator_in_several_threads_does_not_crash",
        ),
        where="engine.settings",
    ),
    Fault(
        "soft-targets",
        "a mean over class probabilities counts every place once",
        "return output.numel() // output.shape[1]",
        "return output.shape[0]",
        (
            "tests/engine/fast/test_losses.py::test_soft_targets_are_counted_once_per_place_whatever_their_weights",
        ),
    ),
    Fault(
        "target-rows",
        "a target with other rows than the inputs is not cut",
        "not _same_rows(inputs, target)",
        "False",
        (
            "tests/engine/law/test_ordinary_code.py::test_ordinary_training_code_trains_as_in_a_plain_loop",
        ),
    ),
    Fault(
        "gradients-dtype",
        "gradients have the dtype that the parameter asks for",
        "HAS_GRAD_DTYPE and any(p.grad_dtype != p.dtype for p in trained(training.module))",
        "False",
        (
            "tests/engine/law/test_ordinary_code.py::test_a_grad_dtype_that_is_set_between_steps_is_seen",
        ),
    ),
    Fault(
        "row-weights",
        "a weight per row is not broadcast over the rows of one replica",
        "all(weight.dim() < output.dim() or weight.size(0) == 1 for weight in self.weights)",
        "True",
        (
            "tests/engine/law/test_ordinary_code.py::test_ordinary_training_code_trains_as_in_a_plain_loop",
        ),
    ),
    Fault(
        "post-init",
        "no constructor of a dataclass runs again on its pieces",
        """
        for name, part in zip(keys_of(value) or (), parts, strict=True):
            object.__setattr__(new, name, part)
        """,
        """
        for name, part in zip(keys_of(value) or (), parts, strict=True):
            object.__setattr__(new, name, part)
        getattr(new, "__post_init__", int)()
        """,
        (
            "tests/engine/plain/test_scatter_gather.py::test_pieces_of_a_dataclass_instance_are_copies_whose_constructor_does_not_run",
        ),
    ),
    Fault(
        "checkpointed-dropout",
        "a checkpoint repeats forward with the same random numbers",
        "saved is not None",
        "saved is None",
        (
            "tests/engine/law/test_ordinary_code.py::test_dropout_inside_a_checkpoint_of_concurrent_replicas_is_refused",
        ),
    ),
    Fault(
        "denormals",
        "denormal numbers are flushed in all replicas or in none",
        "_flushes_denormals() != flushes",
        "False",
        (
            "tests/engine/law/test_ordinary_code.py::test_denormal_numbers_are_flushed_in_all_replicas_or_in_none",
        ),
    ),
    Fault(
        "cached-weights",
        "replicas do not share the cached weight of one of them",
        "parametrize._cache_enabled",
        "False",
        (
            "tests/engine/law/test_ordinary_code.py::test_cached_parametrizations_are_refused_because_replicas_would_share_them",
        ),
    ),
    Fault(
        "needless-refusal",
        "a schedule that was asked for by name refuses nothing that it can train",
        'kind == "cpu" and any(p.untyped_storage().nbytes() != p.nbytes for p in wanted)',
        'kind == "cpu"',
        ("tests/engine/law/test_rare_actions.py::test_autocast_gives_the_bits_of_reference",),
    ),
    Fault(
        "clock-anchor",
        "a clock's anchor is the middle of the time that reading it takes",
        "anchors.append((event, (before + self._now()) / 2))",
        "anchors.append((event, self._now()))",
        ("tests/measure/test_clocks.py",),
    ),
    Fault(
        "busy-time",
        "joint spans share a thread's CPU time",
        "(cpu_s - at_s) / len(spans)",
        "(cpu_s - at_s)",
        ("tests/measure/test_clocks.py",),
    ),
    Fault(
        "trial-samples",
        "a trial has the host's samples of its timed steps alone",
        "start_s, end_s = trial.window",
        "start_s, end_s = trial.window[0], trial.window[1] + 1.0",
        (
            "tests/analysis/test_sampled.py::test_gpus_are_sampled_over_the_whole_trial_and_the_host_while_steps_are_timed",
        ),
    ),
    Fault(
        "resume",
        "a resumed run does not repeat what is done",
        "pending = [case for case in wanted if (case.fingerprint, number) not in self.done]",
        "pending = list(wanted)",
        (
            "tests/measure/test_run.py::test_an_interrupted_run_goes_on_where_it_was_in_the_same_order",
        ),
    ),
    Fault(
        "budget",
        "the budget counts everything from the start of the run",
        "began_s + (math.inf if how.budget_s is None else how.budget_s)",
        "began_s + (math.inf if budget_s is None else budget_s + 20)",
        ("tests/measure/test_run.py::test_the_check_of_a_model_is_part_of_the_budget",),
    ),
    Fault(
        "tolerance",
        "gradients that are 1 % off are refused",
        'TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 5e-2, "fp16": 1e-2}',
        'TOLERANCE = {"fp32": 1e-1, "tf32": 1e-2, "bf16": 5e-2, "fp16": 1e-2}',
        ("tests/measure/test_verification.py",),
    ),
    Fault(
        "unverified",
        "a strategy with wrong gradients is not timed",
        "verdict.verified is Verified.NO",
        "verdict is None",
        ("tests/strategies/test_strategies.py::test_wrong_gradients_are_refused_and_never_timed",),
        where="measure.worker.trial._verify",
    ),
    Fault(
        "collector",
        "a worker leaves frozen what its server has frozen",
        "freezes = not frozen()",
        "freezes = True",
        (
            "tests/measure/test_bench.py::test_a_trial_leaves_to_the_collector_what_it_had_and_no_more",
        ),
    ),
    Fault(
        "memory-by-phase",
        "a peak is credited to every open phase",
        "{WHOLE, *(phase.value for phase in self._open)}",
        "{WHOLE, *(phase.value for phase in self._open[:1])}",
        ("tests/measure/test_memory.py::test_a_peak_is_of_the_phase_that_is_open_on_any_device",),
    ),
    Fault(
        "loopback",
        "ranks listen on the loopback interface alone",
        'any(one.family == socket.AF_INET and one.address == "127.0.0.1" for one in addresses)',
        "addresses",
        ("tests/measure/test_ranks.py::test_the_loopback_interface_is_found_by_its_address",),
    ),
    Fault(
        "out-of-memory",
        "lack of memory is classified as such",
        "isinstance(error, torch.OutOfMemoryError | MemoryError)",
        "isinstance(error, MemoryError)",
        ("tests/measure/test_ranks.py::test_lack_of_memory_and_lost_peers_are_told_apart_by_type",),
    ),
    # -- nothing lost
    Fault(
        "summary-damage",
        "a damaged summary is computed again from the rows",
        "StoredLedger(decoded) if decoded.version == VERSION and _consistent(decoded) else None",
        "StoredLedger(decoded) if decoded.version == VERSION else None",
        (
            "tests/store/test_summaries.py::test_a_summary_that_contradicts_itself_is_computed_from_the_rows",
        ),
    ),
    Fault(
        "old-columns",
        "a store whose older schema has more columns is merged",
        "return [name for name in rows.columns_of(source, table) if name in target_columns]",
        "return rows.columns_of(source, table)",
        ("tests/cli/test_managing.py::test_a_store_with_checksums_is_written_and_merged",),
    ),
    Fault(
        "unknown-default",
        "an unknown key in a file of defaults is an error",
        '_refuse_unknown(of_command, f"{file}: [{name}]", [*options])',
        '_refuse_unknown({}, f"{file}: [{name}]", [*options])',
        (
            "tests/cli/test_options.py::test_a_wrong_entry_is_an_error_that_names_file_and_key_and_starts_nothing",
        ),
    ),
    Fault(
        "dropped-locks",
        "a process that ends does not merge the log of a store into which another process writes",
        "if size == 1:\n    raise _another_kind(path)",
        'path.open("rb").close()\nif size == 1:\n    raise _another_kind(path)',
        (
            "tests/store/test_processes.py::test_a_process_that_ends_leaves_the_log_of_a_running_writer_alone",
        ),
    ),
    Fault(
        "opened-store",
        "Python never opens the file of a store",
        "if size == 1:\n    raise _another_kind(path)",
        'path.open("rb").close()\nif size == 1:\n    raise _another_kind(path)',
        ("tests/store/test_processes.py::test_python_never_opens_the_file_of_a_store",),
    ),
    Fault(
        "shared-store",
        "processes that share a store, and are killed at random, lose nothing",
        "if size == 1:\n    raise _another_kind(path)",
        'path.open("rb").close()\nif size == 1:\n    raise _another_kind(path)',
        (
            "tests/store/test_damaged.py::test_processes_that_share_a_store_and_are_killed_lose_nothing",
        ),
    ),
    Fault(
        "read-snapshot",
        "a run that another process removes while it is read is read whole",
        '    db.execute("BEGIN")\n',
        "    pass\n",
        (
            "tests/store/test_processes.py::test_a_run_that_is_removed_while_it_is_read_is_read_whole",
        ),
    ),
    Fault(
        "run-index",
        "naming a run costs the same in a store of many runs",
        '"run(started)"',
        '"run(pid)"',
        (
            "tests/store/test_many_runs.py::test_a_command_does_the_same_work_in_a_store_of_many_runs",
        ),
    ),
    Fault(
        "past-runs",
        "a report reads the last runs of its cases, and not all",
        "len(runs) < PAST",
        "True",
        ("tests/store/test_many_runs.py::test_a_report_reads_the_last_runs_of_its_cases",),
    ),
    Fault(
        "series-limit",
        "a stored series is decompressed as far as its row states",
        "stream.decompress(blob, n * values.itemsize + 1)",
        "stream.decompress(blob)",
        ("tests/store/test_damaged.py::test_a_series_is_decompressed_as_far_as_its_row_states",),
    ),
    Fault(
        "odd-answer",
        "a reading that raises an unforeseen error is unknown, and ends nothing",
        'note(name, f"{type(error).__name__}: {error}")',
        "raise",
        (
            "tests/hardware/test_readings.py::test_a_name_that_is_no_text_leaves_everything_else_known_and_is_noted_once",
        ),
    ),
    Fault(
        "fact-types",
        "a trial whose facts are of wrong types is left out and counted",
        "_ = trial.facts",
        "pass",
        ("tests/store/test_damaged.py::test_a_trial_of_wrong_types_is_left_out_and_counted",),
    ),
    Fault(
        "other-version-answer",
        "an answer recommends no schedule that only another version has",
        "schedule.available(row.case.schedule)",
        "True",
        (
            "tests/store/test_other_schedules.py::test_the_answer_recommends_a_schedule_that_can_run",
        ),
        where="analysis.decision.Question.candidates",
    ),
    Fault(
        "unknown-schedule",
        "a run with the schedule of another version is shown",
        "ValueError",
        "KeyError",
        ("tests/store/test_damaged.py::test_names_that_only_another_version_knows_are_shown",),
        where="records.schedule.known",
    ),
    Fault(
        "earlier-allreduce",
        "allreduce of an earlier version is not the schedule that has this name today",
        'schema < 3 and case.schedule == "allreduce"',
        "False",
        (
            "tests/store/test_other_schedules.py::test_a_store_gives_the_earlier_one_another_name_on_every_way_of_reading",
        ),
    ),
    Fault(
        "export-without-schema",
        "an export that states no schema is of an earlier version",
        "    schema: int = 2\n",
        "    schema: int = 3\n",
        (
            "tests/store/test_other_schedules.py::test_an_export_keeps_the_two_apart_and_one_without_a_schema_is_of_an_earlier_version",
        ),
    ),
    Fault(
        "begun-without-schema",
        "a trial that an earlier version began, without a schema, is its own",
        "in_schema(stored, schema or 0)",
        "in_schema(stored, schema or 3)",
        (
            "tests/store/test_other_schedules.py::test_a_trial_that_was_begun_has_the_name_of_its_version",
        ),
    ),
    Fault(
        "hot-journal",
        "a process that is killed in a transaction does not lock out the next one",
        "                _roll_back(path)\n                continue\n",
        "                raise\n",
        (
            "tests/store/test_processes.py::test_a_process_killed_within_a_rollback_journal_does_not_lock_out_the_next",
        ),
    ),
    Fault(
        "replaced-store",
        "a store that is deleted or replaced during a run is noticed",
        "now is None or now.is_other(left)",
        "False",
        (
            "tests/store/test_damaged.py::test_a_store_that_is_lost_while_a_worker_runs_is_noticed_and_its_trials_are_kept",
        ),
    ),
    Fault(
        "overwritten-store",
        "a store that is overwritten during a run is noticed",
        "left is not None and now != left",
        "left is not None and (now is None or now.is_other(left))",
        (
            "tests/store/test_damaged.py::test_a_store_that_is_lost_while_a_worker_runs_is_noticed_and_its_trials_are_kept",
        ),
    ),
    Fault(
        "read-back",
        "a trial counts when it has been read back from the file",
        "not self._has_trials()",
        "False",
        (
            "tests/store/test_damaged.py::test_a_store_that_is_overwritten_while_a_trial_is_stored_is_noticed_by_reading_it_back",
        ),
    ),
    Fault(
        "folded-lost",
        "what another program has written over a store stays as it is",
        "self._writes and not self._db.lost",
        "self._writes",
        (
            "tests/store/test_damaged.py::test_a_store_that_is_lost_while_a_worker_runs_is_noticed_and_its_trials_are_kept",
        ),
    ),
    Fault(
        "id-as-path",
        "an id that is not of our form is no path",
        "_ID.fullmatch(stored)",
        "True",
        (
            "tests/store/test_foreign.py::test_a_run_whose_id_is_not_of_our_form_is_unreadable_and_nothing_outside_is_touched",
        ),
    ),
    Fault(
        "id-outside",
        "no id leads out of the folder of the runs",
        'name in ("", ".", "..") or "/" in name or "\\0" in name',
        "False",
        ("tests/store/test_foreign.py::test_no_id_becomes_a_path_outside_the_folder_of_the_runs",),
    ),
    Fault(
        "foreign-view",
        "a store with a view or a trigger is refused",
        "    _refuse_computed(path, db)\n",
        "    pass\n",
        (
            "tests/store/test_foreign.py::test_a_store_with_more_than_plain_tables_is_refused_by_name",
        ),
    ),
    Fault(
        "forked-lock",
        "a forked child that lives on holds no lock",
        "os.register_at_fork(after_in_child=_close_all)\n",
        "pass\n",
        (
            "tests/records/test_locks.py::test_a_forked_child_that_lives_on_neither_holds_nor_deletes_the_lock",
        ),
    ),
    Fault(
        "dropped-signal",
        "a signal ends a command also if Python drops its exception",
        "_State.number and threading.current_thread() is threading.main_thread()",
        "_State.number < 0",
        ("tests/records/test_signals.py::test_a_signal_that_python_drops_ends_the_next_wait",),
    ),
    Fault(
        "swept-by-name",
        "the folder of a living process is never removed",
        "fcntl.flock(descriptor, kind | fcntl.LOCK_NB)",
        "os.fstat(descriptor)",
        (
            "tests/records/test_signals.py::test_folders_of_killed_processes_are_removed_by_their_lock",
        ),
    ),
    Fault(
        "orphan",
        "processes that a worker leaves behind in sessions of their own are ended",
        "_prctl(_PR_SET_CHILD_SUBREAPER, 1)",
        "_prctl(_PR_SET_CHILD_SUBREAPER, 0)",
        (
            "tests/records/test_signals.py::test_processes_of_a_worker_in_sessions_of_their_own_are_ended",
        ),
    ),
    # -- launches
    Fault(
        "clock-of-another-machine",
        "times of another machine are shifted to rank 0's clock",
        "shifted(answers[rank].trials[0], -offsets[rank].seconds)",
        "shifted(answers[rank].trials[0], offsets[rank].seconds)",
        (
            "tests/measure/test_cluster.py::test_a_trial_over_two_machines_has_one_clock_and_the_facts_of_both",
        ),
    ),
    Fault(
        "offset-drift",
        "the error of a clock's offset covers the drift between two measurements",
        "max(self.error_s, later.error_s) + abs(later.seconds - self.seconds) / 2",
        "max(self.error_s, later.error_s)",
        ("tests/measure/test_cluster.py::test_the_error_of_a_clocks_offset_covers_its_drift",),
    ),
    Fault(
        "busiest-machine",
        "the load of the busiest machine counts",
        "load = max(loads, key=lambda one: one.taken, default=None)",
        "load = min(loads, key=lambda one: one.taken, default=None)",
        (
            "tests/measure/test_cluster.py::test_a_trial_over_two_machines_has_one_clock_and_the_facts_of_both",
        ),
    ),
    Fault(
        "barrier-spread",
        "the error of a clock's offset is the longest wait of both ranks in a barrier",
        "max(here.waited_s, there.waited_s)",
        "min(here.waited_s, there.waited_s)",
        (
            "tests/measure/test_cluster.py::test_the_offset_of_a_clock_is_never_wrong_by_more_than_its_error",
        ),
    ),
    Fault(
        "time-to-join",
        "a trial may take longer than the ranks may take to join",
        "dist.new_group(timeout=PATIENCE)",
        "dist.new_group(timeout=JOIN)",
        (
            "tests/measure/test_launch.py::test_a_task_may_outlast_the_time_to_join_and_a_lost_rank_is_named",
        ),
    ),
    Fault(
        "lost-rank",
        "the failure of a rank whose process has ended is the cause of the others",
        "rank in lost.ranks",
        "rank not in lost.ranks",
        (
            "tests/measure/test_launch.py::test_a_task_may_outlast_the_time_to_join_and_a_lost_rank_is_named",
        ),
    ),
    Fault(
        "closed-connection",
        "a rank whose connection closes between two cases is named",
        '[int(number) for number in missing[1].split(",")] if missing else self._ended()',
        '[int(number) for number in missing[1].split(",")] if missing else []',
        (
            "tests/measure/test_launch.py::test_a_task_may_outlast_the_time_to_join_and_a_lost_rank_is_named",
        ),
    ),
    Fault(
        "first-node",
        "the tasks of srun meet on the first node of the step",
        r"""re.sub(r"\[(\d+)[^]]*\]", r"\1", environ["SLURM_STEP_NODELIST"])""",
        """environ["SLURM_STEP_NODELIST"]""",
        ("tests/measure/test_cluster.py::test_the_tasks_of_srun_meet_on_the_first_node",),
    ),
    Fault(
        "slow-machine",
        "a machine is called slow on the evidence of an interval only",
        "return not self.ratio.doubt and self.ratio.low > SLOW",
        "return self.ratio.value > SLOW",
        ("tests/measure/test_cluster.py::test_no_machine_is_called_slow_without_evidence",),
    ),
    Fault(
        "one-machine",
        "hosts on one machine are labelled COLOCATED",
        "len({*machines}) < len(machines)",
        "False",
        ("tests/measure/test_cluster.py::test_hosts_on_one_machine_are_labelled_colocated",),
    ),
    Fault(
        "fake-label",
        "the facts of a stored run on fake GPUs label its trials FAKE-GPU",
        "stated(fake_gpus=True) if found and _says_fake(found[0]) else {}",
        "{}",
        (
            "tests/records/test_fake.py::test_the_facts_of_a_stored_run_label_its_trials",
            "tests/records/test_fake.py::test_every_export_carries_the_label",
        ),
    ),
    Fault(
        "fake-decision",
        "a run on fake GPUs decides nothing",
        "any(row.on_fake_gpus for row in question.rows)",
        "False",
        ("tests/records/test_fake.py::test_a_run_on_fake_gpus_is_no_answer_and_says_why",),
    ),
    Fault(
        "fake-comparison",
        "fake GPUs are compared with no real devices",
        "any(one.name == FAKES and one.forbids for one in found.differing)",
        "False",
        ("tests/records/test_fake.py::test_a_comparison_of_fake_with_real_gpus_is_refused",),
    ),
    Fault(
        "environment-key",
        "a run is not resumed in another environment",
        "dict.fromkeys(Environment.of(one).key for one in machines)",
        "()",
        ("tests/measure/test_run.py::test_trials_of_another_environment_are_never_added_to_a_run",),
    ),
    Fault(
        "environment-unknown",
        "a fact that only one of two runs recorded forbids nothing",
        'known and one.metadata["forbids"]',
        'one.metadata["forbids"]',
        (
            "tests/records/test_environment.py::test_a_fact_that_is_unknown_in_one_of_them_is_told_and_forbids_nothing",
        ),
    ),
    Fault(
        "merged-end",
        "an older copy that ended later leaves a finished run finished",
        "_is_newer(source, target, run_id)",
        "True",
        (
            "tests/cli/test_managing.py::test_an_older_copy_that_ended_later_leaves_a_finished_run_finished",
        ),
    ),
    Fault(
        "cores-of-gpus",
        "only logical CPU devices take turns on cores",
        'not cores or case.device_kind != "cpu"',
        'not cores or case.device_kind == "emulated"',
        (
            "tests/analysis/test_validity.py::test_each_logical_cpu_device_needs_a_core_and_other_devices_need_none",
            "tests/analysis/test_findings.py::test_gpus_are_not_oversubscribed_by_cores",
        ),
    ),
    Fault(
        "spent-budget",
        "a budget is not too short after the last trial",
        "not trials or needed_s <= self.left_s",
        "needed_s <= self.left_s",
        ("tests/measure/test_budget.py::test_a_budget_that_cannot_hold_the_trials_says_so",),
    ),
    Fault(
        "slow-ranks",
        "the probe leaves out all-reduces whose ranks are too slow",
        'raise NoResult(f"the ranks did not {late}: {_stages(folder, ranks)}")',
        "raise TimeoutError(late)",
        ("tests/doctor/test_probe.py::test_ranks_that_are_slow_are_no_result",),
    ),
    Fault(
        "probe-budget",
        "the budget of a probe holds all passes on four GPUs",
        "BUDGET_S = 120.0",
        "BUDGET_S = 58.0",
        ("tests/doctor/test_probe.py::test_no_pass_begins_after_the_budget",),
        where="doctor.probe",
    ),
    # -- runs
    Fault(
        "run-name",
        "a run with another name or other tags is another run",
        "not (self.name or self.tags)",
        "True",
        (
            "tests/cli/test_managing.py::test_a_name_and_tags_are_part_of_what_is_resumed_and_a_run_without_them_has_the_plain_plan",
        ),
    ),
    Fault(
        "run-ambiguous",
        "a name that several runs have is not one of them",
        "len(runs) > 1",
        "False",
        (
            "tests/cli/test_managing.py::test_an_unknown_and_an_ambiguous_run_are_errors_with_the_way_out",
        ),
        where="api.stored.choose",
    ),
    Fault(
        "run-measured",
        "a run that is being measured is not removed",
        "locks.holder(_file(store, run_id))",
        "''",
        (
            "tests/cli/test_managing.py::test_a_run_that_is_measured_now_is_neither_removed_nor_merged",
        ),
    ),
    Fault(
        "merge-twice",
        "a second merge copies nothing",
        "started not in here.get(slot, {})",
        "True",
        (
            "tests/cli/test_managing.py::test_merge_copies_every_bit_and_a_second_time_nothing",
            "tests/cli/test_managing.py::test_a_copy_that_was_continued_gives_its_trials_and_its_end",
        ),
    ),
    Fault(
        "merge-apart",
        "copies of a run that were continued apart are not mixed",
        "both not in (here[slot].keys(), there[slot].keys())",
        "False",
        ("tests/cli/test_managing.py::test_copies_that_were_continued_apart_are_not_mixed",),
    ),
    Fault(
        "plan-host",
        "a time is expected from trials of this machine only",
        """query = (
            "SELECT trial.id FROM trial CROSS JOIN run ON run.id=run_id "
            "WHERE fingerprint=? AND trial.status=? AND host=? "
            f"ORDER BY trial.id DESC LIMIT {EARLIER}"
        )""",
        """query = (
            "SELECT trial.id FROM trial CROSS JOIN run ON run.id=run_id "
            "WHERE fingerprint=? AND trial.status=? AND host>=? "
            f"ORDER BY trial.id DESC LIMIT {EARLIER}"
        )""",
        (
            "tests/cli/test_shapes.py::test_the_expected_time_is_that_of_earlier_trials_of_this_machine_only",
        ),
    ),
    Fault(
        "config-command",
        "the stored command of a run with defaults from a file repeats it without the file",
        'selected.command("--store", str(store), config=False) if given else ""',
        '""',
        ("tests/cli/test_options.py::test_the_stored_command_repeats_the_run_without_the_file",),
    ),
    # -- GPUs
    Fault(
        "device-clock",
        "steps of GPUs have times of the host, as the host's spans do",
        "return [first_s + seconds * stretch for seconds in raw]",
        "return [seconds * stretch for seconds in raw]",
        ("tests/simulated/test_loader.py",),
    ),
    Fault(
        "peer-copies",
        "copies between GPUs do not count as busy time of the GPU that sends",
        "Kind.COMMUNICATION if _COMMUNICATION.match(name) else Kind.COPY",
        "Kind.COPY",
        (
            "tests/simulated/test_report.py::test_busy_times_and_their_imbalance_are_the_true_ones[four]",
            "tests/observe/test_imported_profiled.py::test_busy_times_of_real_traces_are_the_counted_microseconds",
        ),
    ),
    Fault(
        "collectives",
        "the time of NCCL's kernels is recorded apart from the busy time",
        "return {KERNELS: self.kernels_s} | (found if self.communication_s else {})",
        "return {KERNELS: self.kernels_s}",
        (
            "tests/simulated/test_report.py::test_busy_times_and_their_imbalance_are_the_true_ones[four]",
        ),
    ),
    Fault(
        "older-float32",
        "the formats of float32 products are read where torch's older setting raises",
        "backends.cuda.matmul.fp32_precision",
        "TF32 if backends.cuda.matmul.allow_tf32 else IEEE",
        (
            "tests/hardware/test_float32.py::test_products_are_read_and_set_in_every_order_of_both_settings",
        ),
        where="hardware.devices.float32",
    ),
    Fault(
        "fp32-convolutions",
        "a precision says so if convolutions use another format than it names",
        "sum(one != named for one in formats)",
        "products.matmul != named",
        ("tests/hardware/test_float32.py::test_a_precision_says_what_the_products_really_use",),
    ),
    Fault(
        "watch-raises",
        "an error of dpbench's own code ends the recording, not the user's script",
        "self.active = False\nself.open.clear()\nnumber = len(self.ends)",
        "raise error",
        ("tests/observe/test_watching_safety.py",),
    ),
    Fault(
        "profiler-warm-up",
        "the step that warms the profiler up is not in the profile",
        "torch.profiler.schedule(wait=0, warmup=1, active=count, repeat=1)",
        "None",
        (
            "tests/observe/test_imported_profiled.py::"
            "test_the_profiled_steps_follow_one_that_warms_the_profiler_up",
        ),
    ),
    Fault(
        "lost-kernels",
        "a profile that lacks a kernel is withheld",
        "sum(launches_kernels(call.name) for id, call in calls.items() if id not in launched)",
        "0",
        (
            "tests/observe/test_imported_profiled.py::test_a_profile_with_lost_or_wrong_records_is_withheld",
        ),
    ),
    Fault(
        "by-time",
        "a kernel belongs to the step that launched it, whatever its own time",
        "launches.get(one.id, _Range(start_s, end_s))",
        "_Range(start_s, end_s)",
        (
            "tests/observe/test_imported_profiled.py::test_one_kernel_that_begins_before_its_launch_withholds_nothing",
        ),
    ),
    Fault(
        "gpu-clock",
        "the clock of a GPU that is off the host's is corrected",
        "min(max(0.0, least_s), most_s)",
        "0.0",
        (
            "tests/observe/test_imported_profiled.py::test_a_copy_without_a_launch_is_placed_by_the_corrected_clock",
        ),
    ),
    Fault(
        "nameless-launches",
        "a call that Kineto links to an operator launches kernels, whatever its name is",
        "one.linked_correlation_id() > 0",
        "one.linked_correlation_id() < 0",
        (
            "tests/observe/test_imported_profiled.py::test_a_launch_of_any_name_is_found_by_its_link_to_an_operator",
        ),
    ),
    Fault(
        "sender-lanes",
        "a phase is also open on a GPU that sends",
        "destination.at_work(sources)",
        "[destination.index]",
        (
            "tests/engine/plain/test_train_step.py::test_devices_that_send_are_marked_with_the_one_that_receives",
        ),
    ),
    Fault(
        "uneven-kernels",
        "profiled steps with different numbers of kernels are withheld",
        "any(one != other for one, other in pairwise(kernels))",
        "False",
        (
            "tests/observe/test_imported_profiled.py::test_a_profile_with_lost_or_wrong_records_is_withheld",
        ),
    ),
    Fault(
        "profiled-oom",
        "a profiled step that runs out of memory is no failure of the profiler",
        "torch.OutOfMemoryError",
        "ZeroDivisionError",
        ("tests/observe/test_imported_profiled.py::test_only_errors_of_the_profiler_are_caught",),
        where="measure.worker.profiling",
    ),
    Fault(
        "rank-without-profile",
        "no reduction comes from a profile if that of another rank is withheld",
        "any(part.facts.no_profile for part in parts)",
        "False",
        (
            "tests/observe/test_imported_profiled.py::test_a_rank_without_a_profile_withholds_the_reductions_of_all",
        ),
    ),
    Fault(
        "ddp-reduce",
        "the ranks of GPUs have a reduce phase",
        "if span.phase is Phase.REDUCE:\n    return []",
        "return []",
        ("tests/simulated/test_ranks.py",),
    ),
    Fault(
        "exposed-reduce",
        "of an all-reduce, the reduce phase has the part during which no kernel computes",
        "length(difference(communication, compute))",
        "length(communication)",
        ("tests/simulated/test_ranks.py",),
    ),
    Fault(
        "cuda-order",
        "measuring processes number GPUs as NVML does",
        "return {ORDER: PCI_ORDER, **os.environ, **own}",
        "return {**os.environ, **own}",
        (
            "tests/hardware/test_nvml.py::test_measuring_processes_number_gpus_as_nvml_does_unless_the_user_chose",
        ),
    ),
    Fault(
        "uuid",
        "the counters of a GPU are found by its UUID",
        'uuids and (len(visible) > 1 or any(gpu["uuid"].startswith("GPU-") for gpu in visible))',
        "False",
        ("tests/simulated/test_report.py::test_counters_of_every_gpu_are_its_own[four]",),
    ),
    Fault(
        "ties",
        "half a microsecond on a GPU's clock moves no time from one phase to another",
        "TIE_S = 5e-6",
        "TIE_S = 0.0",
        (
            "tests/records/test_ledger.py::test_rounded_clocks_do_not_move_time_from_one_phase_to_another",
        ),
    ),
    Fault(
        "late-ranks",
        "the reduce phase has no waits for ranks that are late in turn",
        "joined(_without_waits(parts))",
        "joined(parts)",
        ("tests/simulated/test_ranks.py",),
    ),
    Fault(
        "outlasting",
        "work for which the steps do not wait is labelled",
        "over_s = max(0.0, block.idle_s - times[-1] - (times[-1] - times[-2]))",
        "over_s = 0.0",
        ("tests/simulated/test_loader.py",),
    ),
    Fault(
        "one-way-link",
        "a link that is slow in one direction is named with the rate of this direction",
        "(copies.source, copies.target)",
        "(min(copies.source, copies.target), max(copies.source, copies.target))",
        ("tests/simulated/test_report.py::test_a_slow_link_is_found_and_named_with_its_true_rate",),
        where="analysis.transfers",
    ),
    Fault(
        "link-queue",
        "copies over a fast link are queued before the first of them begins",
        "cover()",
        "pass",
        (
            "tests/simulated/test_report.py::test_links_that_are_faster_than_the_host_queues_copies_have_their_true_rate",
        ),
        where="hardware.rates",
    ),
    Fault(
        "link-spans",
        "a copy beside another device's longer phase has its own seconds",
        "interval = _began(span, spans, tie_s), span.end_s",
        "interval = max([_began(span, spans, tie_s), *(s.end_s for s in spans if s is not span)])"
        ", span.end_s",
        (
            "tests/analysis/test_transfers.py::test_a_rate_counts_a_copy_whole_that_runs_beside_another_device",
        ),
    ),
    Fault(
        "two-for-a-multiply-add",
        "a multiplication and an addition are two operations",
        "[sum(counts.values()) / samples for counts in by_operator]",
        "[sum(counts.values()) / samples / 2 for counts in by_operator]",
        (
            "tests/measure/test_operations.py::test_those_of_mlp_are_those_of_its_three_products",
            "tests/measure/test_operations.py::test_those_of_resnet18_are_the_published_ones",
        ),
    ),
    Fault(
        "peak-of-the-format",
        "each part of a step has the peak of the format in which it computes",
        "(float32.convolution, convolutions)",
        "(float32.matmul, convolutions)",
        (
            "tests/analysis/test_peak.py::test_the_share_is_the_seconds_at_the_peaks_of_the_formats_over_the_step",
        ),
    ),
    Fault(
        "peak-of-one-gpu",
        "colocated replicas have one GPU, and its peak",
        'self.devices if self.placement == "spread" else 1',
        "self.devices",
        (
            "tests/analysis/test_peak.py::test_the_share_is_the_seconds_at_the_peaks_of_the_formats_over_the_step",
        ),
        where="records.case.Case.gpu_count",
    ),
    Fault(
        "impossible-share",
        "a share of peak above 100 % is not shown",
        "share if share and share.value <= 1 else None",
        "share",
        (
            "tests/analysis/test_peak.py::test_a_share_above_1_is_not_shown_but_stated_with_both_rates",
        ),
    ),
    Fault(
        "similar-gpu",
        "a GPU has the data sheet of its name and memory, and never that of a similar GPU",
        "all(map(SIZE.fullmatch, differing))",
        "_words(known) <= _words(name)",
        ("tests/records/test_data_sheets.py::test_a_gpu_that_looks_alike_has_no_sheet",),
    ),
    Fault(
        "memory-of-the-gpu",
        "of GPUs with equal names, the memory tells the data sheet",
        'LEAST_MEMORY <= memory_bytes / 2**30 / figures["memory_gib"] <= MOST_MEMORY',
        "memory_bytes >= 0",
        ("tests/records/test_data_sheets.py::test_a_gpu_that_looks_alike_has_no_sheet",),
    ),
    Fault(
        "autocast-of-its-own",
        "a model with an autocast of its own has no share of peak",
        'types.pop() if len(types) == 1 and not autocast.found else ""',
        'types.pop() if len(types) == 1 else ""',
        ("tests/measure/test_operations.py::test_several_types_of_factors_have_no_type_together",),
    ),
    Fault(
        "energy-of-all-gpus",
        "the energy of a sample is that of all GPUs of the case",
        "all(device in used for device in range(case.gpu_count))",
        "bool(used)",
        (
            "tests/analysis/test_sampled.py::test_without_the_counter_of_each_gpu_the_energy_is_unknown",
        ),
    ),
    Fault(
        "energy-between-steps",
        "the energy of a sample has none that GPUs used between the steps",
        "sum(trial.timed) < COVERED * (end_s - start_s)",
        "False",
        (
            "tests/analysis/test_sampled.py::test_steps_between_which_gpus_do_other_work_have_no_energy",
        ),
    ),
    Fault(
        "loss-by-chance",
        "a loss against perfect scaling is stated only if the rounds tell it",
        "lost.low <= 0",
        "False",
        (
            "tests/analysis/test_findings.py::test_a_loss_against_perfect_scaling_is_stated_if_the_rounds_tell_it",
        ),
    ),
    Fault(
        "slow-products",
        "products that would take too long at the rate of smaller ones are not timed",
        "operations / best > LONGEST_S",
        "False",
        ("tests/hardware/test_rates.py::test_products_that_would_take_too_long_are_left_out",),
    ),
    Fault(
        "any-two-machines",
        "a machine is slow only if chance does not make one of so many slow",
        "stats.joint_level(len(machines) * (len(machines) - 1))",
        "stats.joint_level(1)",
        ("tests/measure/test_cluster.py::test_of_many_equal_machines_none_is_called_slow",),
    ),
    Fault(
        "idle-is-launching",
        "a host that runs code without operators launches nothing meanwhile",
        "return [*map(operator.sub, idle, seconds_of(trial, [UNATTRIBUTED]))]",
        "return idle",
        (
            "tests/observe/test_imported.py::test_a_host_that_runs_code_without_operators_launches_nothing_meanwhile",
        ),
    ),
    Fault(
        "skipped-at-first",
        "updates that a GradScaler skips before its first step do not count",
        "owner in skipped",
        "True",
        (
            "tests/observe/test_watching.py::test_a_watched_script_has_the_same_results_and_covered_steps",
        ),
    ),
    Fault(
        "imbalance-of-ranks",
        "device 0 of ranks has no additional work",
        "row.imbalance is None or len(row.busy) < 2 or context.case.traits.ranks",
        "row.imbalance is None or len(row.busy) < 2",
        ("tests/analysis/test_findings.py::test_ranks_are_not_told_to_move_work_from_device_0",),
    ),
    Fault(
        "longest-wait",
        "waiting costs at most the longest wait, not the mean one",
        "return _of_steps(trial, lambda one: max(one.waits_s))",
        "return _of_steps(trial, lambda one: sum(one.waits_s) / len(one.waits_s))",
        (
            "tests/analysis/test_arrivals.py::test_ranks_that_are_late_in_turn_within_a_step_cost_the_sum_of_their_waits",
        ),
    ),
    Fault(
        "late-in-turn",
        "a rank is called late only if it is late on average",
        "return _of_steps(trial, lambda one: one.waits_s[self.first] - one.waits_s[self.last])",
        "return waiting(trial)",
        ("tests/analysis/test_arrivals.py::test_the_whole_wait_is_for_late_ranks_or_in_turn",),
    ),
    Fault(
        "first-and-last",
        "the rank that is last on average is the one that waits least",
        "return self.waits_s.index(min(self.waits_s))",
        "return self.waits_s.index(max(self.waits_s))",
        (
            "tests/analysis/test_arrivals.py::test_what_a_late_rank_costs_at_most_is_what_its_lateness_costs",
        ),
    ),
    Fault(
        "hidden-reductions",
        "a rank that hides its reductions waits for nobody",
        "[values for part in parts for values in part.readings(EXPOSED_REDUCTION).values()]",
        "[v for part in parts for v in part.readings(EXPOSED_REDUCTION).values() if any(v)]",
        ("tests/simulated/test_ranks.py",),
    ),
    Fault(
        "names-of-kernels",
        "torch's records tell a collective, whatever name its kernel has",
        "Kind.COMMUNICATION if collective or _COMMUNICATION.match(name) else Kind.COMPUTE",
        "Kind.COMMUNICATION if _COMMUNICATION.match(name) else Kind.COMPUTE",
        ("tests/observe/test_imported_collectives.py",),
    ),
    Fault(
        "mig",
        "of several MIG instances, CUDA shows a process the first",
        'visible.split(",")[0].strip()',
        'visible.split(",")[-1].strip()',
        ("tests/hardware/test_nvml.py::test_mig_instance_is_taken_with_what_it_tells",),
    ),
    Fault(
        "mark-events",
        "marks reuse their events",
        "self._own[device][1].extend((start, end))",
        "pass",
        ("tests/measure/test_clocks.py::test_a_mark_costs_the_driver_two_records",),
    ),
    Fault(
        "mark-stream",
        "a mark does not look up the stream of a GPU",
        "return self._own or self._held or current_stream(self.ordinal)",
        "return self._own or current_stream(self.ordinal)",
        ("tests/measure/test_clocks.py::test_a_mark_costs_the_driver_two_records",),
    ),
    Fault(
        "event-chain",
        "no event of an earlier block is compared again",
        "raw = self._raw[i]",
        "raw: list[float] = []",
        ("tests/measure/test_clocks.py::test_no_event_of_earlier_blocks_is_compared_again",),
    ),
    Fault(
        "default-devices",
        "a run on 8 GPUs measures 1, 2 and 8 by default",
        "tuple(sorted({1, min(2, available), available} - {0}))",
        "tuple(range(1, available + 1))",
        ("tests/records/test_plan.py::test_default_devices_fit_what_there_is",),
    ),
    Fault(
        "profiled-steps",
        "busy time rests on several profiled steps",
        "self._profiled_steps = PROFILED_STEPS",
        "self._profiled_steps = 1",
        (
            "tests/simulated/test_report.py::test_busy_times_and_their_imbalance_are_the_true_ones[two]",
        ),
    ),
    Fault(
        "device-drift",
        "spans of GPUs last as long as on the host's clock",
        "host_s_per_ms = [(1 + drift) / 1e3 for drift in self.drift]",
        "host_s_per_ms = [1 / 1e3 for _ in self.drift]",
        ("tests/measure/test_clocks.py::test_spans_last_as_long_as_on_the_hosts_clock",),
    ),
    Fault(
        "expected-time",
        "a run says at its start how long it is expected to take",
        "if self._plan:\n    self._console.print(escape(self._plan))",
        "if False:\n    self._console.print(escape(self._plan))",
        ("tests/cli/test_shapes.py::test_a_line_per_round_has_the_time_left",),
    ),
    Fault(
        "probed-access",
        "a probe's file has peer access where every pair of GPUs has it",
        "all(torch.cuda.can_device_access_peer(*one) for one in pairs)",
        "any(torch.cuda.can_device_access_peer(*one) for one in pairs)",
        ("tests/doctor/test_probe.py::test_gpus_have_peer_access_if_each_pair_has_it",),
    ),
    Fault(
        "timed-links",
        "a trial times the link of each pair of GPUs",
        "permutations(ends, 2)",
        "pairwise(ends)",
        ("tests/simulated/test_report.py::test_a_slow_link_is_found_and_named_with_its_true_rate",),
    ),
    Fault(
        "recorded-collective",
        "a rank that has not entered the last collective is named so",
        "one.number == newest.number",
        "one.number <= newest.number",
        ("tests/doctor/test_probe.py::test_ranks_that_hang_are_named_with_their_collectives",),
    ),
    # -- the doctor
    Fault(
        "nvlink-promise",
        "a pair of GPUs is judged by what its NVLinks promise",
        "self.nvlinks(source, target) * min(rates)",
        "0.0",
        ("tests/doctor/test_faults.py::test_healthy_nvlinks_have_no_finding",),
    ),
    Fault(
        "nvlink-down",
        "an NVLink that is down is a fault, but for a bridge that was not fitted",
        "active == most and not active * BRIDGES % (active + inactive)",
        "active == most",
        (
            "tests/doctor/test_faults.py::test_a_bridge_that_was_not_fitted_is_a_fact_of_the_hardware",
        ),
    ),
    Fault(
        "share-of-a-fake-step",
        "no cost is a share of a step on fake GPUs",
        "not row.on_fake_gpus",
        "True",
        ("tests/doctor/test_stored.py::test_without_a_run_on_gpus_the_standard_is_used",),
        where="doctor.stored",
    ),
    Fault(
        "examined-host",
        "a run has the examination of its own machine alone",
        '"SELECT result FROM examination WHERE host=(SELECT host FROM run WHERE rowid=?)"',
        '"SELECT result FROM examination WHERE rowid>=(SELECT 0 FROM run WHERE rowid=?)"',
        ("tests/store/test_machine_results.py::test_the_runs_on_a_machine_have_its_last_result",),
    ),
    Fault(
        "merged-examination",
        "a merge keeps the newer examination of a machine",
        '"INSERT INTO examination VALUES (?,?,?) ON CONFLICT(host) DO UPDATE SET"'
        '" started=excluded.started, result=excluded.result WHERE excluded.started>started"',
        '"INSERT OR REPLACE INTO examination VALUES (?,?,?)"',
        ("tests/store/test_machine_results.py::test_a_merge_keeps_the_newer_result",),
    ),
    Fault(
        "quoted-gpus",
        "explain quotes what the doctor found about the GPUs of a link, not about others",
        "context.case.gpu(end)",
        "end",
        (
            "tests/doctor/test_examination.py::test_a_slow_link_quotes_what_the_doctor_found_about_it",
        ),
    ),
    # -- hardware and store
    Fault(
        "slow-by-first-step",
        "the second step, and not the first, decides whether a case is slow",
        "self._block(1)\nself._second_s = self._block(1)",
        "self._second_s = self._block(1)",
        (
            "tests/measure/test_stopping.py::"
            "test_the_second_step_decides_whether_all_cases_of_a_worker_are_slow",
        ),
    ),
    Fault(
        "pairs-of-a-resample",
        "a value that a resample has drawn several times is as many values",
        "pairs[itself] = self.times * (self.times + 1) // 2",
        "pairs[itself] = self.times",
        (
            "tests/analysis/test_stats.py::"
            "test_medians_and_centres_are_those_of_the_values_that_were_drawn",
        ),
    ),
    Fault(
        "undefined-round",
        "a comparison with a round that has no ratio is undefined",
        "middles[(self.times[np.isnan(self.values)] > 0).any(axis=0)] = np.nan",
        "pass",
        (
            "tests/analysis/test_stats.py::"
            "test_a_round_without_a_ratio_leaves_the_comparison_undefined",
        ),
    ),
    Fault(
        "collective-twice",
        "each collective of a step has a name of its own",
        "self._members.add(member)",
        "pass",
        (
            "tests/strategies/test_described.py::test_each_collective_of_a_step_has_a_name_of_its_own",
        ),
    ),
    Fault(
        "own-wrap",
        "a variant of ddp trains the module that it wraps itself",
        "yield DdpStep(case, model, devices[0], mark, self.wrap)",
        "yield DdpStep(case, model, devices[0], mark, wrap)",
        (
            "tests/benchmarks/test_strategies.py::"
            "test_a_variant_of_ddp_sets_its_option_or_rounds_gradients",
        ),
    ),
    Fault(
        "least-needed-first",
        "a run on GPUs leaves out cases, and not rounds, where its time is too short",
        "bounded and self.budget.settles and self.are_needed(cases, number)",
        "False",
        (
            "tests/measure/test_gpu_budget.py::"
            "test_a_default_run_ends_in_its_budget_with_a_ranking_on_the_most_gpus",
        ),
    ),
    Fault(
        "trials-by-size",
        "what a trial takes is known for its number of GPUs",
        "(case.devices, seconds)",
        "(0, seconds)",
        (
            "tests/measure/test_gpu_budget.py::"
            "test_what_a_trial_tells_holds_for_its_number_of_gpus_first",
        ),
    ),
    Fault(
        "amd-precision",
        "on AMD's GPUs, a precision depends on the architecture",
        "self._architectures is None",
        "True",
        (
            "tests/hardware/test_vendors.py::test_amds_gpus_have_tf32_where_torch_says_so",
            "tests/cli/test_rocm.py::test_the_plan_has_precisions_of_the_card",
        ),
        where="records.vendors.Vendor.has",
    ),
    Fault(
        "amd-counters",
        "under ROCm, NVML is not asked",
        "not torch_build.vendor().counters",
        "False",
        ("tests/cli/test_rocm.py::test_nvml_is_not_asked_under_rocm",),
    ),
    Fault(
        "small-shared-memory",
        "ranks on several GPUs need /dev/shm",
        "case.device_kind == 'cuda' and case.traits.ranks and case.devices > 1",
        "False",
        (
            "tests/hardware/test_shared_memory.py::"
            "test_a_run_whose_processes_need_it_names_its_size_and_the_change",
        ),
    ),
    Fault(
        "slow-by-budget",
        "a small budget makes no case slow",
        "self._second_s > SLOW_S",
        "self._second_s > self._effort.budget_s",
        (
            "tests/measure/test_stopping.py::"
            "test_the_second_step_decides_whether_all_cases_of_a_worker_are_slow",
        ),
    ),
    Fault(
        "slow-apart",
        "all trials that are compared take few steps, or none does",
        "self._slow.get(self._alike(group[0]))",
        "None",
        (
            "tests/measure/test_run.py::"
            "test_the_first_trial_decides_whether_all_that_share_its_baseline_take_few_steps",
        ),
    ),
    Fault(
        "compared-modes",
        "a case that is slow in one of two runs has no ratio",
        "len(_modes(pair)) == 1",
        "True",
        (
            "tests/analysis/test_comparison.py::test_a_case_with_few_steps_in_one_run_only_has_no_ratio",
        ),
    ),
    Fault(
        "dropped-round",
        "on GPUs, a round that does not fit into the budget is left out as a whole",
        "not on_gpus(cases) or round_s <= self.left_s",
        "True",
        (
            "tests/measure/test_run.py::test_on_gpus_a_round_that_does_not_fit_is_left_out_and_named_and_no"
            "_trial_is_shortened",
        ),
    ),
    Fault(
        "shortened-on-gpus",
        "on GPUs, no budget shortens a trial",
        "on_gpus(group)",
        "False",
        (
            "tests/measure/test_run.py::test_on_gpus_a_round_that_does_not_fit_is_left_out_and_named_and_no"
            "_trial_is_shortened",
        ),
        where="measure.budget.Budget.trial",
    ),
    Fault(
        "least-time",
        "timed steps last for their least time",
        "sum(timed) >= self.least_s",
        "True",
        (
            "tests/measure/test_stopping.py::"
            "test_timed_steps_last_for_their_least_time_whatever_the_budget_is",
        ),
    ),
    Fault(
        "unequal-gpus",
        "a run without --device-ids uses GPUs of one model",
        "max(groups.values(), key=len, default=[])",
        "sum(groups.values(), [])",
        (
            "tests/hardware/test_gpus.py::test_of_unequal_gpus_a_run_uses_the_largest_equal_group_and_says_so",
        ),
    ),
    Fault(
        "nvml-decides",
        "torch, and not NVML, decides whether there are GPUs",
        "gpus.of_torch().gpus",
        'gpus.nvml.describe()["gpus"]',
        (
            "tests/hardware/test_gpus.py::test_a_run_uses_the_gpus_of_torch_when_nvml_does_not_answer",
        ),
        where="measure.selection.default_kind",
    ),
    Fault(
        "another-driver",
        "a run says why NVML does not answer",
        "str(error)",
        '""',
        (
            "tests/hardware/test_gpus.py::test_a_run_uses_the_gpus_of_torch_when_nvml_does_not_answer",
        ),
        where="hardware.nvml.problem",
    ),
    Fault(
        "another-pynvml",
        "the package pynvml that is not NVIDIA's is refused by name",
        'hasattr(pynvml, "_nvmlGetFunctionPointer")',
        "True",
        ("tests/hardware/test_nvml.py::test_unofficial_library_is_refused_by_name",),
    ),
    Fault(
        "cuda-without-gpus",
        "--device-kind cuda without a usable GPU is an error with the reason",
        "not usable.gpus",
        "False",
        ("tests/hardware/test_gpus.py::test_cuda_without_a_usable_gpu_ends_with_the_reason",),
        where="measure.selection._gpu_ids",
    ),
    Fault(
        "gpu-defaults",
        "a default run on GPUs measures full models",
        'options.quick and kind == "cuda" and not cluster',
        "False",
        (
            "tests/hardware/test_gpus.py::"
            "test_by_default_gpus_train_full_models_in_the_precision_of_their_generation",
        ),
    ),
    Fault(
        "silent-cpu",
        "a run on the CPU says why it leaves this machine's GPUs unused",
        'log.warning("this run measures the CPU: %s", reason)',
        "pass",
        (
            "tests/hardware/test_gpus.py::"
            "test_a_build_for_cpus_does_not_measure_a_machine_with_gpus_silently",
        ),
    ),
    Fault(
        "nvml-ordinal",
        "GPUs have CUDA's numbers, and not NVML's",
        "chosen = [handles[position] for position in cuda_visible(visible, list(physical))]",
        "chosen = handles",
        ("tests/hardware/test_samplers.py::test_devices_are_cuda_ordinals",),
    ),
    Fault(
        "trial-ordinal",
        "a trial's samples have the places of its devices, and not CUDA's numbers",
        "replace(sample, device=place[sample.device])",
        "replace(sample, device=sample.device)",
        (
            "tests/analysis/test_sampled.py::test_gpus_are_sampled_over_the_whole_trial_and_the_host_while_steps_are_timed",
        ),
    ),
    Fault(
        "migration",
        "a store of an earlier schema is read as what it holds",
        r"""("\n    ALTER TABLE memory ADD COLUMN phase TEXT NOT NULL DEFAULT '';"
        "\n    ALTER TABLE memory ADD COLUMN kind TEXT NOT NULL DEFAULT 'allocated';"
        "\n    ALTER TABLE trial ADD COLUMN failed_device INTEGER\n    ")""",
        r"""("\n    ALTER TABLE memory ADD COLUMN phase TEXT NOT NULL DEFAULT '';"
        "\n    ALTER TABLE memory ADD COLUMN kind TEXT NOT NULL DEFAULT '';"
        "\n    ALTER TABLE trial ADD COLUMN failed_device INTEGER\n    ")""",
        ("tests/store/test_file.py::test_a_file_of_schema_1_is_read_as_what_it_holds",),
    ),
    Fault(
        "view-of-a-full-device",
        "a storage that is counted already needs only its growth",
        "self._now[device] + size - (before or 0)",
        "self._now[device] + size",
        ("tests/hardware/test_emulated.py::test_a_storage_counts_once_with_its_present_size",),
    ),
    Fault(
        "resized-storage",
        "a storage whose size changes is counted with its new size, and others are not counted"
        " again",
        "before != size",
        "before is None",
        ("tests/hardware/test_emulated.py::test_a_storage_counts_once_with_its_present_size",),
    ),
    # -- analysis
    Fault(
        "averaging-tolerance",
        "a wrong gradient of ranks is refused also if their losses are no means over samples",
        "own_losses.verified is not Verified.NO",
        "own_losses.verified",
        (
            "tests/measure/test_verification.py::test_a_wrong_gradient_of_ranks_is_refused_also_if_the_loss_is_no_mean",
        ),
    ),
    Fault(
        "averaging-everyone",
        "only strategies with ranks may average the losses of their parts",
        "verdict.verified is Verified.NO and case.traits.ranks and not model.owns_loss",
        "verdict.verified is Verified.NO and not model.owns_loss",
        (
            "tests/measure/test_verification.py::test_only_ranks_may_average_their_own_losses_and_a_mean_over_samples_has_no_label",
        ),
    ),
    Fault(
        "averaging-weights",
        "a rank counts with its rows",
        "count / sum(rows)",
        "1 / len(rows)",
        (
            "tests/measure/test_verification.py::test_ranks_average_their_own_losses_and_the_difference_to_the_whole_batch_is_measured",
        ),
    ),
    Fault(
        "ledger-closure",
        "a ledger's parts sum to the step",
        "until = max(start_s, min(last.end_s, now)) if last else start_s",
        "until = max(start_s, min(last.end_s, now)) if last else now",
        ("tests/records/test_ledger.py::test_parts_sum_to_the_step_and_are_never_negative",),
    ),
    Fault(
        "critical-path",
        "the critical path covers the step from its start to its end",
        "reversed(list(ledger.walk(step, spans)))",
        "list(ledger.walk(step, spans))",
        ("tests/analysis/test_lanes.py::test_bars_idle_time_and_critical_path_of_a_known_step",),
    ),
    Fault(
        "idle-lane",
        "a device is idle where no phase is open on it",
        "union((bar.start_s, bar.end_s) for bar in bars)",
        "union((bar.start_s, bar.end_s) for bar in bars if not bar.row)",
        (
            "tests/analysis/test_lanes.py::test_the_critical_path_is_the_step_and_idle_time_is_the_rest_of_each_lane",
        ),
    ),
    Fault(
        "median-step",
        "the step that is drawn is the median of its round",
        "middle_s = median_low(values.values())",
        "middle_s = max(values.values())",
        (
            "tests/analysis/test_lanes.py::test_the_step_is_the_median_of_the_round_closest_to_the_case",
        ),
    ),
    Fault(
        "median-phases",
        "the step that is drawn is near the median in each phase on each device",
        "(durations, *lasted.values(), *began.values())",
        "(durations,)",
        (
            "tests/analysis/test_lanes.py::test_the_step_is_near_the_median_in_every_phase_on_every_device",
        ),
    ),
    Fault(
        "joint-threads",
        "only marks that one thread opens belong to a joint phase",
        "groups.setdefault((step, phase, thread), [])",
        "groups.setdefault((step, phase, 1), [])",
        ("tests/measure/test_clocks.py::test_phases_of_two_threads_are_not_joint",),
    ),
    Fault(
        "joint-concurrency",
        "a joint phase on the host's clock counts as one device's",
        "s.joint and s.on_host",
        "s.joint and not s.on_host",
        (
            "tests/records/test_ledger.py::test_a_joint_phase_on_the_host_is_one_and_on_gpus_says_nothing_about_concurrency",
        ),
    ),
    Fault(
        "ran-ahead",
        "phases of a device that ran ahead are drawn where they were, and count as work of the"
        " step",
        "start, end = span.start_s, span.end_s",
        "start, end = max(span.start_s, step.start_s), span.end_s",
        (
            "tests/analysis/test_lanes.py::test_phases_of_a_rank_that_ran_ahead_are_drawn_where_they_were_and_are_not_idle_time",
        ),
    ),
    Fault(
        "next-step-lane",
        "a device that works on the next step is not idle",
        "span.step == number or (span.start_s < step.end_s and span.end_s > start_s)",
        "span.step == number",
        (
            "tests/analysis/test_lanes.py::test_phases_of_a_rank_that_ran_ahead_are_drawn_where_they_were_and_are_not_idle_time",
        ),
    ),
    Fault(
        "outline",
        "the outline in a drawing is the critical path",
        "left, right = part.start_s * 1e3, part.end_s * 1e3",
        "left, right = part.start_s * 1e3, part.bar.end_s * 1e3 if part.bar else part.end_s * 1e3",
        ("tests/analysis/test_lanes.py::test_the_outline_is_the_critical_path",),
    ),
    Fault(
        "colours",
        "any two phases can be told apart, also with a deficiency of colour vision",
        'Look("#007083", "#ffffff", "opt")',
        'Look("#7a6ccc", "#ffffff", "opt")',
        (
            "tests/report/test_figures.py::test_the_colours_of_phases_differ_in_normal_vision_and_under_three_deficiencies",
        ),
    ),
    Fault(
        "axis",
        "no interval rules an axis",
        "return min(max(one.high for one in found), FARTHEST * max(one.value for one in found))",
        "return max(one.high for one in found)",
        (
            "tests/report/test_figures.py::test_a_wide_interval_does_not_rule_the_axis_and_ends_in_an_arrow",
        ),
    ),
    Fault(
        "middle-half",
        "a typical step is of the middle half",
        "aside = len(ordered) // 4",
        "aside = len(ordered) // 3",
        ("tests/records/test_ledger.py::test_the_middle_half_leaves_out_a_quarter_on_either_side",),
    ),
    Fault(
        "arrival",
        "a reduction of ranks begins when the last one arrives",
        "last_s = max(span.start_s for span in alike)\n"
        "arrived |= {id(span): last_s for span in alike}",
        "last_s = min(span.start_s for span in alike)\n"
        "arrived |= {id(span): last_s for span in alike}",
        (
            "tests/records/test_ledger.py::test_a_reduction_of_ranks_begins_when_the_last_one_arrives",
        ),
    ),
    Fault(
        "interval-level",
        "an interval is Student's at 95 %",
        "return scipy.special.stdtrit(np.maximum(n - 1, 1), (1 + level) / 2)",
        "return scipy.special.stdtrit(np.maximum(n - 1, 1), level)",
        ("tests/analysis/test_stats.py::test_interval_is_students_at_95_percent",),
    ),
    Fault(
        "interval-percentiles",
        "the interval of one round holds 95 % of its resamples",
        "np.percentile(draws, [50 * (1 - level), 50 * (1 + level)])",
        "np.percentile(draws, [100 * (1 - level), 100 * level])",
        (
            "tests/analysis/test_stats.py::test_interval_of_one_round_is_95_percent_of_its_resamples",
        ),
    ),
    Fault(
        "widening",
        "a few rounds resampled are widened to a few rounds measured",
        "draws * math.sqrt(n / (n - 1))",
        "draws",
        ("tests/analysis/test_stats.py::test_interval_is_students_at_95_percent",),
    ),
    Fault(
        "speed-up",
        "a speed-up is the baseline's step over the case's own",
        "stats.ratio(series[base], series[case], level=levels[base])",
        "stats.ratio(series[case], series[base], level=levels[base])",
        ("tests/analysis/test_summary.py::test_strong_speed_up_compares_equal_global_work",),
    ),
    Fault(
        "weak-scaling",
        "a weak speed-up counts the work of all devices",
        "return ratio.scaled(case.batch_size / base.batch_size)",
        "return ratio",
        ("tests/analysis/test_summary.py::test_weak_speed_up_compares_equal_work_a_device",),
    ),
    Fault(
        "weak-baseline",
        "the baseline of weak scaling has one device's share of the batch",
        "batch = case.batch_size // case.devices if weak_batches else case.batch_size",
        "batch = case.batch_size",
        (
            "tests/records/test_plan.py::test_weak_scaling_keeps_the_batch_per_device_and_one_baseline",
        ),
    ),
    # -- predict
    Fault(
        "measured-machine",
        "a machine that was measured keeps its own interval",
        "machine.collective is not None and machine.host.launch_s is not None",
        "False",
        ("tests/predict/test_deviations.py::test_a_measured_machine_keeps_its_own_interval",),
    ),
    Fault(
        "unknown-machine",
        "steps on a machine that nobody measured include what such machines lost",
        "seconds, draws = deviation.of_step(seconds, draws)",
        "pass",
        (
            "tests/predict/test_deviations.py::test_steps_on_an_unknown_machine_are_later_and_less_sure",
        ),
    ),
    Fault(
        "prediction-interval",
        "a prediction's interval holds 80 % of the draws",
        "return ordered[int(0.1 * len(ordered))], ordered[int(0.9 * len(ordered)) - 1]",
        "return ordered[int(0.05 * len(ordered))], ordered[int(0.95 * len(ordered)) - 1]",
        ("tests/predict/test_simulation.py::test_an_interval_holds_80_percent",),
    ),
    Fault(
        "across",
        "a comparison across a fact refuses every other difference",
        "one.forbids and one.asked not in self.asked",
        "one.forbids and not self.asked",
        (
            "tests/analysis/test_comparison.py::test_a_difference_that_is_asked_for_is_compared_and_labelled_and_any_other_refused",
        ),
    ),
    Fault(
        "gil",
        "threads that launch at once hand the interpreter over",
        "1 + self._host_costs.hand_off * others",
        "1",
        (
            "tests/predict/test_simulation.py::test_threads_that_launch_at_once_hand_the_interpreter_over",
        ),
    ),
    Fault(
        "no-gil",
        "threads launch at the same time where there is no interpreter lock",
        "not self._machine.host.gil",
        "False",
        (
            "tests/predict/test_simulation.py::test_without_an_interpreter_lock_threads_launch_at_once",
        ),
    ),
    Fault(
        "no-gil-label",
        "a step without the interpreter lock has the label NO-GIL",
        'trial.facts.gil == "off"',
        "False",
        (
            "tests/analysis/test_summary.py::test_a_step_without_the_interpreter_lock_says_so",
            "tests/predict/test_outlook.py::"
            "test_a_run_without_the_interpreter_lock_is_continued_without_it",
        ),
    ),
    Fault(
        "gil-switch",
        "an import that switches the interpreter lock on is named",
        "switching(str(message)) or _Watch.module",
        "_Watch.module",
        ("tests/hardware/test_interpreter.py::test_the_module_that_switches_the_lock_on_is_noted",),
    ),
    Fault(
        "gil-mixed",
        "a run with the interpreter lock is not resumed without it",
        '_fact("GIL", asked=PYTHON)',
        '_fact("GIL", asked=PYTHON, forbids=False)',
        (
            "tests/records/test_environment.py::"
            "test_each_fact_that_differs_is_told_and_forbids_unless_it_is_the_size_of_memory",
        ),
    ),
    Fault(
        "kept lock",
        "no interrupt leaves the lock of the saved random states taken",
        "while True:\n    self._lock.release()",
        "if not sys.exc_info()[0]:\n    self._lock.release()",
        (
            "tests/engine/law/test_threads_at_once.py::"
            "test_an_interrupt_anywhere_leaves_no_thread_waiting_for_the_saved_states",
        ),
    ),
    Fault(
        "shared turns",
        "each caller of a wrapper has turns of its own",
        "threading.local",
        "object",
        (
            "tests/engine/law/test_threads_at_once.py::"
            "test_callers_of_one_wrapper_with_unlike_batches_take_turns_of_their_own",
        ),
        where="engine.fast.pool",
    ),
    Fault(
        "read once",
        "what another caller changes while it is read is read again",
        "ATTEMPTS = 1000",
        "ATTEMPTS = 0",
        (
            "tests/engine/law/test_threads_at_once.py::"
            "test_what_changes_while_it_is_read_is_read_again",
        ),
    ),
    Fault(
        "sibling",
        "dpbench works without the folders predict and observe",
        '(Path(__file__).parents[1] / package / "__init__.py").is_file()',
        "True",
        ("tests/project/test_siblings.py::test_without_a_sibling_its_commands_alone_are_missing",),
    ),
    Fault(
        "a stored file",
        "the code of a file that only a stored case names is not imported",
        "strategy(name) if module in sys.modules else None",
        "strategy(name)",
        (
            "tests/strategies/test_described.py::test_a_file_that_only_a_stored_case_names_is_not_imported",
        ),
    ),
    Fault(
        "flat parts",
        "under sharded, each device receives a part of the gradients",
        "dict.fromkeys(PARTS, len(group.receivers))",
        "dict.fromkeys(PARTS, 1)",
        ("tests/analysis/test_moves.py::test_sharded_updates_move_a_part_to_and_from_each_device",),
    ),
    Fault(
        "ring",
        "an all-reduce moves 2 (n - 1) / n of its message over each link",
        "lambda n: 2 * (n - 1) / n",
        "lambda n: 2.0",
        ("tests/predict/test_network.py::test_collectives_move_as_a_ring_does",),
    ),
    Fault(
        "overlap",
        "a job that overlaps another ends no earlier than it",
        "self._beside[other] -= 1",
        "self._beside[other] -= 2",
        (
            "tests/predict/test_network.py::test_a_job_beside_another_starts_with_it_and_ends_no_earlier",
        ),
    ),
    # -- export
    Fault(
        "export-unit",
        "an exported time is in microseconds",
        "return round(seconds * 1e6 * TICKS)",
        "return round(seconds * 1e3 * TICKS)",
        (
            "tests/store/test_export_traces.py::test_every_span_and_step_is_one_event_in_its_place_and_counters_are_the_samples",
        ),
    ),
    Fault(
        "export-zero",
        "an exported reading's time counts from the beginning of the earliest trial",
        "microseconds = ticks(sample.time_s - zero_s) / TICKS",
        "microseconds = ticks(sample.time_s) / TICKS",
        (
            "tests/store/test_export_traces.py::test_every_span_and_step_is_one_event_in_its_place_and_counters_are_the_samples",
        ),
    ),
    Fault(
        "export-pyperf-steps",
        "the steps of a process are no independent values",
        "[statistics.median(trial.timed)]",
        "list(trial.timed)",
        (
            "tests/store/test_export.py::test_pyperf_finds_hardly_more_differences_between_equal_cases_than_its_level_says",
        ),
    ),
    # -- loaders
    Fault(
        "loader-best",
        "the rate that was measured as the best need not be the best",
        "ratios = [stats.mean_ratio(other, times) for other in every]",
        "ratios = [stats.mean_ratio(min(every, key=lambda one: stats.mean(one).value), times)]",
        ("tests/measure/test_loaders.py::test_a_curve_without_a_knee_has_none",),
    ),
    Fault(
        "loader-close",
        "a rate within 5 % of the best counts as no lower",
        "CLOSE = 0.95",
        "CLOSE = 0.9",
        ("tests/measure/test_loaders.py::test_the_knee_is_the_least_number_within_five_percent",),
    ),
    Fault(
        "loader-fill",
        "batches that were loaded ahead during the start are not part of the rate",
        "steps.append(Step(each_s, warmup=batch < fill, end_s=end_s))",
        "steps.append(Step(each_s, warmup=batch < turn, end_s=end_s))",
        ("tests/measure/test_loaders.py::test_a_measurement_records_the_share_of_each_batch",),
    ),
    Fault(
        "loader-turn",
        "the batches of a turn share its time",
        "first = batch - (batch - fill) % turn if batch >= fill else batch",
        "first, turn = batch, 1",
        ("tests/measure/test_loaders.py::test_a_measurement_records_the_share_of_each_batch",),
    ),
    Fault(
        "loader-rising",
        "a curve that ends at its best has no knee",
        "if list(possible) == [counts[-1]]:\n    return Shape.RISING",
        "pass",
        ("tests/measure/test_loaders.py::test_a_curve_without_a_knee_has_none",),
    ),
    Fault(
        "loader-rounds",
        "two rounds decide nothing",
        "UNSURE = (Doubt.ROUNDS, Doubt.NOISY)",
        "UNSURE = (Doubt.NOISY,)",
        ("tests/measure/test_loaders.py::test_a_curve_without_a_knee_has_none",),
    ),
    Fault(
        "loader-noisy",
        "NOISY rounds decide nothing",
        "UNSURE = (Doubt.ROUNDS, Doubt.NOISY)",
        "UNSURE = (Doubt.ROUNDS,)",
        ("tests/measure/test_loaders.py::test_noisy_rounds_decide_nothing",),
    ),
    Fault(
        "loader-bound",
        "the step and the batch are not exchanged",
        "stats.mean_ratio(loop.step, loop.iteration)",
        "stats.mean_ratio(loop.iteration, loop.step)",
        ("tests/measure/test_loaders.py::test_a_measured_step_is_compared_within_rounds",),
    ),
    Fault(
        "loader-overlap",
        "without workers, loading and the step do not overlap",
        "combined = max if row.case.loader else operator.add",
        "combined = max",
        (
            "tests/measure/test_loaders.py::test_without_workers_loading_and_the_step_do_not_overlap",
        ),
    ),
    Fault(
        "loader-start",
        "an epoch begins with the wait for its first batch",
        "waits.get(number, 0.0) + (batches - 1) * iteration_s + step_s",
        "batches * iteration_s + step_s",
        (
            "tests/measure/test_loaders.py::test_the_start_of_workers_counts_in_each_epoch_unless_they_persist",
        ),
    ),
    Fault(
        "loader-stack",
        "the stack is that of the worker that hangs",
        "faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)",
        "pass",
        (
            "tests/measure/test_loaders.py::test_an_example_that_hangs_is_shown_with_the_stack_of_its_worker",
        ),
        where="measure.worker.loaders",
    ),
    Fault(
        "loader-raised",
        "an example that raises is named with the user's line",
        "raise BatchFailed(_named(case, error, len(ends) - 1, indices)) from error",
        "raise",
        (
            "tests/measure/test_loaders.py::test_an_example_that_raises_is_named_with_its_worker_and_the_users_line",
        ),
    ),
    Fault(
        "trace-impossible",
        "no finding judges a trace that no machine can have recorded",
        "return self.share > TOLERATED",
        "return False",
        ("tests/observe/test_possible.py",),
    ),
    Fault(
        "trace-missing-series",
        "a device without readings of communication is a device all the same",
        "trial.grouped.series(KERNELS)",
        "trial.grouped.series(EXPOSED)",
        ("tests/observe/test_imported_absent.py",),
    ),
    Fault(
        "trace-step-ends",
        "a step of a trace begins with the end of the devices' work of the step before",
        "began_us = work[number - 1][1]",
        "began_us = work[number][0]",
        (
            "tests/observe/test_imported_steps.py::test_a_step_lasts_from_one_last_activity_of_the_devices_to_the_next",
        ),
    ),
    Fault(
        "trace-launch-step",
        "the work of devices counts for the step that launched it",
        "number = step_at(steps.host, launch.start_us) if steps.by_device else None",
        "number = step_at(steps.timed, event.start_us) if steps.by_device else None",
        (
            "tests/observe/test_imported_steps.py::test_work_that_overlaps_two_steps_counts_for_the_step_that_launched_it",
        ),
    ),
    Fault(
        "trace-unrecorded-steps",
        "a step after steps that were not recorded is not timed",
        "follows = before is not None and number == before + 1",
        "follows = before is not None",
        (
            "tests/observe/test_imported_steps.py::test_a_step_after_steps_that_were_not_recorded_is_not_timed",
        ),
    ),
    Fault(
        "trace-launched-before",
        "work from before the trace lacks no launch",
        "missing - len(launched_before(profile))",
        "missing",
        (
            "tests/observe/test_imported_steps.py::test_steps_of_devices_that_lag_by_two_steps_are_not_those_of_the_host",
        ),
    ),
    Fault(
        "trace-bomb-bytes",
        "a small file does not decompress without a limit",
        "size <= limit and (part := file.read(_PART_BYTES))",
        "(part := file.read(_PART_BYTES))",
        (
            "tests/observe/test_imported.py::test_a_file_that_decompresses_to_more_than_a_trace_is_refused_within_bounded_memory",
        ),
    ),
    Fault(
        "trace-bomb-objects",
        "a small file does not decode to objects without a limit",
        "size > limit or objects > limit // LEAST_OBJECT_BYTES",
        "size > limit",
        (
            "tests/observe/test_imported.py::test_a_file_that_decompresses_to_more_than_a_trace_is_refused_within_bounded_memory",
        ),
    ),
    Fault(
        "loop-without-loader",
        "a script without a DataLoader does not wait for one",
        "not context.row.phases.get(Phase.DATA.value) or present == WITHOUT_LOADER",
        "not context.row.phases.get(Phase.DATA.value)",
        (
            "tests/observe/test_verdict.py::test_a_script_without_a_loader_is_not_told_that_it_waits_for_one",
        ),
    ),
    Fault(
        "trace-after-backward",
        "operators after a loss belong to the forward again, and not to the clipping of the"
        " backward before",
        "self._after_backward = False\nreturn Phase.LOSS",
        "return Phase.LOSS",
        (
            "tests/observe/test_imported.py::test_after_a_loss_an_operator_without_gradients_is_not_clipping",
        ),
    ),
    Fault(
        "files-code",
        "a file that cannot be read has another exit code than a wrong argument",
        "(OSError, UnreadableFile)",
        "OSError",
        (
            "tests/cli/test_input_files.py::test_a_file_that_does_not_exist_is_named_with_the_code_of_files",
        ),
    ),
    Fault(
        "files-bom",
        "a byte order mark is no part of a file",
        'return path.read_text(encoding="utf-8-sig")',
        'return path.read_text(encoding="utf-8")',
        ("tests/cli/test_input_files.py::test_a_byte_order_mark_is_no_part_of_a_file",),
    ),
    Fault(
        "words-residue",
        "a residue of rounding is written as 0",
        "return 0.0 if abs(value) < RESIDUE_S else value",
        "return value",
        ("tests/records/test_words.py::test_an_estimate_of_a_residue_of_rounding_is_0",),
    ),
    Fault(
        "rounds-one-sided",
        "the rounds to decide are those of a two-sided interval",
        "_quantile(n, estimate.level)",
        "_quantile(n, 2 * estimate.level - 1)",
        ("tests/analysis/test_stats.py::test_the_rounds_to_decide_decide_in_four_of_five_runs",),
    ),
    Fault(
        "simplest-inverted",
        "of cases about as fast, the one with the fewest devices is recommended",
        "(row.case.devices, roles.index(row.case.traits.role), -of(row))",
        "(-row.case.devices, -roles.index(row.case.traits.role), -of(row))",
        ("tests/analysis/test_decision.py::test_the_rule_decides_each_situation",),
    ),
    Fault(
        "simplest-slowest",
        "of schedules about as fast, the fastest is recommended",
        "(row.case.devices, roles.index(row.case.traits.role), -of(row))",
        "(row.case.devices, roles.index(row.case.traits.role), of(row))",
        ("tests/analysis/test_decision.py::test_the_rule_decides_each_situation",),
    ),
    Fault(
        "tolerance-bf16",
        "gradients in bf16 that are wrong by half are refused",
        'TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 5e-2, "fp16": 1e-2}',
        'TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 0.5, "fp16": 1e-2}',
        (
            "tests/measure/test_verification.py::test_an_error_above_the_tolerance_of_the_precision_is_refused",
        ),
    ),
    Fault(
        "footprint-smallest",
        "a footprint has the highest peak of all rounds",
        "max(found)",
        "min(found)",
        ("tests/report/test_devices.py::test_a_peak_of_any_round_counts_wherever_it_is",),
        where="analysis.summary.highest",
    ),
    Fault(
        "footprint-last",
        "a footprint is not that of the last round",
        "max(found)",
        "found[-1]",
        ("tests/report/test_devices.py::test_a_peak_of_any_round_counts_wherever_it_is",),
        where="analysis.summary.highest",
    ),
    Fault(
        "footprint-used",
        "the memory in use is the highest reading of all rounds",
        """summary.highest(
            (device, int(max(values)))
            for trial in group
            for device, values in sampled.momentary(trial, "memory_used_bytes").items()
            if 0 <= device < case.working
        )""",
        """{
            device: int(max(values))
            for trial in group
            for device, values in sampled.momentary(trial, "memory_used_bytes").items()
        }""",
        ("tests/report/test_devices.py::test_a_peak_of_any_round_counts_wherever_it_is",),
    ),
    Fault(
        "noisy-verdict",
        "NOISY rounds carry no verdict",
        "if self.noisy:\n    return Doubt.NOISY",
        "pass",
        (
            "tests/analysis/test_noisy.py::test_noisy_rounds_decide_no_answer_whichever_side_was_beside_the_load",
        ),
    ),
    Fault(
        "idle-gpu",
        "an answer begins with a GPU that is idle for most of a step",
        "_too_small(question) + so_far",
        "so_far",
        (
            "tests/analysis/test_decision.py::test_an_answer_begins_with_a_gpu_that_is_idle_for_most_of_a_step",
        ),
    ),
    Fault(
        "noisy-one-side",
        "a round counts as quiet only if both sides were quiet",
        "_quiet(numbers, one.noisy | other.noisy)",
        "_quiet(numbers, one.noisy & other.noisy)",
        ("tests/analysis/test_noisy.py::test_a_round_is_quiet_only_if_it_is_quiet_on_both_sides",),
    ),
    Fault(
        "noisy-no-free-core",
        "on many cores, a load that takes a part of a core that the case needs is NOISY",
        "min(LIMIT * cores, free)",
        "LIMIT * cores",
        (
            "tests/analysis/test_noisy.py::test_a_load_is_noisy_if_it_takes_cores_that_the_case_needs",
        ),
    ),
    Fault(
        "noisy-shared-server",
        "a case on GPUs is not NOISY while the cores that it needs are free",
        'free if case.device_kind == "cuda" else min(LIMIT * cores, free)',
        "min(LIMIT * cores, free)",
        (
            "tests/hardware/test_foreign_load_gpu.py::test_the_cores_matter_to_a_case_on_gpus_as_far_as_it_depends_on_them",
        ),
    ),
    Fault(
        "noisy-gpu-bound",
        "a case whose GPU computes for the whole step is not NOISY by the cores",
        "share is not None and share >= 1 - LIMIT",
        "False",
        (
            "tests/hardware/test_foreign_load_gpu.py::test_the_cores_matter_to_a_case_on_gpus_as_far_as_it_depends_on_them",
        ),
    ),
    Fault(
        "noisy-gpu-of-another",
        "a GPU in use makes only the cases on it NOISY",
        "gpu.gpu in mine",
        "True",
        ("tests/hardware/test_foreign_load_gpu.py::test_only_cases_on_the_gpu_in_use_are_noisy",),
    ),
    Fault(
        "noisy-gpu-once",
        "the GPUs are asked again between rounds",
        "number and self.gpus",
        "False",
        (
            "tests/hardware/test_foreign_load_gpu.py::test_a_gpu_that_others_begin_to_use_between_rounds_is_found",
            "tests/hardware/test_foreign_load_gpu.py::test_a_gpu_that_stays_in_use_is_waited_for_once",
        ),
    ),
    Fault(
        "noisy-gpu-before",
        "the GPUs are asked before the first trial",
        "foreign_load.wait(waits_s, lambda words: listen(Note(words)), cases, gpus)",
        "foreign_load.wait(waits_s, lambda words: listen(Note(words)), cases)",
        ("tests/hardware/test_foreign_load_gpu.py::test_a_gpu_in_use_is_waited_for_and_named",),
    ),
    Fault(
        "nvml-own-work",
        "what dpbench itself ran on a GPU before is no load of others",
        "at_s > since_s",
        "True",
        (
            "tests/hardware/test_foreign_load_gpu.py::test_without_process_ids_the_use_of_the_whole_gpu_counts",
        ),
        "hardware.nvml.NvmlGpu.utilization_samples",
    ),
    Fault(
        "nvml-outside",
        "a reading outside the timed steps says nothing about them",
        "inside = [start_s <= time_s <= end_s for time_s in series.times]",
        "inside = [True for time_s in series.times]",
        (
            "tests/analysis/test_sampled.py::test_what_was_read_before_and_after_the_timed_steps_says_nothing_about_them",
        ),
    ),
    Fault(
        "nvml-average",
        "an average of the driver covers the second before it",
        "start_s + AVERAGED_S, end_s",
        "start_s, end_s",
        (
            "tests/analysis/test_sampled.py::test_an_average_counts_only_if_all_of_its_time_is_in_the_timed_steps",
        ),
    ),
    Fault(
        "nvml-too-few",
        "checks of GPUs with too few readings are told",
        "_lacks(trial, cores)",
        '""',
        ("tests/analysis/test_sampled.py::test_a_short_window_is_not_checked_and_a_long_one_is",),
    ),
    Fault(
        "nvml-energy",
        "energy is that of the timed steps, not that between the readings inside them",
        "lengths = [one.within(window) for one in inside]",
        "lengths = [one.end_s - one.start_s for one in inside]",
        ("tests/analysis/test_sampled.py::test_energy_is_that_of_the_timed_steps_alone",),
    ),
    Fault(
        "nvml-both-sides",
        "readings that begin late or end early say nothing about all timed steps",
        "inside[0].start_s > start_s or inside[-1].end_s < end_s",
        "False",
        (
            "tests/analysis/test_sampled.py::test_energy_of_which_readings_miss_or_are_impossible_is_not_checked",
        ),
    ),
    Fault(
        "nvml-power-limit",
        "a counter cannot rise faster than the power limit allows",
        "0 <= one.value <= one.most",
        "0 <= one.value",
        (
            "tests/analysis/test_sampled.py::test_energy_of_which_readings_miss_or_are_impossible_is_not_checked",
        ),
    ),
    Fault(
        "nvml-buffer",
        "the driver's buffer of utilisation is read",
        "gpu.utilization_samples(seen_s[gpu.index])",
        "()",
        (
            "tests/analysis/test_sampled.py::test_buffered_samples_are_taken_once_at_the_drivers_times",
        ),
    ),
    Fault(
        "clocks-apart",
        "a speed-up between GPUs at clocks that differ is a caveat",
        "abs(mine / other - 1) > CLOCKS",
        "False",
        ("tests/analysis/test_sampled.py::test_a_speed_up_between_clocks_that_differ_names_both",),
    ),
    Fault(
        "links-each-trial",
        "a run times its links once",
        "self._linked in (None, (case, number))",
        "True",
        (
            "tests/measure/test_gpu_state.py::test_links_are_timed_once_in_a_run_and_profiles_are_of_the_first_round",
        ),
    ),
    Fault(
        "profile-each-round",
        "only the first round is profiled",
        "unprofiled or reduces_in_backward",
        "True",
        (
            "tests/measure/test_gpu_state.py::test_links_are_timed_once_in_a_run_and_profiles_are_of_the_first_round",
        ),
    ),
    Fault(
        "profile-lost",
        "a repeated trial has the profile that its predecessor had",
        "self._profiled.get(case, (number, 0.0))[0] == number",
        "case not in self._profiled",
        (
            "tests/measure/test_gpu_state.py::test_a_trial_that_is_repeated_measures_again_what_its_predecessor_had",
        ),
    ),
    Fault(
        "variables-private",
        "no path is recorded from the environment",
        '_hidden(value) if "/" in value or "\\\\" in value or personal else value',
        "_hidden(value) if personal else value",
        (
            "tests/hardware/test_nvml.py::test_variables_that_change_results_are_recorded_without_paths_and_names_of_users",
        ),
    ),
    Fault(
        "noisy-label",
        "the label NOISY is that of all trials behind a number, not only of the last",
        "found = dict.fromkeys(label for trial in trials for label in labels(trial))",
        "found = dict.fromkeys(label for trial in [*trials][-1:] for label in labels(trial))",
        (
            "tests/analysis/test_noisy.py::test_every_label_of_two_runs_is_beside_every_line_of_their_comparison",
        ),
    ),
    Fault(
        "interval-alone",
        "intervals that are judged together are wider",
        "return 1 - (1 - level) / max(1, count)",
        "return level",
        (
            "tests/analysis/test_stats.py::test_the_level_of_an_interval_is_students_and_is_divided_among_those_read_together",
        ),
    ),
    Fault(
        "throughput-median",
        "samples per second are those of all timed steps",
        "mean.inverse.scaled(case.batch_size)",
        "step.inverse.scaled(case.batch_size)",
        (
            "tests/analysis/test_uneven.py::test_samples_per_second_are_rows_over_the_time_of_all_timed_steps",
        ),
    ),
    Fault(
        "killed-once",
        "a signal from outside costs one attempt",
        "results = attempt()",
        "return attempt()",
        (
            "tests/measure/test_server.py::test_a_signal_from_outside_costs_one_attempt[worker-SIGTERM]",
            "tests/measure/test_loaders.py::test_a_signal_from_outside_costs_one_attempt_at_a_measurement",
        ),
    ),
    Fault(
        "killed-or-crashed",
        "a crash of the model is not a signal of another process",
        "return exit_status in [-number for number in signals.ENDING]",
        "return exit_status is not None and exit_status < 0",
        (
            "tests/measure/test_failures.py::test_signals_of_other_processes_are_told_from_crashes_and_lack_of_memory",
        ),
    ),
    Fault(
        "killed-check",
        "a check that was killed refuses no case",
        "verdict.status is Status.KILLED",
        "False",
        (
            "tests/measure/test_run.py::test_a_model_whose_check_was_killed_is_measured_and_checked_again_in_the_next_round",
        ),
    ),
    Fault(
        "looks",
        "the intervals of a run that stops once its answers are settled hold at all looks together",
        "stats.joint_level(count * looks)",
        "stats.joint_level(count)",
        ("tests/measure/test_stopping.py::test_the_looks_widen_the_intervals_that_decide",),
    ),
    Fault(
        "only-at-looks",
        "a run looks at its results after fixed numbers of rounds only",
        "number in stats.LOOKS",
        "number > 0",
        ("tests/measure/test_stopping.py::test_between_two_looks_the_cases_stay_the_same",),
    ),
    Fault(
        "open-baseline",
        "the baseline is measured beside the rivals of a recommended case",
        "frozenset({question.home, *rivals})",
        "frozenset(rivals)",
        ("tests/measure/test_stopping.py::test_a_rival_of_the_recommended_case_goes_on",),
    ),
    Fault(
        "killed-resumed",
        "a run with killed trials is not finished",
        "session.killed <= store.done(run_id)",
        "True",
        (
            "tests/measure/test_run.py::test_the_same_call_measures_again_what_was_killed_and_nothing_else",
        ),
    ),
    Fault(
        "full-disk",
        "a full disk is no failure of a case, and its folder is named",
        "OSError",
        "()",
        (
            "tests/measure/test_server.py::test_a_worker_that_cannot_write_its_trials_for_a_time_is_a_killed_trial",
        ),
        where="measure.worker.__main__._work",
    ),
    Fault(
        "full-disk-named",
        "an error of temporary files names their folder and TMPDIR",
        "        raise OSError(error.errno, text) from error\n",
        "        raise\n",
        (
            "tests/measure/test_server.py::test_a_full_disk_is_an_error_that_names_the_folder_and_the_variable",
            "tests/records/test_signals.py::test_a_full_disk_leaves_no_folder_and_is_named_with_its_variable",
        ),
    ),
    Fault(
        "half-written",
        "no reader finds a part of a file",
        'target.with_name(f".dpbench-{os.urandom(6).hex()}.part")',
        "target",
        ("tests/records/test_files.py::test_a_reader_never_finds_a_part_of_the_file",),
    ),
    Fault(
        "git-filters",
        "git runs no program that the configuration of a checkout names",
        "[*SETTINGS, *_without_filters(folder)]",
        "[*SETTINGS]",
        ("tests/hardware/test_checkout.py::test_no_program_that_the_configuration_names_is_run",),
    ),
    Fault(
        "stored-secrets",
        "secrets that an earlier version has stored are not shown",
        "hidden.everywhere(visible.loads(provenance))",
        "visible.loads(provenance)",
        ("tests/cli/test_secrets.py::test_secrets_and_the_host_are_not_shown",),
    ),
    # -- faults from outside
    Fault(
        "unknown-strategy",
        "the devices of a strategy that is unknown here are not taken for replicas",
        "        return Traits(parallelism=Parallelism.OTHER, strategy=name)\n",
        "        return Traits(strategy=name)\n",
        (
            "tests/strategies/test_users_own.py::test_how_a_strategy_that_is_nowhere_uses_its_devices_is_unknown",
            "tests/analysis/test_findings.py::test_devices_that_are_not_known_to_be_replicas_are_not_compared",
        ),
    ),
    Fault(
        "neighbours",
        "a user's file imports the files of its own folder",
        "hashlib.sha256(folder.encode())",
        "hashlib.sha256()",
        (
            "tests/strategies/test_users_own.py::test_files_of_the_same_name_are_different_modules_and_import_their_own_neighbours",
        ),
    ),
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], FAULTS))
