"""The measured bus of a prediction: a number or nccl-tests' output, and narrower intervals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dpbench.cli import cli
from dpbench.predict import network
from dpbench.predict.constants import DEFAULT

CURVE = (
    (524288, 60.71, 15.11),
    (1048576, 76.13, 24.1),
    (2097152, 96.28, 38.12),
    (16777216, 256.7, 114.38),
    (134217728, 1157.2, 202.97),
    (1073741824, 8164.5, 230.15),
    (8589934592, 63870.0, 235.36),
)
"""All-reduces of eight A100-SXM4-40GB as (bytes, µs, bus bandwidth in GB/s):
microsoft/superbench-results @5e77aa7, v0.2.1/Azure-NDv4-A100.
"""
PREDICT = [
    "predict",
    "--machine",
    "rtx-3090-x8",
    "--models",
    "resnet50",
    "--strategies",
    "single,ddp",
    "--devices",
    "1,8",
    "--step-s",
    "0.09",
]


def printed(curve: tuple[tuple[int, float, float], ...] = CURVE) -> str:
    """Return the text that all_reduce_perf prints for these all-reduces."""
    head = (
        "# nThread 1 nGpus 8\n#       size         count      type   redop    root     time   algbw"
        "   busbw #wrong\n"
    )
    line = (
        "{:12d} {:13d}     float     sum      -1   {:.2f}   {:.2f}   {:.2f}      0   {:.2f}  {:.2f}"
        "  {:.2f}   N/A\n"
    )
    rows = [
        line.format(b, b // 4, us, b / us / 1e3, bus, us, b / us / 1e3, bus) for b, us, bus in curve
    ]
    return head + "".join(rows) + "# Avg bus bandwidth    : 93.1\n"


def test_the_output_of_nccl_tests_gives_back_its_durations(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce.txt"
    path.write_text(printed())
    found = network.collective(str(path))
    for size, us, _ in CURVE:
        wire = 2 * 7 / 8 * size / found.bytes_per_s
        assert found.start_s + wire + found.root_s * wire**0.5 == pytest.approx(us * 1e-6, rel=0.15)


def test_a_number_is_the_bandwidth_of_the_largest_all_reduces() -> None:
    found = network.collective("42.5")
    assert (found.bytes_per_s, found.start_s, found.root_s) == (
        42.5e9,
        DEFAULT.start_s,
        DEFAULT.root_s,
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("-3", "must be a number of GB/s from 0.01 to 10000, got -3"),
        ("inf", "must be a number of GB/s from 0.01 to 10000, got inf"),
        ("42e9", "must be a number of GB/s from 0.01 to 10000, got 42e9"),
        ("gather.txt", "has usable lines of all_reduce_perf for 0 sizes"),
        ("scatter.txt", "is the output of reduce_scatter_perf; give the output of all_reduce_perf"),
        ("absent.txt", "neither a bandwidth in GB/s nor a file that can be read"),
        (
            "empty.txt",
            "has usable lines of all_reduce_perf for 0 sizes, but at least 3 sizes are needed",
        ),
        ("short.txt", "has usable lines of all_reduce_perf for 2 sizes"),
    ],
)
def test_a_bus_that_cannot_be_read_is_an_error_of_usage(
    given: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("# no result\n")
    Path("short.txt").write_text(printed(CURVE[:2]))
    Path("gather.txt").write_text(printed().replace(" sum ", " none"))
    Path("scatter.txt").write_text(f"# Collective test starting: reduce_scatter_perf\n{printed()}")
    with pytest.raises(ValueError, match=said):
        network.collective(given)


@pytest.mark.slow
def test_a_measured_bus_narrows_the_interval() -> None:
    runner = CliRunner()
    spans = []
    for given in ([], ["--bus", "3.5"]):
        found = json.loads(
            runner.invoke(cli, [*PREDICT, *given, "--json"], catch_exceptions=False).stdout
        )
        step = next(one["step_s"] for one in found["cases"] if one["case"]["devices"] == 8)
        spans.append((step["high"] - step["low"]) / step["value"])
    assert spans[1] < spans[0]


def test_the_bus_of_one_node_is_refused_for_cases_on_several() -> None:
    asked = [
        "predict",
        "--machine",
        "dgx-1-v100-x128",
        "--models",
        "resnet50",
        "--strategies",
        "single,ddp",
    ]
    done = CliRunner().invoke(cli, [*asked, "--devices", "1,16", "--bus", "130"])
    assert done.exit_code != 0
    assert "runs on 2 nodes" in done.output


def test_a_faster_bus_makes_ddp_faster() -> None:
    steps = []
    for rate in ("2", "20"):
        found = json.loads(
            CliRunner()
            .invoke(cli, [*PREDICT, "--bus", rate, "--json"], catch_exceptions=False)
            .stdout
        )
        steps.append(
            next(one["step_s"]["value"] for one in found["cases"] if one["case"]["devices"] == 8)
        )
    assert steps[1] < steps[0]


def test_strategies_of_one_process_are_left_out_of_several_nodes_and_said_to_be() -> None:
    asked = ["predict", "--machine", "dgx-1-v100-x128", "--models", "resnet50", "--json"]
    found = CliRunner().invoke(cli, [*asked, "--strategies", "ddp,torch_dp", "--devices", "8,16"])
    assert found.exit_code == 0
    cases = [
        (one["case"]["strategy"], one["case"]["devices"])
        for one in json.loads(found.stdout)["cases"]
    ]
    assert cases == [("ddp", 8), ("ddp", 16), ("torch_dp", 8)]
    assert found.stderr.startswith("left out, because ")
    assert found.stderr.rpartition(": ")[2].split() == [
        "resnet50",
        "full",
        "torch_dp",
        "x16",
        "cuda",
        "batch",
        "512",
    ]


def test_the_prediction_to_ask_for_next_is_of_the_same_machine() -> None:
    asked = ["predict", "--machine", "dgx-station-v100", "--models", "resnet50", "--json"]
    found = CliRunner().invoke(cli, [*asked, "--strategies", "ddp", "--devices", "2"])
    (answer,) = json.loads(found.stdout)["answers"]
    _, *command = answer["command"].split()
    assert command[:3] == ["predict", "--machine", "dgx-station-v100"]
    again = CliRunner().invoke(cli, [*command, "--json"])
    assert again.exit_code == 0, again.stderr
    assert {one["case"]["devices"] for one in json.loads(again.stdout)["cases"]} == {1, 2, 4}
