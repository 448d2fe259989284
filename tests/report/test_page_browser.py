"""The report in a browser: from a file, with no network, wide and narrow, light and dark."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests import asv_site, axe, browsing
from tests.amounts import amounts
from tests.browsing import MARKS, show, webdriver

wait = pytest.importorskip("selenium.webdriver.support.wait", reason="selenium is not installed")
pytestmark = MARKS
WIDTHS = (1280, 400)
SPOILT = """
const found = [];
for (const svg of document.querySelectorAll('svg')) {
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')]
    .filter(e => e.textContent.trim() && e.getBoundingClientRect().width);
  const boxes = texts.map(e => e.getBoundingClientRect());
  boxes.forEach((a, i) => {
    const sideways = a.left < frame.left - 1 || a.right > frame.right + 1;
    if (sideways || a.top < frame.top - 1 || a.bottom > frame.bottom + 1)
      found.push(['cut off', texts[i].textContent]);
    boxes.slice(i + 1).forEach((b, j) => {
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 1 && down > 3) found.push([texts[i].textContent, texts[i + 1 + j].textContent]);
    });
  });
}
return found;
"""
"""The texts of drawings that are cut off, or that overlap another text."""


@pytest.fixture(scope="module")
def files(once: Any) -> dict[str, Path]:
    return once("pages", browsing.written)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["gpu", "cpu", "ladder", "empty"])
def test_everything_lies_within_the_page(
    browser: Any, files: dict[str, Path], name: str, width: int
) -> None:
    show(browser, files[name], width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    boxes = browser.execute_script(
        "return [...document.querySelectorAll('svg')].map(e => [e.closest('section').id,"
        " e.getBoundingClientRect()])"
    )
    drawn = {"lanes", "speedup", "utilisation", "steps"}
    without = {"ladder": {"utilisation"}}  # which its trials have no samples for
    expected = drawn - without.get(name, set())
    assert {section for section, _ in boxes} == (set() if name == "empty" else expected)
    for section, box in boxes:
        assert box["width"] > 200, section
        assert box["height"] > 60, section
        assert box["left"] >= 0, section
        assert box["right"] <= width, section


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["gpu", "cpu", "ladder", "compared"])
def test_no_text_is_cut_off_or_overlaps_another(
    browser: Any, files: dict[str, Path], name: str, width: int
) -> None:
    show(browser, files[name], width)
    assert browser.execute_script(SPOILT) == []
    smallest = browser.execute_script(
        "return Math.min(...[...document.querySelectorAll('svg text')].map(e =>"
        " parseFloat(getComputedStyle(e).fontSize) *"
        " e.ownerSVGElement.getBoundingClientRect().width / 420))"
    )
    assert smallest >= 9


def test_page_asks_for_nothing_and_reports_no_error(browser: Any, files: dict[str, Path]) -> None:
    for file in files.values():
        show(browser, file)
        assert (
            browser.execute_script(
                "return performance.getEntriesByType('resource').map(e => e.name)"
            )
            == []
        )
        assert browser.get_log("browser") == []


def test_colours_follow_the_theme(browser: Any, files: dict[str, Path]) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        show(browser, files["gpu"], scheme=scheme)
        seen[scheme] = browser.execute_script(
            "const style = (e) => getComputedStyle(e);return [style(document.body).backgroundColor,"
            " style(document.querySelector('svg text')).fill]"
        )
    assert seen["light"][0] == "rgb(255, 255, 255)"
    assert seen["dark"][0] == "rgb(13, 17, 23)"
    assert seen["light"][1] != seen["dark"][1]


def test_table_sorts_by_number_and_by_text_on_click(browser: Any, files: dict[str, Path]) -> None:
    show(browser, files["gpu"])

    def click(name: str) -> list[str]:
        return browser.execute_script(
            """
            const table = document.querySelector('table.sortable');
            const heads = [...table.tHead.rows[0].cells];
            const column = heads.findIndex((head) => head.textContent === arguments[0]);
            heads[column].querySelector('button').click();
            return [...table.tBodies].map((body) => body.rows[0].cells[column].dataset.sort);
            """,
            name,
        )

    up, down = click("ms/step"), click("ms/step")
    assert len(up) == 20
    assert up[-2:] == down[-2:] == ["", ""]  # what has no value stays at the end
    assert list(map(float, up[:-2])) == sorted(map(float, up[:-2]))
    assert list(map(float, down[:-2])) == sorted(map(float, down[:-2]), reverse=True)
    strategies = click("strategy")
    assert strategies == sorted(strategies)
    sorted_by = (
        "return [...document.querySelectorAll('th[aria-sort]')].map(e => [e.textContent,"
        " e.ariaSort])"
    )
    assert browser.execute_script(sorted_by) == [["strategy", "ascending"]]


def test_page_is_whole_without_scripts(browser: Any, files: dict[str, Path]) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        show(browser, files["gpu"])
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    cases = "return document.querySelectorAll('tbody.case').length"
    assert browser.execute_script(cases) == 20
    assert browser.execute_script("return document.querySelectorAll('th button').length") == 0
    shown = (
        "return [...document.querySelectorAll('nav.side, figure svg, #filters')].map(e =>"
        " e.checkVisibility())"
    )
    browser.execute_script("document.getElementById('details').open = true")
    nav, filters, *drawings = browser.execute_script(shown)
    assert (nav, filters) == (True, False)
    assert drawings
    assert all(drawings)


def test_at_most_1200_words_and_four_screens_stand_before_the_details(
    browser: Any, files: dict[str, Path]
) -> None:
    show(browser, files["default"], 1440, folded=True)
    words, screens = browser.execute_script(r"""
        const before = document.createRange();
        before.setStartBefore(document.body);
        before.setEndBefore(document.getElementById('details'));
        getSelection().addRange(before);
        const text = getSelection().toString();
        const top = document.getElementById('details').getBoundingClientRect().top + scrollY;
        return [text.match(/\S*[\p{L}\p{N}]\S*/gu).length, top / innerHeight];
        """)
    assert 600 < words <= 1200
    assert screens <= 4


@pytest.fixture(scope="module")
def axe_script() -> str:
    try:
        return axe.script()
    except axe.UnavailableError as error:
        pytest.skip(str(error))


COLOURS = "{runOnly: ['color-contrast', 'link-in-text-block']}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["gpu", "ladder", "empty", "runs", "compared"])
def test_axe_finds_nothing_serious(
    browser: Any, files: dict[str, Path], axe_script: str, name: str, scheme: str
) -> None:
    """Of axe's rules, only those on colours depend on the scheme."""
    show(browser, files[name], scheme=scheme)
    browser.execute_script(
        "document.querySelectorAll('details').forEach((one) => { one.open = true; });" + axe_script
    )
    found = browser.execute_async_script(
        f"axe.run({'{}' if scheme == 'light' else COLOURS}).then(arguments[0])"
    )
    assert len(found["passes"]) > (15 if scheme == "light" else 0)
    serious = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
    assert [
        (one["id"], one["nodes"][0]["html"], one["nodes"][0]["failureSummary"]) for one in serious
    ] == []


