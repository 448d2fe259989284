// Answer the requests of asv's page from `asvFiles`, because a browser refuses requests of a page that was opened from a
// file. The script also lists the stored trials of the benchmark that is shown, which `asvTrials` has by benchmark, and
// draws grey dots over the results of quick mode and of NOISY trials, whose commits `asvDoubtful` has by benchmark.
"use strict";
(() => {
  const answer = (options) => ({
    send(headers, done) {
      const name = decodeURIComponent(options.url.split("?")[0]).replace(/^\.\//, "");
      setTimeout(() => { // like a server: the page's parts register while it waits for the first answer
        if (name in asvFiles) done(200, "OK", { json: asvFiles[name], text: JSON.stringify(asvFiles[name]) });
        else if (name === "swallow.ico") done(200, "OK", { text: "" }); // the page asks whether its server still runs
        else done(404, "asv has published no such file");
      });
    },
    abort() {},
  });
  for (const type of ["+json", "+text"]) $.ajaxTransport(type, answer);

  const shown = () => decodeURIComponent(location.hash.slice(1).split("?")[0]).replace(/^\//, "");
  const GREY = "#999999";

  /** A series of grey dots for the doubtful points of `series`; the x of a point is a revision or its date. */
  const doubtful = (series, benchmark) => {
    const index = asvFiles["index.json"];
    const commits = new Set(asvDoubtful[benchmark] ?? []);
    const revisions = Object.entries(index?.revision_to_hash ?? {}).filter(([, hash]) => commits.has(hash));
    const places = new Set(revisions.flatMap(([revision]) => [Number(revision), index.revision_to_date[revision]]));
    const data = series.flatMap((one) => one.data.filter(([x]) => places.has(x)));
    const points = {show: true, radius: 5, fill: true, fillColor: GREY};
    return data.length ? [{data, color: GREY, lines: {show: false}, points, label: "quick mode, or NOISY"}] : [];
  };
  const plot = $.plot;
  $.plot = Object.assign((place, series, options) => {
    const benchmark = $(place).attr("id")?.match(/^summarygrid-(.*)$/)?.[1] ?? shown();
    return plot(place, [...series, ...doubtful(series, benchmark)], options);
  }, plot);

  const show = () => {
    document.getElementById("dpbench-trials")?.remove();
    const benchmark = shown();
    const found = asvTrials[benchmark] ?? [];
    if (!found.length) return;
    const box = document.createElement("details");
    box.id = "dpbench-trials";
    box.className = "panel panel-default";
    box.append(Object.assign(document.createElement("summary"), { textContent: `Trials in dpbench's store: ${found.length}` }));
    const list = document.createElement("ul");
    for (const one of found) {
      const values = one.params.length ? ` (${one.params.join(", ")})` : "";
      const text = `commit ${one.commit.slice(0, 8)}${values}: `;
      const command = document.createElement("code");
      command.textContent = `dpbench show ${one.run.slice(0, 12)} --store ${one.store}`;
      const line = document.createElement("li");
      line.append(text, command, ` case ${one.fingerprints.map((name) => name.slice(0, 10)).join(", ")}`);
      list.append(line);
    }
    box.append(list);
    document.getElementById("graph-display").append(box);
  };
  addEventListener("hashchange", show);
  addEventListener("DOMContentLoaded", show);
})();
