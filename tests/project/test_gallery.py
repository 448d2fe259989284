"""The gallery: reports/index.html lists each report of a real run, and its links resolve."""

import re
from pathlib import Path

from benchmarks.scripts import gallery
from dpbench.store.export import formats
from tests.analysis.test_comparison import BEFORE, HOSTILE, stored

ROOT = Path(__file__).parents[2]


def test_a_run_gets_a_folder_with_its_page_and_trials_and_a_paragraph_in_the_list(
    tmp_path: Path,
) -> None:
    run_id = stored(tmp_path / "dpbench.db", BEFORE)
    folder = tmp_path / "reports" / "one"
    gallery.add(folder, f"One {HOSTILE}", "What it shows.", tmp_path / "dpbench.db", None)
    (tmp_path / "reports" / "old").mkdir()
    (tmp_path / "reports" / "old" / "README.md").write_text("# An older `study`\n\nText.\n")
    text = gallery.listed(tmp_path / "reports")
    assert HOSTILE not in text
    assert "What it shows." in text
    assert "EPYC, 2 cores, GPUs: none;" in text
    assert "2 of 2 cases" in text
    assert re.findall(r'class="badge ([^"]*)"', text) == ["MEASURED", "CPU-ONLY"]
    assert re.search(r"<p>mlp: on this CPU, [^<]+</p>", text), "the answer of the run"
    assert ">An older study</a>" in text
    for link in re.findall(r'href="([^"]+)"', text):
        assert (tmp_path / "reports" / link).is_file()
    run, trials = formats.read_run(folder / gallery.TRIALS)
    assert (run.id, len(trials)) == (run_id, len(BEFORE))
    before = (folder / gallery.TRIALS).read_bytes()
    gallery.add(folder, "One", "What it shows.", tmp_path / "dpbench.db", None)
    assert (folder / gallery.TRIALS).read_bytes() == before


def test_the_list_of_this_repository_is_fresh_and_its_links_lead_to_files() -> None:
    text = (ROOT / "reports" / "index.html").read_text(encoding="utf-8")
    assert text == gallery.listed(ROOT / "reports") + "\n", (
        "run python -m benchmarks.scripts.gallery"
    )
    links = re.findall(r'href="([^"]+)"', text)
    assert links
    assert [link for link in links if not (ROOT / "reports" / link).is_file()] == []
