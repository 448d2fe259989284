import inspect
import logging
import re
import sys
import types

import pytest

from dpbench.hardware import nvml, provenance
from dpbench.measure.server import environment
from dpbench.records.environment import HIDDEN
from tests.recorded_nvml import DRIVER_NOT_LOADED, NOT_SUPPORTED, RECORDINGS, Recorded, recorded

UUIDS = tuple(recorded("h100_x4").recording["uuids"])
MIG = next(iter(recorded("h100_x4").recording["mig"]))


def environ(visible):
    return {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}


@pytest.mark.parametrize(
    ("visible", "positions"),
    [
        (None, (0, 1, 2, 3)),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0", (0,)),
        ("2,0", (2, 0)),
        (" 1 , 3", (1, 3)),
        ("+1,3rd", (1, 3)),
        ("0,-1,2", (0,)),
        ("1,7,2", (1,)),
        ("1,x,2", (1,)),
        ("1,1", ()),
        ("0,,1", (0,)),
        (UUIDS[3], (3,)),
        (f"{UUIDS[2]},{UUIDS[0]}", (2, 0)),
        ("GPU-9b,GPU-e", (2, 3)),
        ("GPU-1a6f", ()),
        ("GPU-9b,GPU-1a6f,GPU-e", (2,)),
        ("GPU-9b,GPU-ffff,GPU-e", (2,)),
        ("GPU-9b,GPU-9b03", ()),
        ("GPU-9b,3", (2,)),
        ("3,GPU-9b", (3,)),
        ("GPU-9b,", (2,)),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(visible, positions):
    assert nvml.cuda_visible(visible, UUIDS) == positions
    with nvml.open_nvml(recorded("h100_x4"), environ(visible)) as opened:
        assert [gpu.uuid for gpu in opened.gpus] == [UUIDS[position] for position in positions]
        assert [gpu.index for gpu in opened.gpus] == list(range(len(positions)))
        assert opened.physical_gpus == 4


@pytest.mark.parametrize(
    "visible", [None, "", "-1", "1,7,2", "1,1", "0,-1", "GPU-9b,GPU-e", "GPU-1a6f", "3rd"]
)
def test_visible_devices_are_read_as_torch_reads_them(visible, monkeypatch):
    torch_cuda = pytest.importorskip("torch.cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    named = torch_cuda._parse_visible_devices()
    if named and isinstance(named[0], str):
        named = torch_cuda._transform_uuid_to_ordinals(named, list(UUIDS))
    expected = []
    for position in named:
        if position >= len(UUIDS):
            break
        expected.append(position)
    assert nvml.cuda_visible(visible, UUIDS) == tuple(expected)


def test_mig_instance_is_taken_with_what_it_tells():
    with nvml.open_nvml(recorded("h100_x4"), environ(f"{MIG},MIG-other")) as opened:
        (gpu,) = opened.gpus
        assert (gpu.index, gpu.uuid) == (0, MIG)
        assert gpu.memory_bytes == 10468982784
        assert gpu.read("memory_used_bytes") == 68982784
        assert gpu.read("power_w") is None
    with nvml.open_nvml(recorded("h100_x4"), environ("MIG-GPU-1a6f0c52/1/0")) as opened:
        assert opened.gpus == ()


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_recordings_say_where_they_come_from(path):
    assert (
        "not recorded on hardware" in recorded(path.stem.removeprefix("nvml_")).recording["source"]
    )


def test_units_are_si():
    with nvml.open_nvml(recorded("h100_x4"), {}) as opened:
        gpu = opened.gpus[0]
        assert gpu.memory_bytes == 85520809984
        first = {metric: gpu.read(metric) for metric in nvml.METRICS}
        assert first == {
            "utilization_ratio": 0.0,
            "memory_used_bytes": 25391267840,  # the second answer: opening took the first
            "power_w": 71.25,
            "energy_j": 987654.321,
            "power_limit_w": 700.0,
            "sm_clock_hz": 345e6,
            "memory_clock_hz": 2619e6,
            "temperature_c": 31,
            "throttle_reasons": 1,
        }
        assert gpu.read("utilization_ratio") == 0.43
        assert {4242: 2**30, 4243: 2**29}.items() <= gpu.processes().items()


def test_missing_counters_are_absent_and_asked_once():
    library = recorded("gtx1080")
    with nvml.open_nvml(library, {}) as opened:
        gpu = opened.gpus[0]
        for _ in range(3):
            assert gpu.read("energy_j") is None
            assert gpu.foreign_memory_bytes({4242}) is None
            assert gpu.read("power_w") is not None
        assert library.calls["nvmlDeviceGetTotalEnergyConsumption", gpu.uuid] == 1
        assert library.calls["nvmlDeviceGetPowerUsage", gpu.uuid] == 3


def test_counter_that_has_answered_is_asked_again():
    library = recorded("h100_x4")
    with nvml.open_nvml(library, {}) as opened:
        gpu = opened.gpus[0]
        power = library.recording["gpu"]["nvmlDeviceGetPowerUsage"]
        assert gpu.read("power_w") is not None
        power["error"] = NOT_SUPPORTED
        assert gpu.read("power_w") is None
        power["error"] = None
        assert gpu.read("power_w") is not None


def test_new_name_serves_where_the_old_one_is_gone():
    library = recorded("h100_x4")
    calls = library.recording["gpu"]
    calls["nvmlDeviceGetCurrentClocksEventReasons"] = calls.pop(
        "nvmlDeviceGetCurrentClocksThrottleReasons"
    )
    with nvml.open_nvml(library, {}) as opened:
        assert [opened.gpus[0].read("throttle_reasons") for _ in range(2)] == [1, 4]
        assert library.calls["nvmlDeviceGetCurrentClocksThrottleReasons", UUIDS[0]] == 1


def test_memory_of_others_is_unknown_if_no_process_of_ours_is_listed():
    with nvml.open_nvml(recorded("h100_x4"), {}) as opened:
        assert opened.gpus[0].foreign_memory_bytes({77}) is None


def test_the_memory_of_a_process_is_found_on_every_gpu_also_on_those_that_cuda_does_not_show(
    monkeypatch,
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    library = recorded("h100_x4")
    library.nvmlDeviceGetComputeRunningProcesses_v3 = lambda handle: {
        UUIDS[0]: [
            types.SimpleNamespace(pid=4242, usedGpuMemory=2**29),
            types.SimpleNamespace(pid=9, usedGpuMemory=7),
        ],
        UUIDS[1]: [types.SimpleNamespace(pid=4242, usedGpuMemory=None)],
        UUIDS[2]: [types.SimpleNamespace(pid=4242, usedGpuMemory=2**33)],
    }.get(handle, [])
    found = [(gpu.index, gpu.uuid, size) for gpu, size in nvml.held_by(4242, library)]
    assert found == [(0, UUIDS[0], 2**29), (2, UUIDS[2], 2**33)]
    assert nvml.held_by(77, library) == []
    assert nvml.held_by(4242, recorded("gtx1080")) == [], "this driver lists no processes"
    library.recording["init_error"] = DRIVER_NOT_LOADED
    assert nvml.held_by(4242, library) == []


def test_nvlinks_end_at_a_switch_or_at_a_gpu_and_have_a_rate():
    speed = types.SimpleNamespace(nvmlReturn=0, value=types.SimpleNamespace(ullVal=26562))
    library = recorded("h100_x4")
    asked = "nvmlDeviceGetFieldValues([(90, 0)])"
    library.recording["gpu"][asked] = {"latency_s": 0.0, "answers": [[speed]]}
    for link in range(18):
        name = f"nvmlDeviceGetNvLinkRemoteDeviceType({link})"
        library.recording["gpu"][name] = {"latency_s": 0.0, "answers": [2]}
    found = nvml.describe(library)["gpus"][0]["nvlinks"]
    assert found == {
        "active": 17,
        "inactive": 1,
        "ends": {"switch": 17},
        "bytes_per_s": 26.562e9,
    }


@pytest.mark.parametrize(("version", "rate"), [(6, 25e9), (5, None)])
def test_nvlinks_between_gpus_have_the_address_and_the_rate_of_their_version(version, rate):
    end = types.SimpleNamespace(busId=b"00000000:3B:00.0")
    library = recorded("h100_x4")
    for link in range(18):
        for name, answer in (("RemotePciInfo", end), ("Version", version)):
            call = f"nvmlDeviceGetNvLink{name}({link})"
            library.recording["gpu"][call] = {"latency_s": 0.0, "answers": [answer]}
    found = nvml.describe(library)["gpus"][0]["nvlinks"]
    assert found["ends"] == {"0000:3b:00.0": 17}
    assert found.get("bytes_per_s") == rate, "of version 3.1, it is unknown"


def test_unknown_metric_is_a_lookup_error():
    with nvml.open_nvml(recorded("gtx1080"), {}) as opened, pytest.raises(LookupError):
        opened.gpus[0].read("speed")


@pytest.mark.parametrize("without", ["driver", "gpu"])
def test_without_driver_or_gpu_there_is_none(without):
    library = recorded("gtx1080")
    library.recording.update(
        {"driver": {"init_error": DRIVER_NOT_LOADED}, "gpu": {"uuids": []}}[without]
    )
    with nvml.open_nvml(library, {}) as opened:
        assert opened is None
    assert library.open == 0
    assert nvml.describe(library) == {"physical_gpus": 0, "gpus": []}


def test_without_the_library_there_is_none(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with nvml.open_nvml() as opened:
        assert opened is None
    assert "nvidia-ml-py is not installed" in caplog.text


def test_unofficial_library_is_refused_by_name(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "pynvml", types.ModuleType("pynvml"))
    with nvml.open_nvml() as opened:
        assert opened is None
    assert "not NVIDIA's" in caplog.text
    assert "nvidia-ml-py" in caplog.text


def test_official_library_is_accepted(caplog):
    with caplog.at_level(logging.WARNING), nvml.open_nvml():
        pass
    assert caplog.text == ""


def test_library_is_shut_down_also_after_an_error():
    library = recorded("gtx1080")

    def fail():
        with nvml.open_nvml(library, {}):
            assert library.open == 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert library.open == 0


def test_gpu_that_fell_off_the_bus_is_left_out():
    class Lossy(Recorded):
        def nvmlDeviceGetHandleByIndex(self, index):
            if index == 1:
                raise self.NVMLError(15)  # GPU is lost
            return super().nvmlDeviceGetHandleByIndex(index)

    with nvml.open_nvml(Lossy(recorded("h100_x4").recording), {}) as opened:
        assert [gpu.uuid for gpu in opened.gpus] == [UUIDS[0], UUIDS[2], UUIDS[3]]


def unlike():
    """Return a machine whose second GPU has another name than the other three."""
    library = recorded("h100_x4")
    library.nvmlDeviceGetName = lambda handle: (
        "NVIDIA A2" if handle == UUIDS[1] else "NVIDIA H100 80GB HBM3"
    )
    return library


@pytest.mark.parametrize("visible", [None, "1,0"])
def test_an_order_of_unlike_gpus_that_only_cuda_knows_is_refused(visible):
    fastest = environ(visible) | {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    with pytest.raises(
        LookupError, match=r"FASTEST_FIRST, .*models .NVIDIA A2, NVIDIA H100.*PCI_BUS_ID"
    ):
        nvml.describe(unlike(), fastest)
    assert len(nvml.describe(recorded("h100_x4"), fastest)["gpus"]) in (
        2,
        4,
    ), "like GPUs have one order"
    listed = nvml.describe(
        unlike(), environ(f"{UUIDS[1]},{UUIDS[0]}") | fastest | {"CUDA_VISIBLE_DEVICES": UUIDS[1]}
    )
    assert [gpu["uuid"] for gpu in listed["gpus"]] == [UUIDS[1]]


def test_measuring_processes_number_gpus_as_nvml_does_unless_the_user_chose(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert environment()["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert environment()["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_samples_follow_the_uuids_that_cuda_gives():
    visible = nvml.describe(recorded("h100_x4"), {})["gpus"]
    bare = [uuid.removeprefix("GPU-") for uuid in UUIDS]
    assert nvml.replicas_of((), [bare[2], bare[0]], visible) == {2: 0, 0: 1}
    assert nvml.replicas_of((1, 3), [bare[2], bare[0]], visible) == {
        2: 0,
        0: 1,
    }, "not the ordinals, which may differ"
    assert nvml.replicas_of((), [bare[2], "unknown"], visible) == {2: 0}, (
        "an unknown GPU has no samples"
    )
    assert nvml.replicas_of((3, 1), (), visible) == {3: 0, 1: 1}
    assert nvml.replicas_of((), (), visible) == {0: 0, 1: 1, 2: 2, 3: 3}


def test_a_mig_instance_has_no_samples_of_the_whole_gpu():
    with nvml.open_nvml(recorded("h100_x4"), environ(MIG)) as opened:
        instance = [gpu.describe() for gpu in opened.gpus]
    whole = nvml.describe(recorded("h100_x4"), environ("0"))["gpus"]
    assert len(whole) == len(instance) == 1
    bare = MIG.removeprefix("MIG-")
    assert nvml.replicas_of((0,), [bare], whole) == {}, (
        "memory and power are those of all instances"
    )
    assert nvml.replicas_of((0,), [bare], instance) == {0: 0}
    assert nvml.replicas_of((0,), ["old-form"], instance) == {0: 0}, (
        "with one instance there is nothing to confuse"
    )
    assert nvml.replicas_of((0,), [whole[0]["uuid"]], whole) == {0: 0}


def test_a_script_numbers_unlike_gpus_as_cuda_does():
    order = [UUIDS[0], UUIDS[2], UUIDS[3], UUIDS[1]]
    assert [gpu["uuid"] for gpu in nvml.describe_for(order, unlike(), {})["gpus"]] == order
    assert [gpu["index"] for gpu in nvml.describe_for(order, unlike(), {})["gpus"]] == [0, 1, 2, 3]
    assert nvml.describe_for([], unlike(), {})["gpus"] == [], "the order is unknown"
    assert [gpu["uuid"] for gpu in nvml.describe_for([], recorded("h100_x4"), {})["gpus"]] == list(
        UUIDS
    )


def test_description_names_driver_and_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-e")
    assert nvml.describe(recorded("h100_x4")) == {
        "driver": "570.86.15",
        "cuda_driver": "12.8",
        "physical_gpus": 4,
        "gpus": [
            {
                "index": 0,
                "name": "NVIDIA H100 80GB HBM3",
                "uuid": UUIDS[3],
                "memory_bytes": 85520809984,
                "power_limit_w": 700.0,
                "default_power_limit_w": 700.0,
                "sm_clock_hz": 345e6,
                "memory_clock_hz": 2619e6,
                "application_sm_clock_hz": 1980e6,
                "application_memory_clock_hz": 2619e6,
                "max_sm_clock_hz": 1980e6,
                "max_memory_clock_hz": 2619e6,
                "pcie_generation": 5,
                "pcie_width": 16,
                "pcie_generation_now": 1,
                "pcie_width_now": 16,
                "ecc": True,
                "persistence_mode": True,
                "compute_mode": "exclusive process",
                "nvlinks": {"active": 17, "inactive": 1},
            }
        ],
    }


def test_description_leaves_out_what_is_not_told():
    library = recorded("gtx1080")
    del library.recording["gpu"]["nvmlDeviceGetEnforcedPowerLimit"]
    told = nvml.describe(library)["gpus"][0]
    assert not told.keys() & {"power_limit_w", "ecc", "persistence_mode", "nvlinks"}
    assert None not in told.values()


def test_numbers_and_names_are_those_of_the_real_library():
    pynvml = pytest.importorskip("pynvml")
    never = (
        "INVALID_ARGUMENT NOT_SUPPORTED NO_PERMISSION FUNCTION_NOT_FOUND ARGUMENT_VERSION_MISMATCH"
        " DEPRECATED"
    )
    assert {getattr(pynvml, f"NVML_ERROR_{name}") for name in never.split()} == nvml._NEVER
    assert pynvml.NVMLError(NOT_SUPPORTED).value == NOT_SUPPORTED
    assert (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM) == (nvml._CLOCK_SM, nvml._CLOCK_MEMORY)
    assert pynvml.NVML_TEMPERATURE_GPU == nvml._TEMPERATURE_GPU
    assert pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON == nvml._NVLINK_SPEED
    called = set(re.findall(r"\bnvml[A-Z]\w+", inspect.getsource(nvml)))
    fields = {name for name, _ in pynvml.c_nvmlFieldValue_t._fields_}
    assert called - {*dir(pynvml), *fields} == set()


def test_the_names_of_compute_modes_are_in_the_order_of_the_real_library():
    pynvml = pytest.importorskip("pynvml")
    modes = ("DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED", "EXCLUSIVE_PROCESS")
    assert [getattr(pynvml, f"NVML_COMPUTEMODE_{name}") for name in modes] == [0, 1, 2, 3]
    assert [mode.replace("_", " ").lower() for mode in modes] == list(nvml._COMPUTE_MODES)
    assert pynvml.NVML_NVLINK_MAX_LINKS <= nvml._MOST_NVLINKS


def test_variables_that_change_results_are_recorded_without_paths_and_names_of_users():
    environ = {
        "USER": "alice",
        "CUDA_LAUNCH_BLOCKING": "1",
        "NCCL_ALGO": "Ring",
        "NCCL_DEBUG_FILE": "alice.log",
        "NCCL_TOPO_FILE": "/home/alice/topo.xml",
        "NCCL_CONF_FILE": "/opt/nccl.conf",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "backend:native",
        "NVIDIA_TF32_OVERRIDE": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "CUDA_MODULE_LOADING": "EAGER",
        "OMP_NUM_THREADS": "4",
        "MY_OMP_NUM_THREADS": "4",
        "HF_TOKEN": "secret",
    }
    found = provenance.variables(environ)
    assert environ.keys() - found.keys() == {"USER", "MY_OMP_NUM_THREADS", "HF_TOKEN"}
    hidden = {name for name, value in found.items() if value.startswith(HIDDEN)}
    assert hidden == {"NCCL_DEBUG_FILE", "NCCL_TOPO_FILE", "NCCL_CONF_FILE"}
    assert all(found[name] == environ[name] for name in found.keys() - hidden)
    assert not re.search(r"/|alice|\.conf|\.xml", "".join(found.values()))


def test_values_that_are_not_recorded_differ_as_their_values_do():
    files = ["/lib/libjemalloc.so", "/lib/libtcmalloc.so", "/lib/libjemalloc.so", "/\udcff"]
    first, second, again, odd = (provenance.variables({"LD_PRELOAD": file}) for file in files)
    assert first == again
    assert len({one["LD_PRELOAD"] for one in (first, second, odd)}) == 3


@pytest.mark.parametrize(
    "name", ["TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"]
)
def test_variables_that_decide_times_of_compiled_cases_are_recorded(name):
    assert provenance.variables({name: "1"}) == {name: "1"}
