"""Steps on logical CPU devices: phases put together from figures and profiles that are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpbench.cli.predicted import predictions_table
from dpbench.predict.cases import Predictor, most_devices, strategies
from dpbench.predict.cpu_model import ENGINE, ProbedHost, step
from dpbench.records import UNATTRIBUTED, Case, Cost, Profile, machine
from dpbench.records.machine import Gpu, Link, Machine, UnknownMachine

PROFILE = Profile(
    model="net", parameter_tensors=4, parameter_bytes=2**20, buffer_bytes=0, input_bytes=0, output_bytes=0,
    forward_flop=1, backward_flop=2, modules=2, source="measured", forward=Cost(1.0, 0.1), loss=Cost(0.01, 0.0),
    backward=Cost(2.0, 0.2), optimizer=Cost(0.5, 0.0),
)  # fmt: skip
FIGURES = {
    "tensor_copy_s": 0.0, "module_replica_s": 0.0,
    "copy_64_kib_bytes_per_s": 2.0**40, "copy_1024_kib_bytes_per_s": 2.0**20,
    "all_reduce_32_kib_s": 0.01, "all_reduce_1024_kib_s": 0.32,
    "resnet18_forward_2_threads_ratio": 1.2, "resnet18_forward_2_new_threads_ratio": 1.5,
    "resnet18_training_2_threads_ratio": 1.1,
    "resnet18_forward_2_processes_ratio": 1.0, "resnet18_training_2_processes_ratio": 1.0,
    **{
        f"{schedule}_{phase}_{part}": 0.0
        for schedule in ("reference", "fastest_pool", "fastest_serial")
        for phase in (*ENGINE, "loss_more", "backward_more", "optimizer_more")
        for part in ("s", "tensor_s")
    },
    **{
        f"ddp_{phase}_{part}": 0.0
        for phase in ("scatter", "forward_more", "loss_more", "backward_more", "reduce", "optimizer_more", UNATTRIBUTED)
        for part in ("s", "tensor_s")
    },
    "ddp_reduce_s": 0.01,  # a small all-reduce
    "ddp_long_reduce_s": 0.01, "ddp_long_reduce_tensor_s": 0.0,
}  # fmt: skip
HOST = ProbedHost(FIGURES)


def case(strategy: str, schedule: str = "", batch_size: int = 20, devices: int = 2) -> Case:
    return Case(model="net", strategy=strategy, schedule=schedule, batch_size=batch_size, devices=devices)


def test_one_device_is_its_profile() -> None:
    assert step(case("single", devices=1), replace(PROFILE, rest=Cost(0.25)), HOST) == {
        "forward": 3.0, "loss": 0.01, "backward": 6.0, "optimizer": 0.5, "unattributed": 0.25,
    }  # fmt: skip


def test_the_reference_goes_backward_in_one_thread() -> None:
    found = step(case("dp", "reference"), PROFILE, HOST)
    assert found["forward"] == pytest.approx(2.0 * 1.5), "ten rows, in new threads beside each other"
    assert found["backward"] == pytest.approx(2 * 4.0), "one replica after the other"
    assert found["reduce"] == pytest.approx(1.5), "a mebibyte at a mebibyte a second, read twice and written"
    assert found["optimizer"] == 0.5


def test_fastest_goes_forward_and_backward_in_kept_threads() -> None:
    found = step(case("dp", "fastest"), PROFILE, HOST)
    assert found["forward"] == pytest.approx(2.0 * 1.2)
    assert found["forward"] + found["backward"] == pytest.approx(6.0 * 1.1)


def test_fastest_does_without_threads_where_they_cost_more() -> None:
    host = ProbedHost({**FIGURES, "resnet18_training_2_threads_ratio": 1.9, "fastest_pool_unattributed_s": 9.0})
    found = step(case("dp", "fastest"), PROFILE, host)
    assert found["forward"] == pytest.approx(2 * 2.0), "one replica after the other"
    assert found["backward"] == pytest.approx(2 * 4.0)
    assert found["loss"] == pytest.approx(2 * 0.01)
    assert found["reduce"] == pytest.approx(1.5), "of all bytes: nobody else sums the other half"
    assert found["unattributed"] == 0.0


def test_the_device_with_most_small_gradients_is_waited_for() -> None:
    host = ProbedHost({**FIGURES, "fastest_pool_reduce_tensor_s": 0.1})
    even = step(case("dp", "fastest"), PROFILE, host)["reduce"]
    skewed = replace(PROFILE, gradient_bytes=(4, 4, 4, 2**20 - 12))
    assert even == pytest.approx(4 * 0.1 + 1.5 / 2, rel=0.01)
    assert step(case("dp", "fastest"), skewed, host)["reduce"] == pytest.approx(8 * 0.1 + 1.5 / 2, rel=0.01)


def test_ddp_waits_for_its_last_bucket() -> None:
    found = step(case("ddp"), PROFILE, HOST)
    assert found["forward"] == pytest.approx(2.0)
    assert found["reduce"] == pytest.approx(1.0 + 0.32), "the copies to and from the bucket, and an all-reduce of it"


def test_copies_have_the_rates_of_their_own_sizes() -> None:
    sizes = (2**10, 64 * 2**10, 2**20)
    assert HOST.moves_s(sizes) == pytest.approx(2**-30 + 2**-24 + 1.0)
    whole = replace(PROFILE, gradient_bytes=(2**20,))
    small = replace(PROFILE, gradient_bytes=(2**16,) * 16)
    copied = step(case("dp", "reference"), whole, HOST)["replicate"]
    assert copied == pytest.approx(1.0)
    assert step(case("dp", "reference"), small, HOST)["replicate"] < 1e-5


def test_modules_that_the_chains_have_too_cost_nothing_more() -> None:
    host = ProbedHost({**FIGURES, "module_replica_s": 1.0, "reference_unattributed_tensor_s": 0.1})
    found = [step(case("dp", "reference"), replace(PROFILE, modules=count), host) for count in (5, 7)]
    assert [one["replicate"] - 1.0 for one in found] == pytest.approx([0.0, 2 * 2.0]), "two more, in two replicas"
    assert [one[UNATTRIBUTED] for one in found] == pytest.approx([4 * 0.1, 8 * 0.1]), "two parameters for a module"


def test_ranks_that_compute_for_long_wake_up_later() -> None:
    host = ProbedHost({**FIGURES, "ddp_long_reduce_s": 0.02, "ddp_long_reduce_tensor_s": 0.001})
    short = replace(PROFILE, forward=Cost(1e-4), backward=Cost(2e-4))
    assert step(case("ddp"), PROFILE, host)["reduce"] == pytest.approx(1.0 + 0.32 + 0.01 + 4 * 0.001)
    assert step(case("ddp"), short, host)["reduce"] == pytest.approx(1.0 + 0.32)


def test_one_rank_reduces_with_nobody() -> None:
    found = step(
        case("ddp", devices=1), PROFILE, ProbedHost({**FIGURES, "ddp_long_reduce_s": 9.0, "ddp_reduce_s": 0.012})
    )
    assert found["reduce"] == pytest.approx(1.0 + 0.002)
    found = step(case("ddp", devices=1), PROFILE, ProbedHost({**FIGURES, "ddp_reduce_s": 0.001}))
    assert found["reduce"] == pytest.approx(1.0), "its copies remain"


def test_ranks_take_from_each_other_what_the_probe_saw() -> None:
    beside = {"resnet18_forward_2_processes_ratio": 1.5, "resnet18_training_2_processes_ratio": 1.25}
    found, plain = step(case("ddp"), PROFILE, ProbedHost({**FIGURES, **beside})), step(case("ddp"), PROFILE, HOST)
    assert found["forward"] == pytest.approx(2.0 * 1.5)
    assert found["forward"] + found["backward"] - plain["forward"] - plain["backward"] == pytest.approx(0.25 * 6.0)


def test_what_ddp_costs_beside_the_net_is_a_step_and_a_parameters() -> None:
    host = ProbedHost(
        {**FIGURES, "ddp_backward_more_tensor_s": 0.1, "ddp_forward_more_s": 0.5, "ddp_unattributed_s": 0.25}
    )
    found, plain = step(case("ddp"), PROFILE, host), step(case("ddp"), PROFILE, HOST)
    assert found["backward"] - plain["backward"] == pytest.approx(4 * 0.1)
    assert found["forward"] - plain["forward"] == pytest.approx(0.5)
    assert found["unattributed"] == 0.25


def test_buckets_but_the_last_are_hidden() -> None:
    sizes = (2**20, 26 * 2**20, 512 * 2**10)
    found = step(case("ddp"), replace(PROFILE, gradient_bytes=sizes), HOST)
    small = 0.01 + (0.32 - 0.01) * (512 - 32) / (1024 - 32)
    assert found["reduce"] == pytest.approx(27.5 + small), "every gradient is copied, and one bucket waited for"


def test_all_reduces_are_interpolated_and_extrapolated() -> None:
    assert HOST.all_reduce_s(4) == 0.01
    assert HOST.all_reduce_s(2**20) == pytest.approx(0.32)
    assert HOST.all_reduce_s(2 * 2**20) > 0.6


def test_a_ratio_is_never_below_one() -> None:
    assert ProbedHost({**FIGURES, "resnet18_forward_2_threads_ratio": 0.5}).beside("net", "forward_2_threads") == 1.0


def test_what_is_not_known_is_refused() -> None:
    wrongs = (
        case("dp", "cached"), case("dp", "reference", devices=3), case("torch_dp"), case("torch_dp", devices=1),
        case("single_all_cores", devices=1),
    )  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(ValueError, match="can be predicted"):
            step(wrong, PROFILE, HOST)
    with pytest.raises(
        ValueError, match="no duration for one of the phases of a step; measure the model with dpbench run"
    ):
        step(case("dp", "reference"), replace(PROFILE, forward=None), HOST)


def on_host(figures: dict[str, float]) -> Machine:
    return Machine(
        name="here", description="", peer_access=False, gpu=Gpu(name="x", count=8), probe=figures,
        links=(Link("gpu0", "cpu0", "memory", 1e10),),
    )  # fmt: skip


def test_predictions_for_logical_devices_are_labelled_experimental() -> None:
    predictor = Predictor(on_host(FIGURES), measured={("net", "small", "fp32"): PROFILE})
    header, *_, line = predictions_table([predictor.predict(case("ddp"))]).splitlines()
    assert header.endswith("label")
    assert line.endswith("PREDICTED, EXPERIMENTAL, CPU-ONLY")


def test_a_file_without_a_figure_says_how_to_write_it_again() -> None:
    predictor = Predictor(on_host({}), measured={("net", "small", "fp32"): PROFILE})
    with pytest.raises(UnknownMachine, match=r"no section \[probe.reference_scatter_s\].*dpbench probe --output"):
        predictor.predict(case("dp", "reference"))


def test_figures_are_read_by_name() -> None:
    described = {
        "peer_access": False, "gpu": {"name": "x", "count": 1},
        "link": [{"between": ["gpu0", "cpu0"], "kind": "memory", "bytes_per_s": 1e10}],
        "probe": {"a_s": {"value": 3.0, "low": 2.0, "high": 4.0, "how": ""}, "a_ratio": {"value": 2.0, "how": ""}},
    }  # fmt: skip
    assert machine.read(described, "here").probe == {"a_s": 3.0, "a_ratio": 2.0}


def test_a_prediction_has_the_phases_one_after_the_other() -> None:
    predictor = Predictor(on_host(FIGURES), measured={("net", "small", "fp32"): PROFILE})
    found = predictor.predict(case("dp", "reference"))
    expected = step(case("dp", "reference"), PROFILE, HOST)
    (charged,) = found.trial().ledger.phases
    assert found.seconds == pytest.approx(sum(expected.values()))
    assert {name: s for name, s in charged.items() if s > 1e-9} == pytest.approx(
        {name: s for name, s in expected.items() if s > 0}
    )
    assert found.low_s < found.seconds < found.high_s
    assert found.profile == "measured"


def test_logical_devices_are_predicted_from_measured_steps_alone() -> None:
    with pytest.raises(UnknownMachine, match=r"needs a measured step on one device; use --from FILE "):
        Predictor(on_host(FIGURES)).predict(case("dp", "reference"))
    assert strategies(on_host(FIGURES)) == ("single", "dp", "ddp")
    assert most_devices(on_host(FIGURES)) == 2


def test_an_all_reduce_that_was_held_up_is_bounded_by_a_larger_one() -> None:
    host = ProbedHost({**FIGURES, "all_reduce_256_kib_s": 5.0})
    assert host.all_reduce_s(256 * 2**10) == pytest.approx(0.32)
    assert host.all_reduce_s(32 * 2**10) == 0.01
