"""The samples of the host and of a tree of processes, and the process that takes samples."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from dpbench.hardware import samplers as package
from dpbench.hardware.processes import Ticks, parse_ticks
from dpbench.hardware.samplers import SampleFile, host, sampling
from dpbench.records import HOST, Sample
from tests.marked import patience, poll

pytestmark = pytest.mark.usefixtures("all_gpus_visible")

BUSY = "while True: pass"
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")


@pytest.fixture
def child():
    """Start Python processes that end with the test."""
    started = []

    def start(code, *arguments, **options):
        process = subprocess.Popen([sys.executable, "-c", code, *arguments], **options)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream:
                stream.close()


def gone(pid):
    """Return whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# Host


@linux
def test_clock_is_that_of_the_fastest_usable_core(tmp_path):
    assert host.cpu_clock_hz(str(tmp_path)) is None
    cores = sorted(os.sched_getaffinity(0))
    for core, khz in [
        *zip(cores, itertools.cycle(["1200000", "2600000"]), strict=False),
        (max(cores) + 1, "9900000"),
    ]:
        folder = tmp_path / f"cpu{core}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_cur_freq").write_text(f"{khz}\n")
    assert host.cpu_clock_hz(str(tmp_path)) == (2.6e9 if len(cores) > 1 else 1.2e9)


@linux
def test_clock_is_sampled_where_the_kernel_tells_it(monkeypatch):
    monkeypatch.setattr(host, "cpu_clock_hz", lambda: 2.6e9)
    with host.start((), 0.2) as samples:
        assert poll(lambda: [s for s in samples if s.metric == "cpu_clock_hz" and s.device == HOST])


@linux
def test_host_sees_busy_cores(child):
    child(BUSY)
    with host.start((), 0.2) as samples:
        cores = {f"core{core}_utilization_ratio" for core in os.sched_getaffinity(0)}
        assert poll(lambda: cores <= {s.metric for s in samples if s.value > 0})
        assert poll(lambda: any(s.value > 0.5 for s in samples if s.metric in cores))
    found = [s for s in samples if s.metric in cores]
    assert all(s.device == HOST and 0 <= s.value <= 1 for s in found)


STAT = b"""cpu  9 9 9 9 9 9 9 9 0 0
cpu0 100 1 20 1000 5 2 3 4 50 0
cpu2 0 0 0 7 0 0 0 0 0 0
intr 12345
"""


def test_cores_are_parsed_by_their_numbers():
    assert parse_ticks(STAT) == {0: Ticks(busy=126, steal=4, total=1135), 2: Ticks(0, 0, 7)}


def test_the_use_of_cores_follows_from_two_readings():
    before = {0: Ticks(0, 0, 0), 1: Ticks(50, 0, 90), 2: Ticks(9, 0, 9), 3: Ticks(9, 0, 9)}
    now = {
        0: Ticks(200, 0, 200),
        1: Ticks(100, 0, 190),
        2: Ticks(9, 0, 9),  # no time has passed
        3: Ticks(8, 0, 19),  # counts that decrease
        4: Ticks(5, 0, 10),  # a new core
    }
    assert host.utilization(before, now) == {0: 1.0, 1: 0.5, 3: 0.0}


# The watched tree


FAMILY = """
import subprocess, sys, threading
start = lambda: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
children = [start()]
thread = threading.Thread(target=lambda: children.append(start()))  # listed with its thread alone
print(children[0].pid, flush=True)
thread.start()
while len(children) < 2:
    pass
print(children[1].pid, flush=True)
input()
for c in children:
    c.kill()
    c.wait()
"""


