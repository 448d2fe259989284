"""The false alarms of the gate: replays of a small record, and the report of given decisions."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.scripts import gate_alarms
from dpbench.gating.judge import LOOKS, Answer

PAIRS = 100


def drawn(seed: int = 0, between: float = 0.01) -> list[list[list[list[float]]]]:
    """Return pairs, whose blocks differ by `between` on a logarithmic scale."""
    draw = np.random.default_rng(seed)

    def block() -> list[float]:
        wall_s = 0.005 * float(np.exp(between * draw.standard_normal()))
        return [wall_s, wall_s, 2**28]

    def pair() -> list[list[list[float]]]:
        return [[block() for _ in range(4)] for _ in "ab"]

    return [pair() for _ in range(PAIRS)]


@pytest.mark.parametrize(
    ("planted", "answer"), [(0, Answer.NOT_SLOWER), (10, Answer.SLOWER), (20, Answer.SLOWER)]
)
def test_replays_say_what_was_planted(planted: int, answer: Answer) -> None:
    found = gate_alarms.replays(drawn(), "replayed", planted, 12)
    assert {one.answer for one in found} == {answer}
    assert not any(one.wrong or one.more_memory for one in found)
    assert found == gate_alarms.replays(drawn(), "replayed", planted, 12)


def test_a_noisy_record_gives_no_answer_after_all_pairs() -> None:
    (found,) = gate_alarms.replays(drawn(between=1.0), "replayed", 5, 1)
    assert (found.answer, found.pairs) == (Answer.UNKNOWN, LOOKS[-1])


def test_more_decisions_than_the_record_can_give_are_refused() -> None:
    most = 2 * PAIRS
    with pytest.raises(SystemExit, match="pairs"):
        gate_alarms.replays(drawn(), "replayed", 0, most + 1)


def test_a_pair_survives_being_stored() -> None:
    pair = gate_alarms.loaded(drawn()[0])
    again = gate_alarms.loaded(gate_alarms.stored(pair))
    assert again.head.blocks[0].wall_s == pytest.approx(pair.head.blocks[0].wall_s, rel=1e-6)
    assert again.base.memory_bytes == pair.base.memory_bytes


@pytest.mark.parametrize(
    ("planted", "answer", "high", "wrong"),
    [
        (0, "slower", 1.1, False),  # a false alarm, which is counted as such
        (0, "not slower", 0.99, False),
        (3, "not slower", 1.04, False),
        (3, "not slower", 0.99, True),
        (10, "not slower", 1.04, True),
        (10, "cannot tell", 1.2, False),
    ],
)
def test_the_wrong_direction(planted: int, answer: str, high: float, wrong: bool) -> None:
    assert gate_alarms.is_wrong(planted, answer, high) is wrong


def test_the_report_says_whether_what_was_expected_was_found(tmp_path: Path) -> None:
    def made(planted: int, answer: str, count: int) -> list[dict[str, object]]:
        return [{"tool": gate_alarms.GATE, "planted": planted, "answer": answer}] * count

    data = gate_alarms.read(tmp_path) | {"check": {"10": [0.09, 0.1, 0.11]}}
    data["decisions"] = made(0, "not slower", 20) + made(10, "slower", 20)
    assert "0 false alarms of 20, planted 10 % found in 20 of 20" in gate_alarms.report(data)
    assert "10.0 % for 10 %" in gate_alarms.report(data)
    assert "not as expected" not in gate_alarms.report(data)
    data["decisions"] += made(0, "slower", 1)
    assert "not as expected" in gate_alarms.report(data)


def test_the_committed_report_is_that_of_its_data() -> None:
    data = gate_alarms.read(gate_alarms.FOLDER)
    text = (gate_alarms.FOLDER / "README.md").read_text(encoding="utf-8")
    assert text == gate_alarms.report(data), "run python -m benchmarks.scripts.gate_alarms table"
    assert (gate_alarms.FOLDER / gate_alarms.DATA).stat().st_size < 1_000_000


def test_each_commit_of_the_project_applies_the_layer_as_often_as_planted() -> None:
    with gate_alarms.project() as place:
        for percent, more in gate_alarms.PLANTED.items():
            text = (place / f"planted-{percent}" / "net.py").read_text()
            assert f"\nREPEATS = {gate_alarms.REPEATS + more}\n" in text
        assert "REPEATS = 200\n" in (place / "base" / "net.py").read_text()
