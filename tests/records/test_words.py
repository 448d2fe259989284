"""Numbers as text: units, digits and plurals hold over the whole range that a benchmark meets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dpbench.records import words
from dpbench.records.estimate import Doubt, Estimate
from tests.amounts import amounts

NUMBER = r"[−-]?\d{1,3}(?:,?\d{3})*(?:\.\d+)?"
SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
BYTES = {unit: 1024.0**power for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))}

durations = st.floats(-9, 6).map(lambda power: 10.0**power)
sizes = st.integers(1, 10**15)
magnitudes = st.floats(-9, 15).map(lambda power: 10.0**power)


def read(text: str, units: dict[str, float]) -> float:
    """Return the number that a text with a unit states."""
    number, _, unit = text.partition(" ")
    return value_of(number) * units[unit]


def value_of(text: str) -> float:
    assert re.fullmatch(NUMBER, text), f"{text} has an exponent, or is no number"
    return float(text.replace(",", "").replace("−", "-"))


def digits(text: str) -> int:
    """Return how many significant digits are written."""
    return len(re.sub(r"[^\d]", "", text).lstrip("0"))


@given(durations)
def test_a_duration_has_three_digits_and_a_unit_that_fits(seconds: float) -> None:
    said = words.time(seconds)
    assert read(said, SECONDS) == pytest.approx(seconds, rel=0.005)
    number = said.partition(" ")[0]
    whole = value_of(number)
    assert digits(number) == 3 or whole >= 1000
    assert 1 <= whole < 1000 or said.endswith(" s")


@pytest.mark.parametrize(
    ("joules", "said"),
    [
        (3.7, "3.70 J (3.33–4.07)"),
        (0.9999, "1.00 J (0.900–1.10)"),
        (0.000596, "596 µJ (536–656)"),
        (0.0596, "59.6 mJ (53.6–65.6)"),
    ],
)
def test_an_energy_has_one_unit_for_its_value_and_its_interval(joules: float, said: str) -> None:
    assert words.joules(Estimate(joules, 0.9 * joules, 1.1 * joules, 3)) == said
    assert words.joules(Estimate(joules, 0.9 * joules, 1.1 * joules, 2)) == "not enough rounds"


@given(sizes)
def test_a_size_has_three_digits_and_a_unit_that_fits(count: int) -> None:
    said = words.size(count)
    assert read(said, BYTES) == pytest.approx(count, rel=0.005)
    number = said.partition(" ")[0]
    assert count < 1024 or digits(number) >= 3
    assert value_of(number) <= 1024
    if count < 1024:
        assert said == f"{count:,} B"


@given(magnitudes, st.sampled_from([1, -1]))
def test_no_number_is_written_with_an_exponent(value: float, sign: int) -> None:
    said = words.number(sign * value)
    assert value_of(said) == pytest.approx(sign * value, rel=0.005)
    assert digits(said) == 3 or value >= 1000
    assert value_of(words.exact(sign * value)) == pytest.approx(sign * value, rel=1e-5)
    assert value_of(words.signed(sign * value).replace("+", "")) == pytest.approx(
        sign * value, rel=0.005
    )


@given(magnitudes, magnitudes)
def test_a_greater_number_never_reads_as_less(one: float, other: float) -> None:
    assume(one < other)
    assert value_of(words.number(one)) <= value_of(words.number(other))
    assert read(words.size(one), BYTES) <= read(words.size(other), BYTES)
    if other <= 1e6:
        assert read(words.time(one), SECONDS) <= read(words.time(other), SECONDS) * (1 + 1e-12)


@given(st.floats(0, 10))
def test_a_share_is_a_percentage(share: float) -> None:
    said = words.percent(share)
    assert said.endswith("%")
    assert float(said[:-1]) / 100 == pytest.approx(
        share, abs=0.0051 if share >= 0.0995 else 0.00051
    )


@given(st.integers(0, 10**6), st.sampled_from(["device", "round", "step", "thread", "case"]))
def test_one_of_a_thing_is_singular_and_any_other_count_plural(number: int, noun: str) -> None:
    said = words.count(number, noun)
    assert said.endswith(f" {noun}") is (number == 1)
    assert said.endswith(f" {noun}s") is (number != 1)
    assert said.startswith(f"{number:,} ")


@pytest.mark.parametrize(
    ("say", "value", "said"),
    [
        (words.time, 1e-4, "100 µs"),
        (words.time, 0, "0 ms"),
        (words.time, 0.0009999, "1.00 ms"),
        (words.time, 12.345, "12.3 s"),
        (words.time, 1e6, "1,000,000 s"),
        (words.time, 3e-9, "3.00 ns"),
        (words.time, 5e-10, "0.500 ns"),
        (words.time, math.nan, "–"),
        (words.time, 2.78e-17, "0 ms"),
        (words.time, -2.78e-17, "0 ms"),
        (words.signed_time, 2.78e-17, "+0 ms"),
        (words.time, 1e-12, "0.00100 ns"),
        (words.size, 0, "0 B"),
        (words.size, 1023, "1,023 B"),
        (words.size, 1024, "1.00 KiB"),
        (words.size, 2**50 * 5.0, "5,120 TiB"),
        (words.exact, 1e6, "1000000"),
        (words.exact, 0.00001, "0.00001"),
        (words.exact, 2.5, "2.5"),
        (words.exact, 40.0, "40"),
        (words.exact, math.inf, "–"),
        (words.signed_time, -0.0123, "−12.3 ms"),
        (words.signed_time, 1.2e-4, "+120 µs"),
        (words.percent, 0.019, "1.9%"),
        (words.percent, 0.11, "11%"),
        (words.percent, math.inf, "–"),
    ],
)
def test_numbers_read_like_this(say: Callable[[float], str], value: float, said: str) -> None:
    assert say(value) == said


def test_a_plural_of_another_form_is_given() -> None:
    assert words.count(2, "process", "processes") == "2 processes"
    assert (words.verb(1, "waits", "wait"), words.verb(2, "waits", "wait")) == ("waits", "wait")


def test_an_interval_is_in_the_unit_of_its_value() -> None:
    assert words.duration(Estimate(0.0005, 0.0004, 0.0012, 3)) == "500 µs (400–1,200)"
    assert words.ms(Estimate(0.0005, 0.0004, 0.0012, 3)) == "0.500 ms (0.400–1.20)"
    assert words.times(Estimate(1.5, 1.25, 2.0, 3)) == "1.50× (1.25–2.00)"


def test_an_estimate_of_a_residue_of_rounding_is_0() -> None:
    residue = Estimate(2.78e-17, 2e-17, 5e-17, 3)
    assert words.duration(residue) == words.ms(residue) == "0 ms (0–0)"


@pytest.mark.parametrize("say", [words.duration, words.ms, words.times])
def test_an_estimate_in_doubt_is_not_written(say: Callable[[Estimate], str]) -> None:
    wide = say(Estimate(1.0, 0.4, 1.7, 9))
    ends = "between 0.400× and 1.70×"
    assert say(Estimate(1.0, 0.9, 1.1, 2)) == "not enough rounds"
    assert wide == (ends if say is words.times else "not enough rounds"), "its ends decide"
    assert amounts(words.doubt(Estimate(1.0, 0.9, 1.1, 1)))[:2] == ["1", "3"]
    assert amounts(words.doubt(Estimate(1.0, 0.4, 1.7, 9))) == ["4"]
    assert words.doubt(Estimate(1.0, 0.9, 1.1, 3)) == ""


@pytest.mark.parametrize(
    ("estimate", "expected"),
    [
        (Estimate(1.0, 0.9, 1.1, 3), None),
        (Estimate(1.0, 1.0, 1.0, 2), Doubt.ROUNDS),
        (Estimate(2.0, 1.0, 4.0, 3), None),
        (Estimate(2.0, 1.0, 4.01, 3), Doubt.WIDTH),
        (Estimate(1.0, 0.0, 1.0, 9), Doubt.WIDTH),
        (Estimate(math.nan, math.nan, math.nan, 9), Doubt.WIDTH),
        (Estimate(0.1, -0.2, 0.4, 3, signed=True), None),
        (Estimate(0.1, -0.2, 0.4, 2, signed=True), Doubt.ROUNDS),
        (Estimate(1.0, 0.1, 9.0, 0), None),
    ],
)
def test_an_estimate_is_in_doubt_for_too_few_rounds_or_too_wide_an_interval(
    estimate: Estimate, expected: Doubt | None
) -> None:
    assert estimate.doubt is expected
