// Answer the requests of asv's page from `asvFiles`, because a browser refuses requests of a page that was opened from a
// file. The script also lists the stored trials of the benchmark that is shown; `asvTrials` has them by benchmark.
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

  const show = () => {
    document.getElementById("dpbench-trials")?.remove();
    const benchmark = decodeURIComponent(location.hash.slice(1).split("?")[0]).replace(/^\//, "");
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