SHOWN = "return [...document.querySelectorAll('tbody.case')].filter(e => !e.hidden).length"
CHOOSE = (
    "document.querySelector(`#filters"
    " input[name=${arguments[0]}][value='${arguments[1]}']`).click()"
)
STATUS = "return document.querySelector('#filters [role=status]').textContent"


def test_filters_show_the_chosen_cases_and_the_address_keeps_them(
    browser: Any, files: dict[str, Path]
) -> None:
    show(browser, files["gpu"])
    assert (browser.execute_script(SHOWN), browser.execute_script(STATUS)) == (20, "all 20 cases")
    browser.execute_script(CHOOSE, "model", "vgg16")
    browser.execute_script(CHOOSE, "devices", "4")
    assert (browser.execute_script(SHOWN), browser.execute_script(STATUS)) == (4, "4 of 20 cases")
    address = browser.current_url
    assert address.partition("#")[2] == "&model=vgg16&devices=4"
    cards = (
        "return [...document.querySelectorAll('.card')].filter(e => e.checkVisibility()).map(e =>"
        " e.innerText)"
    )
    assert [text.splitlines()[0] for text in browser.execute_script(cards)] == [
        "vgg16 at batch 256"
    ]
    links = "return [...document.querySelectorAll('.permalink')].map(e => e.hash)"
    assert all(link.endswith("&model=vgg16&devices=4") for link in browser.execute_script(links))
    show(browser, files["empty"])
    browser.get(address.replace("#", "#steps"))
    assert browser.execute_script(SHOWN) == 4
    top = "return document.getElementById('steps').getBoundingClientRect().top"
    assert abs(browser.execute_script(top)) < 30
    browser.execute_script("document.querySelector('#filters [type=reset]').click()")
    assert (
        browser.execute_async_script(f"setTimeout(() => arguments[0]((() => {{{SHOWN}}})()))") == 20
    )
    assert browser.current_url.partition("#")[2] == "steps"
    assert browser.get_log("browser") == []


