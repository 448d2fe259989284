"""What one reading raises makes this reading unknown, and is noted once."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator
from inspect import getsource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from dpbench.hardware import foreign_load, gpus, nvml, processes, provenance, readings
from dpbench.measure.worker import facts
from dpbench.records import Case
from dpbench.records.facts import RunFacts
from dpbench.records.load import UnknownLoad
from dpbench.records.resources import Resources
from tests.recorded_nvml import recorded

NO_TEXT = b"\xf8\x01garbage"
"""The name of a GPU under WSL with the drivers 555.85 and 555.99."""


@pytest.fixture(autouse=True)
def _nothing_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "_noted", set())


def _raising(*arguments: Any) -> Any:
    return NO_TEXT.decode()


ODD: dict[str, Callable[..., Any]] = {
    "an error of no kind that NVML has": _raising,
    "bytes that are no text": lambda *_: NO_TEXT,
    "text that cannot be stored": lambda *_: "GPU \udcf8",
    "nothing": lambda *_: None,
    "an object without attributes": lambda *_: object(),
    "digits": lambda *_: "16",
    "a fraction": lambda *_: 16.5,
    "pairs of digits": lambda *_: ("1", "1"),
    "not a number": lambda *_: math.nan,
    "a negative number": lambda *_: -1,
    "all bits set": lambda *_: 2**32 - 1,
    "objects without attributes": lambda *_: (0, [object()]),
}
CALLS = sorted(set(re.findall(r"\bnvml(?:Init|Shutdown|Device|System)\w*", getsource(nvml))))


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_an_odd_answer_of_nvml_ends_nothing_and_can_be_stored(odd: Callable[..., Any]) -> None:
    for call in CALLS:
        library: Any = recorded("gtx1080")
        library.sleep = lambda seconds: None
        setattr(library, call, odd)
        told = nvml.describe(library, {})
        json.dumps(told, ensure_ascii=False, allow_nan=False).encode()
        RunFacts.of({"gpus": told})
        nvml.held_by(4242, library)
        with nvml.open_nvml(library, {}) as opened:
            for gpu in opened.gpus if opened else ():
                gpu.foreign_memory_bytes({4242})
                gpu.utilization_samples(0)
                gpu.process_utilization(0)
                read = [gpu.read(metric) for metric in nvml.METRICS]
                assert all(math.isfinite(value) for value in read if value is not None), call


def test_a_name_that_is_no_text_leaves_everything_else_known_and_is_noted_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    library: Any = recorded("h100_x4")
    whole = nvml.describe(library, {})["gpus"]
    library.nvmlDeviceGetName = _raising
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = nvml.describe(library, {})["gpus"]
    assert len(found) == 4
    assert [gpu.keys() ^ told.keys() for gpu, told in zip(found, whole, strict=True)] == [
        {"name"}
    ] * 4
    assert len(caplog.records) == 1
    assert "nvmlDeviceGetName" in caplog.text
    assert "UnicodeDecodeError" in caplog.text


def test_a_gpu_with_an_unknown_uuid_keeps_its_number() -> None:
    library: Any = recorded("h100_x4")
    first, second, *_ = library.recording["uuids"]
    library.nvmlDeviceGetUUID = lambda handle: NO_TEXT if handle == first else handle
    with nvml.open_nvml(library, {}) as opened:
        assert opened
        assert [gpu.uuid for gpu in opened.gpus][:2] == ["", second]
        assert [gpu.index for gpu in opened.gpus] == [0, 1, 2, 3]


def test_pynvml_that_raises_at_import_is_like_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "pynvml.py").write_text("raise OSError('cannot map the library')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    assert nvml.describe() == {"physical_gpus": 0, "gpus": []}
    assert "cannot map the library" in caplog.text
    assert nvml.problem()


@pytest.fixture
def torch_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Let the subprocess that lists GPUs import a torch whose module `cuda` has this source."""

    def given(cuda: str) -> None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text("from torch import cuda\n")
        (tmp_path / "torch" / "cuda.py").write_text(cuda)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(gpus, "_build", lambda: ("torch 2.14.1+cu130", True))
        gpus.of_torch.cache_clear()

    yield given
    gpus.of_torch.cache_clear()