@pytest.mark.parametrize("children_files", [True, False])
def test_tree_holds_all_descendants(child, monkeypatch, children_files):
    if children_files and not host.has_children_files():
        pytest.skip("this kernel has no /proc/PID/task/TID/children")
    monkeypatch.setattr(host, "has_children_files", lambda: children_files)
    root = child(FAMILY, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    expected = {root.pid, int(root.stdout.readline()), int(root.stdout.readline())}
    assert host.descendants(root.pid) == expected
    assert expected < host.descendants(os.getpid())
    root.communicate(b"\n", timeout=patience(5))
    assert host.descendants(root.pid) == frozenset()


def test_tree_leaves_out_this_process_and_walks_at_most_twice_a_second(monkeypatch):
    walks = []
    monkeypatch.setattr(
        host, "descendants", lambda root: walks.append(root) or frozenset((root, os.getpid()))
    )
    clock_s = itertools.count(0.0, 0.2)
    tree = host.ProcessTree(1, now=lambda: next(clock_s))
    for _ in range(20):
        assert tree.pids() == {1}
    assert len(walks) <= 9


def test_root_comes_from_the_environment_or_is_the_parent(monkeypatch):
    assert host.root_pid() == os.getpid()
    monkeypatch.delenv(host.ROOT_PID)
    assert host.root_pid() == os.getppid()


# The process


@linux
def test_process_samples_cuts_and_is_reaped(tmp_path):
    output = tmp_path / "samples.jsonl"
    with sampling((), output) as series:
        pid = series.pid
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
        start_s = time.perf_counter()
        time.sleep(0.9)
        middle_s = time.perf_counter()
        first = series.cut(start_s, middle_s)
        assert series.cut(start_s, middle_s) == first
        time.sleep(0.6)
        second = series.cut(middle_s, time.perf_counter())
    assert "core0_utilization_ratio" in {s.metric for s in first}
    assert all(start_s <= s.time_s <= middle_s for s in first)
    assert list(first) == sorted(first, key=lambda s: s.time_s)
    assert second
    assert all(s.time_s >= middle_s for s in second)
    assert not Path(f"/proc/{pid}").exists()
    assert all(len(json.loads(line)) == 4 for line in output.read_text().splitlines())


def test_series_forgets_what_lies_before_and_ignores_what_others_wrote(tmp_path):
    output = tmp_path / "samples.jsonl"
    output.write_text('[1.0, -1, "load_1m", 9.0]\n')
    series = SampleFile(output, output.stat().st_size, None)
    with output.open("a") as file:
        file.write('[3.0, -1, "load_1m", 3.0]\n[2.0, -1, "load_1m", 2.0]\nnonsense\n[4.0, -1, "lo')
    assert series.cut(0.0, 9.0) == (
        Sample(2.0, -1, "load_1m", 2.0),
        Sample(3.0, -1, "load_1m", 3.0),
    )
    with output.open("a") as file:
        file.write('ad_1m", 4.0]\n')
    assert [s.time_s for s in series.cut(2.5, 3.5)] == [3.0]
    assert [s.time_s for s in series.cut(2.5, 9.0)] == [3.0, 4.0]
    assert [s.time_s for s in series.cut(0.0, 9.0)] == [3.0, 4.0]


def test_series_of_hours_keeps_whole_seconds_that_are_spread_evenly(tmp_path, monkeypatch):
    output = tmp_path / "samples.jsonl"
    lines = [
        json.dumps([k / 2, device, "load_1m", 1.0]) + "\n"
        for k in range(4_000)
        for device in (-1, 0)
    ]
    output.write_text("".join(lines))
    monkeypatch.setattr(package, "MOST_BYTES", output.stat().st_size // 10)
    found = SampleFile(output, 0, None).cut(0.0, 2_000.0)
    assert len(found) == pytest.approx(800, rel=0.02)
    assert all(
        len({s.device for s in found if s.time_s == at}) == 2
        for at in {found[0].time_s, found[-1].time_s}
    )
    quarters = [sum(a <= s.time_s < a + 500 for s in found) for a in range(0, 2_000, 500)]
    assert min(quarters) > 0.98 * max(quarters)
    monkeypatch.setattr(package, "MOST_BYTES", output.stat().st_size)
    assert len(SampleFile(output, 0, None).cut(0.0, 2_000.0)) == 8_000


def command(output, parent=None):
    arguments = [str(parent or os.getpid()), str(os.getpid()), "0.1", str(output)]
    return [sys.executable, "-m", "dpbench.hardware.samplers._process", *arguments]


@linux
@pytest.mark.parametrize("way", ["end of stdin", "SIGTERM"])
def test_process_says_ready_and_ends_in_order(tmp_path, way):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command(tmp_path / "out"), stdin=pipe, stdout=pipe, env=environment
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)  # a Ctrl-C is for the parent
        time.sleep(0.3)
        process.stdin.write(b"7\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"7\n"
        written = (tmp_path / "out").read_bytes()
        if way == "SIGTERM":
            process.terminate()
        else:
            process.stdin.close()
        assert process.wait(patience(5)) == 0
    assert written.endswith(b"\n")
    assert (tmp_path / "out").read_bytes().startswith(written)


@linux
def test_process_that_cannot_write_its_samples_says_so_in_one_line(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    (tmp_path / "out").symlink_to("/dev/full")
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command(tmp_path / "out"), stdin=pipe, stdout=pipe, stderr=pipe, env=environment
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.3)
        _, error = process.communicate(b"7\n", timeout=patience(10))
    assert process.returncode == 1
    assert str(tmp_path / "out").encode() in error
    assert error.count(b"\n") == 1, error


PARENT = """
import sys, time
from pathlib import Path
from dpbench.hardware.samplers import sampling
with sampling((), Path(sys.argv[1])) as series:
    print(series.pid, flush=True)
    time.sleep(60)
"""


@linux
def test_process_ends_at_once_also_while_a_forked_process_keeps_its_stdin_open(
    tmp_path, monkeypatch
):
    late = []
    wait = subprocess.Popen.wait

    def waited(process, timeout=None):
        try:
            return wait(process, timeout)
        except subprocess.TimeoutExpired:
            late.append(process.pid)
            raise

    monkeypatch.setattr(package, "STOP_TIMEOUT_S", 20.0)
    monkeypatch.setattr(subprocess.Popen, "wait", waited)
    with sampling((), tmp_path / "out"):
        forked = os.fork()
        if forked == 0:
            signal.pause()
    os.kill(forked, signal.SIGKILL)
    os.waitpid(forked, 0)
    assert not late


@linux
def test_process_dies_with_its_parent(tmp_path, child):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = child(PARENT, str(tmp_path / "out"), stdout=subprocess.PIPE, env=environment)
    pid = int(parent.stdout.readline())
    assert not gone(pid)
    parent.kill()
    assert poll(lambda: gone(pid))


HEIR = """
import os
# the child holds the other end of the sampler's stdin, so only the kernel tells of the death
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
"""


@linux
def test_process_dies_with_its_parent_even_if_its_stdin_stays_open(tmp_path, child):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = PARENT.replace("    print", textwrap.indent(HEIR, "    ") + "    print")
    parent = child(code, str(tmp_path / "out"), stdout=subprocess.PIPE, env=environment)
    pid = int(parent.stdout.readline())
    (heir,) = poll(lambda: host.descendants(parent.pid) - {parent.pid, pid})
    parent.kill()
    try:
        assert poll(lambda: gone(pid))
        assert not gone(heir)
    finally:
        os.kill(heir, signal.SIGKILL)


@linux
def test_process_whose_parent_is_gone_already_ends_at_once(tmp_path, child):
    former = child("")
    former.wait()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = command(tmp_path / "out", former.pid)
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.wait(patience(8)) == 1, "nobody is there to be told"
        assert process.stdout.read() == b""


@linux
def test_dead_sampler_costs_one_warning(tmp_path, caplog):
    with sampling((), tmp_path / "out") as series:
        start_s = time.perf_counter()
        time.sleep(0.3)
        assert series.cut(start_s, time.perf_counter())
        os.kill(series.pid, signal.SIGKILL)
        time.sleep(0.1)
        start_s = time.perf_counter()
        for _ in range(3):
            assert series.cut(start_s, start_s + 1) == ()
    assert caplog.text.count("the sampler process has ended") == 1


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "import time; time.sleep(60)"])
def test_sampler_that_does_not_start_costs_one_warning(tmp_path, caplog, monkeypatch, code):
    executable = tmp_path / "python"
    executable.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}'\n")
    executable.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(executable))
    monkeypatch.setattr(package, "START_TIMEOUT_S", 0.5)
    monkeypatch.setattr(package, "STOP_TIMEOUT_S", 0.2)
    with sampling((), tmp_path / "out") as series:
        assert series.pid is None
        assert series.cut(0.0, time.perf_counter()) == ()
    assert caplog.text.count("did not start") == 1


