"""Server: a process that has imported torch and forks one fresh worker per request.

When the server is ready, it writes {"ready": torch's version} to stdout. Requests are lines of JSON
on stdin; see `measure.request`. The server answers each on stdout with {"pid": n} and, after the
worker with this process id has ended, with {"exit": status, "peak_bytes": the peak of the worker's
resident set}. The worker uses the folder that the request names. It writes its trials to the file
`trials.json`, its output to `log` and, on SIGUSR1, its Python stacks to `stacks`.

The server process runs no tensor operation, because workers that are forked after a multi-threaded
operation would hang.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from dpbench.hardware import interpreter

if __name__ == "__main__":
    interpreter.watch_gil()  # before any package is imported

from dpbench.hardware import processes
from dpbench.records import signals

# before importing torch, because the parent may die while torch loads (over 1 s)
if __name__ == "__main__":
    processes.die_with_parent(int(sys.argv[1]))
    signals.ignore()  # the parent ends this process
    signals.release()
    gc.disable()  # collections take a fifth of the time of the imports, and find almost no garbage

# without this variable, torch looks for devices by creating a CUDA context, which does not survive
# a fork
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
import torch._dynamo
import torch.distributed
import torch.optim

from dpbench.hardware import processes
from dpbench.measure.request import UNWRITTEN, Request
from dpbench.measure.worker import bench
from dpbench.measure.worker import trial as trials
from dpbench.records import files, registry
from dpbench.records.trial import Failure


def serve() -> None:
    """Load all strategies and models of dpbench, then answer requests until stdin ends.

    Raises RuntimeError if loading them has initialised CUDA.
    """
    processes.keep()
    processes.adopt()
    for kind in ("strategies", "models"):
        for name in registry.own(kind):
            registry.load(kind, name)
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "importing dpbench's strategies and models initialised CUDA, so workers cannot be"
            " forked; no module may use CUDA when it is imported"
        )
    # else collections in workers write to the shared pages, and each worker gets copies
    gc.freeze()
    bench.frozen()  # cache the answer, which workers inherit
    gc.enable()
    answers = os.dup(1)
    os.dup2(2, 1)  # other output must not be mistaken for an answer

    def say(**answer: Any) -> None:
        os.write(answers, json.dumps(answer).encode() + b"\n")

    say(ready=torch.__version__)
    for line in sys.stdin:
        request = Request.from_json(line)
        server = os.getpid()
        grouped, in_group = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(answers)
            os.close(grouped)
            # start a new process group, so that the ranks can be killed together with the worker
            os.setsid()
            os.close(in_group)
            _work(request, server)
        os.close(in_group)
        # returns when the worker has its process group, which the parent may kill from then on
        os.read(grouped, 1)
        os.close(grouped)
        say(pid=pid)
        _, status, usage = os.wait4(pid, 0)
        # processes that the worker has left running, also those in another session
        processes.end_children()
        say(exit=os.waitstatus_to_exitcode(status), peak_bytes=usage.ru_maxrss * 1024)


def _work(request: Request, server: int) -> None:
    """Run a request in this forked worker, write the trials to its folder, and exit.

    The process exits without Python's cleanup, which could hang.
    """
    born_s = time.perf_counter()
    folder = request.folder
    try:
        # the server ignores these signals, but they must end the processes that the model starts
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        processes.die_with_parent(server)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        null = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, target)
        with (folder / "stacks").open("w", encoding="utf-8") as stacks:
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
            # Python 3.14's stack of C would be all that a failure's last lines hold
            python_alone = {"c_stack": False} if sys.version_info >= (3, 14) else {}
            faulthandler.enable(file=sys.__stderr__ or stacks, **python_alone)
            started_s = time.time()
            done = trials.work(request)
        if isinstance(done, Failure):
            _fail(done, folder)
        start_s = born_s - request.requested_s
        done = [
            replace(
                trial,
                round=request.round,
                started_s=started_s,
                setup={"start_s": start_s, **trial.setup},
            )
            for trial in done
        ]
        files.write(folder / "trials.json", json.dumps([trial.to_dict() for trial in done]))
        os._exit(0)
    except OSError:  # the errors of a case are part of its trial
        _leave(UNWRITTEN)
    except BaseException:
        _leave(1)


def _leave(status: int) -> NoReturn:
    """Print the current exception's traceback, and exit, even if the log cannot be written."""
    import traceback

    try:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


LINGER_S = 1.0
"""The seconds for which a failed rank stays connected, to report before its peers fail."""


def _fail(failure: Failure, folder: Path) -> NoReturn:
    """Write `failure.json` to `folder`, and exit after `LINGER_S` seconds."""
    print(failure.traceback, file=sys.stderr, flush=True)
    files.write(folder / "failure.json", failure.to_json())
    time.sleep(LINGER_S)
    os._exit(0)


if __name__ == "__main__":
    serve()