UNNAMED = """
class Properties:
    uuid, total_memory, major, minor = "12-34", 2**34, 8, 0

    @property
    def name(self):
        return b"\\xf8".decode()

is_available = lambda: True
device_count = lambda: 1
get_device_properties = lambda index: Properties()
"""


def test_a_gpu_whose_name_torch_cannot_tell_is_used(
    torch_with: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(nvml, "_import_library", lambda: None)
    torch_with(UNNAMED)
    facts = gpus.describe()
    assert [gpu["memory_bytes"] for gpu in facts["gpus"]] == [2**34]
    assert "UnicodeDecodeError" in caplog.text
    assert [gpu.get("name", "unknown") for gpu in facts["gpus"]] == ["unknown"]
    assert Resources.of(RunFacts.of({"gpus": facts})).gpu == "a GPU"
    assert "without a name" in gpus.of_torch().names([0])


def test_torch_tells_the_name_that_nvml_does_not_know(
    torch_with: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    library: Any = recorded("gtx1080")
    library.nvmlDeviceGetName = _raising
    uuid = library.recording["uuids"][0].removeprefix("GPU-")
    monkeypatch.setattr(nvml, "_import_library", lambda: library)
    torch_with(
        "from types import SimpleNamespace\n"
        "is_available = lambda: True\ndevice_count = lambda: 1\n"
        "get_device_properties = lambda index: SimpleNamespace("
        f"name='GTX 1080', uuid={uuid!r}, total_memory=2**33, major=6, minor=1)\n"
    )
    (gpu,) = gpus.describe()["gpus"]
    assert (gpu["name"], gpu["uuid"]) == ("GTX 1080", f"GPU-{uuid}")
    assert "power_limit_w" in gpu


@pytest.mark.parametrize("said", ["print('bye')", "print(b'\\xf8'.decode())", ""])
def test_a_torch_that_lists_no_gpus_in_the_expected_form_has_none(
    torch_with: Callable[[str], None], said: str
) -> None:
    torch_with("is_available = lambda: False\n")
    wrong = f"import atexit\nimport sys\natexit.register(lambda: sys.stdout.write('bye'))\n{said}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpus, "_QUESTION", wrong)
        found = gpus.of_torch()
    assert not found.gpus
    assert found.missing


def test_the_load_of_others_is_unknown_if_psutil_raises_any_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cpu_times(self: Any) -> Any:
        raise KeyError("utime")

    monkeypatch.setattr(psutil.Process, "cpu_times", cpu_times)
    assert isinstance(foreign_load.snapshot(), UnknownLoad)


def test_the_version_of_a_damaged_package_is_unknown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def damaged(name: str) -> str:
        raise UnicodeDecodeError("utf-8", NO_TEXT, 0, 1, "invalid start byte")

    monkeypatch.setattr(provenance.metadata, "version", damaged)
    assert [provenance.version("torch") for _ in range(2)] == ["", ""]
    assert len(caplog.records) == 1


def test_the_peak_of_a_process_whose_name_is_no_text_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status = b"Name:\t\xd0\nVmHWM:\t     2048 kB\n"
    monkeypatch.setattr(Path, "read_bytes", lambda self: status)
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: status.decode(encoding))
    assert processes.resident_peak() == 2048 * 1024


def test_an_error_of_a_fact_about_torch_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    products = facts.float32.products("cpu", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", _raising)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(facts.float32, "products", lambda *_: products)
    case = Case(model="mlp", strategy="single", batch_size=2, device_kind="cuda")
    device: Any = SimpleNamespace(torch_device=torch.device("cuda", 0))
    found = facts.torch_facts(case, device)
    assert found["gpu"] is None
    assert found["torch"] == torch.__version__
