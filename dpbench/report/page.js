
"use strict";
const $ = (selector, root = document) => [...root.querySelectorAll(selector)];
const MARK = "svg [data-bar]";
const stored = JSON.parse(document.getElementById("numbers").textContent);
const numbers = stored.rows.map((row) => Object.fromEntries(stored.columns.map((name, index) => [name, row[index]])));

function button(text, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.addEventListener("click", act);
  return made;
}

// -- sorting the table of all cases by a column

for (const table of $("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const sort = button(head.textContent, () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const text = head.classList.contains("text");
      const value = (body) => body.rows[0].cells[column].dataset.sort;
      const cases = [...table.tBodies].sort((one, two) => {
        const a = value(one), b = value(two);
        if (!a || !b) return !a - !b;  // cells without a value stay at the end
        const order = text ? a.localeCompare(b) : a - b;
        return down ? -order : order;
      });
      table.append(...cases);
    });
    head.replaceChildren(sort);
  });
}

// -- copying a command

if (navigator.clipboard) {
  for (const code of $(".command code")) {
    const copy = button("Copy", async () => {
      await navigator.clipboard.writeText(code.textContent);
      copy.textContent = "Copied";
    });
    copy.className = "copy";
    code.after(copy);
  }
}

// -- copying the answers and the table as Markdown

const brief = document.getElementById("markdown");
if (navigator.clipboard && brief) {
  const copy = button("Copy as Markdown", async () => {
    await navigator.clipboard.writeText(JSON.parse(brief.textContent));
    copy.textContent = "Copied";
  });
  copy.title = "the answers and the table, for an issue or a pull request";
  document.getElementById("copying").append(copy);
}

// -- saving the numbers of a section as a file

function save(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], {type}));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

const quoted = (value) => {
  const text = value === null || value === undefined ? "" : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};

/** For each visible case, its settings and the numbers whose names begin with one of the section's columns. */
function recordsOf(section) {
  const starts = section.dataset.columns.split(" ");
  const work = ["model", "strategy", "schedule", "devices", "batch_size", "size", "precision", "labels"];
  return numbers.filter((record) => shown.has(record.id)).map((record) => Object.fromEntries(
    Object.entries(record).filter(([name]) => starts[0] === "*" || work.includes(name)
      || starts.some((start) => name === start || name.startsWith(`${start}_`)))));
}

/** The visible lines of a section's tables, each with the names of its columns. */
function linesOf(section) {
  return $("table:not(.sortable)", section).flatMap((table) => {
    const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
    const lines = [...table.tBodies].flatMap((body) => [...body.rows]);
    return lines.filter((line) => !line.closest("[hidden]")).map((line) => Object.fromEntries(
      [...line.cells].flatMap((cell, index) => {
        const small = cell.querySelector("small");
        const text = [...cell.childNodes].filter((node) => node !== small).map((node) => node.textContent).join("");
        return [[names[index], text], ...(small ? [[`${names[index]}, note`, small.textContent]] : [])];
      })));
  });
}

/** The marks of a section's drawings: the title of the drawing, and the text of each mark. */
function marksOf(section) {
  return $("figure", section).flatMap((figure) => $(MARK, figure).filter((mark) => !mark.closest("[hidden]"))
    .map((mark) => ({drawing: figure.querySelector("h3").textContent, mark: mark.getAttribute("aria-label")})));
}

function table(records) {
  const names = [...new Set(records.flatMap(Object.keys))];
  return [names, ...records.map((record) => names.map((name) => record[name]))]
    .map((line) => line.map(quoted).join(",")).join("\n") + "\n";
}

// -- filtering: the URL's fragment has the id of a section, then the chosen values of each axis

const form = document.querySelector("#filters form");
const boxes = $("input", form);
const cased = $("[data-cases]").map((element) => ({element, ids: element.dataset.cases.split(" ")}));
const drawings = $("svg[data-lanes]");
let shown = new Set(numbers.map((record) => record.id));
let target = "";
let unknown = [];

function choices() {
  const chosen = new Map();
  for (const box of boxes.filter((one) => one.checked)) {
    chosen.set(box.name, [...(chosen.get(box.name) || []), box.value]);
  }
  return chosen;
}