def test_missing_interpreter_costs_one_warning(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with sampling((), tmp_path / "out") as series:
        assert series.cut(0.0, 1.0) == ()
    assert caplog.text.count("did not start") == 1


PYNVML = """
from tests.recorded_nvml import from_environment
library = from_environment()
_nvmlGetFunctionPointer = None
def __getattr__(name):
    return getattr(library, name)
"""


def test_process_brings_gpu_samples_too(tmp_path, monkeypatch):
    (tmp_path / "pynvml.py").write_text(PYNVML)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DPBENCH_TEST_NVML", "h100_x4")
    with sampling((0, 2), tmp_path / "out", interval_s=0.05) as series:
        start_s = time.perf_counter()
        time.sleep(0.7)
        samples = series.cut(start_s, time.perf_counter())
    assert {s.device for s in samples} >= {0, 2}
    assert {"energy_j", "power_w"} <= {s.metric for s in samples if s.device == 2}


def test_samplers_never_load_torch():
    code = (
        "import sys\nfrom dpbench.records import registry\nimport"
        " dpbench.hardware.samplers._process\n[registry.load('samplers', name) for name in"
        " registry.names('samplers')]\nfrom dpbench.hardware.nvml import"
        " describe\ndescribe()\nassert not {'torch', 'numpy', 'pandas'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
