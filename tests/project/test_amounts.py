"""The numbers that tests read from a text."""

from __future__ import annotations

import pytest

from tests.amounts import amounts


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1.12× (1.12–1.13) as long as 2 of 3 devices", ["1.12×", "1.12", "1.13", "2", "3"]),
        ("2.00 s from -6.00 s on, 20% of the step", ["2.00 s", "-6.00 s", "20%"]),
        ("2, 4 of 12,500 samples; 3 × 1.00 MiB", ["2", "4", "12,500", "3", "1.00 MiB"]),
        ("train.py:31 in 2 steps, at 6.94 GB/s, −2.00 ms", ["31", "2", "6.94 GB/s", "−2.00 ms"]),
        ("an A100 at x16, version 2.13.0+cpu of b200", ["2.13"]),
        ("no number", []),
    ],
)
def test_amounts_are_the_numbers_of_a_text_with_their_units(text: str, found: list[str]) -> None:
    assert amounts(text) == found