function filter() {
  const chosen = [...choices()];
  shown = new Set(numbers.filter((record) => chosen.every(([axis, values]) => values.includes(String(record[axis]))))
    .map((record) => record.id));
  for (const {element, ids} of cased) element.toggleAttribute("hidden", !ids.some((id) => shown.has(id)));
  drawings.forEach(compact);
  const all = new Set(numbers.map((record) => record.id)).size;
  document.querySelector("#filters [role=status]").textContent =
    (shown.size < all ? `${shown.size} of ${all} cases` : `all ${all} cases`)
    + (unknown.length ? `; the link also names ${unknown.join(", ")}, which this run does not have` : "");
  const suffix = chosen.map(([axis, values]) => `&${axis}=${values.map(encodeURIComponent).join(",")}`).join("");
  for (const link of $(".permalink, aside a")) link.setAttribute("href", link.getAttribute("href").split("&")[0] + suffix);
  return suffix;
}

/** Move the visible lanes of a drawing together, and shorten the drawing by the lanes that are hidden. */
function compact(svg) {
  const lanes = svg.dataset.lanes.split(" ").map((lane) => lane.split(":"));
  const box = (svg.dataset.box ||= svg.getAttribute("viewBox")).split(" ").map(Number);
  const up = [];
  let gone = 0;
  for (const [id, height] of lanes) {
    up.push(gone);
    if (!shown.has(id)) gone += Number(height);
  }
  for (const element of $("[data-lane]", svg)) element.toggleAttribute("hidden", !shown.has(lanes[element.dataset.lane][0]));
  const move = (node, by) => {
    const usual = (node.dataset.usual ??= node.getAttribute("transform") || "");
    const moved = by ? `translate(0 ${-by}) ${usual}` : usual;
    if (moved) node.setAttribute("transform", moved); else node.removeAttribute("transform");
  };
  const place = (node) => {
    if (["title", "desc", "defs"].includes(node.tagName)) return;
    if (node.dataset.lane) move(node, up[node.dataset.lane]);
    else if (node.querySelector("[data-lane]")) [...node.children].forEach(place);
    else move(node, gone);
  };
  [...svg.children].forEach(place);
  svg.setAttribute("viewBox", [box[0], box[1], box[2], box[3] - gone].join(" "));
}

function follow() {
  const [id, ...axes] = location.hash.slice(1).split("&");
  const chosen = new Map(axes.map((part) => {
    const [axis, values = ""] = part.split("=");
    return [axis, values.split(",").map(decodeURIComponent)];
  }));
  for (const box of boxes) box.checked = (chosen.get(box.name) || []).includes(box.value);
  unknown = [...chosen].flatMap(([axis, values]) => values
    .filter((value) => !boxes.some((box) => box.name === axis && box.value === value)).map((value) => `${axis} ${value}`));
  filter();
  target = id;
  const section = id && document.getElementById(id);
  const fold = section && section.closest("details");
  if (fold) fold.open = true;
  if (section) section.scrollIntoView();
}

if (boxes.length) {
  document.getElementById("filters").hidden = false;
  document.getElementById("filters").open = matchMedia("(min-width: 1100px)").matches;
}
form.addEventListener("submit", (event) => event.preventDefault());
function changed() {
  unknown = [];
  history.replaceState(null, "", `#${target}${filter()}`);
}
form.addEventListener("change", changed);
form.addEventListener("reset", () => setTimeout(changed));  // the boxes are empty only after this event
addEventListener("hashchange", follow);

// -- marks of a drawing: their values as a tooltip, for the pointer and for the keyboard

const tip = document.createElement("div");
tip.id = "tip";
tip.setAttribute("role", "tooltip");
tip.hidden = true;
document.body.append(tip);

function tell(mark) {
  tip.textContent = mark.getAttribute("aria-label");
  tip.hidden = false;
  const box = mark.getBoundingClientRect(), mine = tip.getBoundingClientRect();
  const left = Math.min(Math.max(4, box.left + box.width / 2 - mine.width / 2), innerWidth - mine.width - 4);
  const above = box.top - mine.height - 6;
  tip.style.left = `${left + scrollX}px`;
  tip.style.top = `${(above > 4 ? above : box.bottom + 6) + scrollY}px`;
}

/** Show the text of the mark that has the focus; hide the tooltip if no mark has it. */
function rest() {
  const mark = document.activeElement?.closest(MARK);
  if (mark) tell(mark); else tip.hidden = true;
}