def test_a_link_that_names_a_case_of_another_run_says_so(
    browser: Any, files: dict[str, Path]
) -> None:
    show(browser, files["gpu"])
    browser.get(f"{files['gpu'].as_uri()}#steps&model=vgg16,bert%2Clarge&kind=x")
    wait.WebDriverWait(browser, 10).until(lambda driver: driver.execute_script(SHOWN) == 9)
    said = (
        "9 of 20 cases; the link also names model bert,large, kind x, which this run does not have"
    )
    assert browser.execute_script(STATUS) == said


def test_a_filter_closes_the_gaps_in_a_drawing_and_keeps_its_axis(
    browser: Any, files: dict[str, Path]
) -> None:
    show(browser, files["gpu"])
    look = """
        const svg = document.querySelector('#utilisation svg');
        const wide = (e) => e.getBoundingClientRect().width;
        const texts = [...svg.querySelectorAll('text')].filter(wide).map(e => e.textContent);
        const bottom = svg.getBoundingClientRect().bottom;
        const label = [...svg.querySelectorAll('text')]
          .find(e => e.textContent === 'seconds, one round after another');
        return [texts, svg.viewBox.baseVal.height, bottom - label.getBoundingClientRect().bottom];
        """
    before, height, below = browser.execute_script(look)
    lanes = browser.execute_script(
        "return document.querySelector('#utilisation svg').dataset.lanes"
    ).split()
    names = [text for text in before if "×" in text]
    heights = {
        name: float(lane.partition(":")[2])
        for name, lane in zip(["single", *names], lanes, strict=True)
    }
    browser.execute_script(CHOOSE, "strategy", "ddp")
    after, lower, still_below = browser.execute_script(look)
    kept = [text for text in after if "×" in text]
    assert kept == ["ddp ×2", "ddp ×4"]
    gone = sum(high for name, high in heights.items() if name not in kept)
    assert height - lower == pytest.approx(gone)
    assert still_below == pytest.approx(below, abs=0.5)
    assert browser.execute_script(SPOILT) == []
    browser.execute_script(CHOOSE, "strategy", "ddp")
    assert browser.execute_script(look) == [before, height, below]


def test_a_mark_tells_its_value_to_the_pointer_and_to_the_keyboard(
    browser: Any, files: dict[str, Path]
) -> None:
    show(browser, files["gpu"])
    tip = "const tip = document.getElementById('tip'); return tip.hidden ? '' : tip.textContent"
    mark = browser.find_element("css selector", "#steps [data-bar]")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", mark)
    # another test may have left the pointer on the mark
    actions = webdriver.ActionChains(browser)
    actions.w3c_actions.pointer_action.move_to_location(0, 0)
    actions.move_to_element(mark).perform()
    said = wait.WebDriverWait(browser, 5).until(lambda browser: browser.execute_script(tip))
    name, _, numbers = said.partition(": ")
    assert name == "single, round 1"
    assert amounts(numbers)[-1] == "30", "timed steps"
    assert (
        browser.execute_script("return document.querySelectorAll('#steps [data-bar] title').length")
        == 0
    )
    browser.execute_script("document.querySelector('#steps [data-bar]').focus()")
    assert browser.execute_script(tip) == said
    browser.switch_to.active_element.send_keys(webdriver.Keys.ARROW_RIGHT)
    assert "single, round 2: " in browser.execute_script(tip)
    stops = """
        return [...document.querySelectorAll('#steps svg')].map(
          svg => svg.querySelectorAll('[tabindex="0"]').length);
        """
    assert set(browser.execute_script(stops)) == {1}, "one in each drawing"
    browser.switch_to.active_element.send_keys(webdriver.Keys.ESCAPE)
    assert browser.execute_script(tip) == ""
    assert browser.get_log("browser") == []


def test_the_lanes_of_a_step_grow_with_buttons_keys_and_the_wheel(
    browser: Any, files: dict[str, Path]
) -> None:
    show(browser, files["gpu"])
    width = "return document.querySelector('#lanes svg').getBoundingClientRect().width"
    page_width = "return document.documentElement.scrollWidth"
    before = browser.execute_script(width)
    (zoom_in, zoom_out, whole), frame = (
        browser.find_elements("css selector", "#lanes figure:first-of-type .tools button")[:3],
        browser.find_element("css selector", "#lanes .zoom"),
    )
    zoom_in.click()
    assert browser.execute_script(width) == pytest.approx(2 * before, rel=0.01)
    assert browser.execute_script(page_width) <= 1280
    zoom_out.click()
    assert browser.execute_script(width) == pytest.approx(before, rel=0.01)
    frame.send_keys("+")
    frame.send_keys("+")
    assert browser.execute_script(width) == pytest.approx(4 * before, rel=0.01)
    whole.click()
    wheel = (
        "document.querySelector('#lanes .zoom').dispatchEvent(new WheelEvent('wheel',"
        " arguments[0]))"
    )
    browser.execute_script(wheel, {"deltaY": -300})
    assert browser.execute_script(width) == pytest.approx(before, rel=0.01), (
        "the wheel alone scrolls the page"
    )
    browser.execute_script(wheel, {"deltaY": -300, "ctrlKey": True})
    assert browser.execute_script(width) > 2 * before
    assert browser.get_log("browser") == []