for (const svg of $("svg")) {
  const marks = $(MARK, svg);
  if (!marks.length) continue;
  svg.setAttribute("role", "group");  // an image may not contain elements that take the focus
  for (const mark of marks) {
    const title = mark.querySelector(":scope > title");
    mark.setAttribute("aria-label", title.textContent);
    title.remove();  // else the browser shows a second tooltip
    mark.setAttribute("role", "img");
    mark.setAttribute("tabindex", mark === marks[0] ? "0" : "-1");
  }
  svg.addEventListener("pointerover", (event) => {
    const mark = event.target.closest(MARK);
    if (mark) tell(mark); else rest();
  });
  svg.addEventListener("pointerleave", rest);
  svg.addEventListener("focusin", (event) => tell(event.target));
  svg.addEventListener("focusout", () => { tip.hidden = true; });
  svg.addEventListener("keydown", (event) => {
    const ahead = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
    if (event.key === "Escape") tip.hidden = true;
    if (!ahead || event.altKey || event.ctrlKey || event.metaKey) return;
    const visible = marks.filter((mark) => !mark.closest("[hidden]"));
    const next = visible[visible.indexOf(document.activeElement) + ahead];
    event.preventDefault();
    if (!next) return;
    marks.forEach((mark) => mark.setAttribute("tabindex", mark === next ? "0" : "-1"));
    next.focus();
  });
}

// -- tools of a section: its numbers as files, and a larger drawing of the lanes

for (const section of $("main section")) {
  const read = section.dataset.columns ? recordsOf : $("table", section).length ? linesOf : marksOf;
  if (section.dataset.columns || $(`table:not(.environment, .ranking), ${MARK}`, section).length) {
    const tools = document.createElement("div");
    tools.className = "tools";
    const name = (kind) => `dpbench-${document.title.split(" ").at(-1)}-${section.id}.${kind}`;
    tools.append(
      "Numbers:",
      button("CSV", () => save(name("csv"), "text/csv", table(read(section)))),
      button("JSON", () => save(name("json"), "application/json", JSON.stringify(read(section), null, 1))),
    );
    section.append(tools);
  }
}

function zoomable(figure) {
  const svg = figure.querySelector("svg");
  const frame = document.createElement("div");
  frame.className = "zoom";
  frame.tabIndex = 0;
  frame.setAttribute("role", "region");
  frame.setAttribute("aria-label", `Drawing: ${figure.querySelector("h3").textContent}`);
  svg.replaceWith(frame);
  frame.append(svg);
  let scale = 1;
  const set = (next, x = frame.clientWidth / 2) => {
    const before = (frame.scrollLeft + x) / scale;
    scale = Math.min(16, Math.max(1, next));
    svg.style.width = scale === 1 ? "" : `${scale * 100}%`;
    frame.scrollLeft = before * scale - x;
    tip.hidden = true;
  };
  const tools = document.createElement("div");
  tools.className = "tools";
  tools.append(
    button("Zoom in", () => set(scale * 2)), button("Zoom out", () => set(scale / 2)), button("Whole step", () => set(1)),
  );
  tools.title = "also with the keys + − 0, and with Ctrl and the wheel";
  frame.after(tools);
  frame.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;  // the wheel alone scrolls the page
    event.preventDefault();
    set(scale * Math.exp(-event.deltaY / 300), event.clientX - frame.getBoundingClientRect().left);
  }, {passive: false});
  frame.addEventListener("keydown", (event) => {
    const next = {"+": scale * 2, "=": scale * 2, "-": scale / 2, "0": 1}[event.key];
    if (next === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    set(next);
  });
}
$("#lanes figure").forEach(zoomable);

// -- the drawn steps in Perfetto: the page asks no other site for anything before this click

const PERFETTO = "https://ui.perfetto.dev";

function openInPerfetto() {
  const events = JSON.parse(document.getElementById("trace").textContent);
  const buffer = new TextEncoder().encode(JSON.stringify({traceEvents: events})).buffer;
  const opened = window.open(PERFETTO);
  if (!opened) return;
  const asking = setInterval(() => opened.closed ? clearInterval(asking) : opened.postMessage("PING", PERFETTO), 100);
  addEventListener("message", function answered(event) {
    if (event.source !== opened || event.data !== "PONG") return;
    clearInterval(asking);
    removeEventListener("message", answered);
    opened.postMessage({perfetto: {buffer, title: document.title}}, PERFETTO);
  });
}

if (document.getElementById("trace")) {
  $("#lanes > .tools").forEach((tools) => tools.append(button("Open in Perfetto", openInPerfetto)));
}

// -- contents: the section that is on the screen

const sections = $("main section");
const visible = new Set();
const spy = new IntersectionObserver((entries) => {
  for (const entry of entries) visible[entry.isIntersecting ? "add" : "delete"](entry.target);
  const first = sections.find((section) => visible.has(section));
  for (const link of $("aside li a")) {
    const here = first && link.getAttribute("href").split("&")[0] === `#${first.id}`;
    if (here) link.setAttribute("aria-current", "location"); else link.removeAttribute("aria-current");
  }
}, {rootMargin: "0px 0px -70% 0px"});
sections.forEach((section) => spy.observe(section));

follow();