def test_a_filter_leaves_the_lines_of_the_chosen_cases(
    browser: Any, files: dict[str, Path]
) -> None:
    show(browser, files["gpu"])
    browser.execute_script(CHOOSE, "strategy", "ddp")
    browser.execute_script(CHOOSE, "model", "vgg16")
    shown = """
        const wide = (e) => e.getBoundingClientRect().width;
        return [...document.querySelectorAll('#speedup text')].filter(wide).map(e => e.textContent);
        """
    found = browser.execute_script(shown)
    assert [text for text in found if ":" in text][2:] == ["ddp: 3.72× (3.61–3.83) on 4"]
    marks = (
        "return [...document.querySelectorAll('#speedup [data-bar]')].filter(e =>"
        " !e.closest('[hidden]')).length"
    )
    assert browser.execute_script(marks) == 2


def test_the_page_of_a_comparison_filters_drawings_and_tells_values_as_that_of_a_run(
    browser: Any, files: dict[str, Path]
) -> None:
    show(browser, files["compared"], 400)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 400
    show(browser, files["compared"])
    names = """
        const wide = (e) => e.getBoundingClientRect().width;
        return [...document.querySelectorAll('#lanes text')].filter(wide).map(e => e.textContent)
          .filter(text => /, (before|after)$/.test(text));
        """
    lanes = [f"{case}, {run}" for case in ("single", "dp ×2") for run in ("before", "after")]
    assert (browser.execute_script(SHOWN), browser.execute_script(names)) == (2, lanes)
    browser.execute_script(CHOOSE, "verdict", "faster")
    assert (browser.execute_script(SHOWN), browser.execute_script(names)) == (1, lanes[2:])
    assert browser.execute_script(STATUS) == "1 of 2 cases"
    assert browser.current_url.endswith("#&verdict=faster")
    mark = browser.find_element("css selector", "#lanes [data-lane]:not([hidden])[data-bar]")
    webdriver.ActionChains(browser).move_to_element(mark).perform()
    tip = browser.execute_script("return document.getElementById('tip').textContent")
    assert amounts(tip) == ["0", "2.00 ms", "0 ms", "40%", "2.00 ms"]
    assert browser.get_log("browser") == []


def test_filters_work_with_the_keyboard_alone(browser: Any, files: dict[str, Path]) -> None:
    show(browser, files["gpu"])
    keys = webdriver.Keys
    active = browser.switch_to.active_element
    for _ in range(60):
        active.send_keys(keys.TAB)
        active = browser.switch_to.active_element
        if active.get_attribute("name") == "strategy":
            break
    assert active.accessible_name == "ddp"
    active.send_keys(keys.SPACE)
    assert browser.execute_script(SHOWN) == 4


def test_a_link_to_a_section_leads_there_and_the_contents_name_it(
    browser: Any, files: dict[str, Path]
) -> None:
    show(browser, files["gpu"])
    browser.execute_script("document.querySelector('nav.side a[href=\"#cases\"]').click()")
    assert browser.current_url.endswith("#cases")
    assert (
        abs(
            browser.execute_script(
                "return document.getElementById('cases').getBoundingClientRect().top"
            )
        )
        < 30
    )
    current = "return document.querySelector('nav.side [aria-current]')?.hash"
    wait.WebDriverWait(browser, 10).until(lambda driver: driver.execute_script(current) == "#cases")
    show(browser, files["gpu"], 400)
    folded = "return [...document.querySelectorAll('nav')].map(e => e.checkVisibility())"
    assert browser.execute_script(folded) == [False, True]


def test_a_link_into_the_folded_details_opens_them(browser: Any, files: dict[str, Path]) -> None:
    show(browser, files["gpu"], folded=True)
    is_open = "return document.getElementById('details').open"
    assert not browser.execute_script(is_open)
    browser.execute_script("document.querySelector('nav.side a[href=\"#steps\"]').click()")
    wait.WebDriverWait(browser, 10).until(lambda driver: driver.execute_script(is_open))
    assert browser.execute_script("return document.getElementById('steps').checkVisibility()")


def test_the_answers_are_copied_as_markdown_and_the_steps_go_to_perfetto(
    browser: Any, files: dict[str, Path]
) -> None:
    show(browser, files["gpu"])
    browser.execute_script("""
        window.copied = '';
        window.sent = [];
        navigator.clipboard.writeText = async (text) => { window.copied = text; };
        window.open = (address) => {
          window.asked = address;
          window.other = {closed: false, postMessage: (what) => {
            window.sent.push(what);
            if (what === 'PING')
              window.dispatchEvent(new MessageEvent('message', {data: 'PONG', source: null}));
          }};
          return null;
        };
        [...document.querySelectorAll('button')]
          .filter((one) => /Markdown|Perfetto/.test(one.textContent)).forEach((one) => one.click());
        """)
    copied = browser.execute_script("return window.copied")
    assert copied.startswith("**vgg16") or "\n| vgg16" in copied
    assert browser.execute_script("return window.asked") == "https://ui.perfetto.dev"


def test_the_numbers_of_a_section_are_saved_without_the_hidden_cases(
    browser: Any, files: dict[str, Path]
) -> None:
    show(browser, files["gpu"])
    browser.execute_script(CHOOSE, "model", "vgg16")
    saved = browser.execute_async_script("""
        const done = arguments[0], usual = URL.createObjectURL, blobs = [];
        URL.createObjectURL = (blob) => { blobs.push(blob); return 'data:,'; };
        document.querySelectorAll('#steps .tools button').forEach((button) => button.click());
        URL.createObjectURL = usual;
        Promise.all(blobs.map((blob) => blob.text())).then(done);
        """)
    rows, records = list(csv.DictReader(io.StringIO(saved[0]))), json.loads(saved[1])
    assert len(rows) == len(records) == 9
    assert {row["model"] for row in rows} == {"vgg16"}
    for row, record in zip(rows, records, strict=True):
        assert float(row["step_value"]) == record["step_value"] > 0
        assert not {name for name in row if name.startswith("throughput")}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("asv", reason="asv publishes the site")
    try:
        asv_site.libraries()
    except asv_site.UnavailableError as error:
        pytest.skip(str(error))
    return asv_site.publish(tmp_path_factory.mktemp("asv"), [0.010, 0.011, 0.013])


DRAWN = "return document.querySelectorAll('#main-graph canvas.flot-base').length"
LINES = """
const canvas = document.querySelector('#main-graph canvas.flot-base');
const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
const colours = new Set();
for (let i = 0; i < pixels.length; i += 4)
  if (pixels[i + 3] > 200 && Math.max(pixels[i], pixels[i + 1], pixels[i + 2]) -
      Math.min(pixels[i], pixels[i + 1], pixels[i + 2]) > 40) colours.add(i);
return colours.size;
"""
"""The number of pixels of a graph that are not grey: its line and points, without axes and grid."""


def test_the_site_of_asv_draws_its_graphs_from_a_file(browser: Any, site: Path) -> None:
    page_url = (site / "index.html").as_uri()
    for view, ready in (
        ("", "return document.querySelectorAll('#summarygrid-display canvas.flot-base').length"),
        ("#/summarylist", "return document.querySelectorAll('#summarylist-body tr').length"),
        ("#/regressions", "return document.querySelector('#regressions-body').textContent.length"),
        (f"#{asv_site.BENCHMARK}", DRAWN),
    ):
        browser.get("about:blank")
        browser.get(page_url + view)
        wait.WebDriverWait(browser, 20).until(
            lambda driver, ready=ready: driver.execute_script(ready)
        )
        assert browser.get_log("browser") == [], view
    wait.WebDriverWait(browser, 20).until(lambda driver: driver.execute_script(LINES) > 100)
    grey = """
        const drawn = $('#main-graph').data('plot').getData();
        const grey = drawn.filter(one => one.color === '#999999');
        return grey.map(one => [one.label, one.data.length]);
        """
    assert browser.execute_script(grey) == [["quick mode, or NOISY", 1]]
    trials = browser.execute_script(
        "return document.querySelector('#dpbench-trials li').textContent"
    )
    assert trials.endswith("dpbench show 7f3a7f3a7f3a --store trials.db case 56ca46e673")
    loaded = browser.execute_script(
        "return performance.getEntriesByType('resource').map(e => e.name)"
    )
    assert all(one.startswith("file:") for one in loaded)
