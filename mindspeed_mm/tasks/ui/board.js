"use strict";
const byId = id => document.getElementById(id);
const LIST_EVERY_MS = 5000, LIVE_EVERY_MS = 3000;
const COLUMNS = [["name", "run"], ["state", "state"], ["step", "step"], ["loss", "loss"], ["val_loss", "validation loss"],
                 ["started", "started"], ["changed", "last written"]];
const WIDE = new Set(["val_loss", "started", "changed"]);
const board = { runs: [], rows: new Map(), chosen: new Set(), shown: [], stamp: "", sort: null, jobs: [], cards: new Map(), seen: "" };

function element(tag, words = {}, ...inside) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(words)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value);
  }
  made.append(...inside);
  return made;
}

function say(text, bad = false) {
  byId("status").textContent = text;
  byId("status").className = bad ? "bad" : "soft";
}

async function ask(path, body) {
  const key = byId("key").value, headers = key ? { Authorization: "Bearer " + key } : {};
  const words = body === undefined ? { headers }
    : { method: "POST", headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify(body) };
  let answer;
  try {
    answer = await fetch("api/" + path, words);
  } catch {
    throw new Error("The board does not answer. Start it again: mm ui");
  }
  if (answer.ok) return answer.json();
  if (answer.status === 401) byId("asks-key").hidden = false;
  let message = "HTTP " + answer.status;
  try { message = (await answer.json()).error.message; } catch { /* no JSON */ }
  throw new Error(message);
}

// Does something that a person has asked for; what goes wrong is said.
async function attempt(button, doing, done, work) {
  button.disabled = true;
  say(doing);
  try {
    const result = await work();
    say(typeof done === "function" ? done(result) : done);
    return result;
  } catch (error) {
    say(error.message, true);
    return null;
  } finally {
    button.disabled = false;
  }
}

// --- the list --------------------------------------------------------------------------------------------------------

function told(run, name) {
  const value = run[name];
  if (value === null || value === undefined) return "–";
  if (name === "step") return run.total && run.total !== value ? `${value.toLocaleString()} of ${run.total.toLocaleString()}` : value.toLocaleString();
  if (name === "loss" || name === "val_loss") return value.toPrecision(4);
  if (name === "started" || name === "changed") return new Date(value * 1000).toLocaleString();
  return String(value);
}

function makeRow(run) {
  const tick = element("input", { type: "checkbox", "aria-label": `Choose ${run.name}`, onchange: () => {
    board.chosen[tick.checked ? "add" : "delete"](run.id);
    showChosen();
  } });
  const open = element("button", { type: "button", onclick: () => { location.hash = "run=" + run.id; } });
  const cells = COLUMNS.map(([name]) => {
    const kind = name === "name" ? "name" : name === "state" ? "state" : "number" + (WIDE.has(name) ? " wide" : "");
    return element("td", { class: kind }, ...(name === "name" ? [open] : []));
  });
  return { line: element("tr", {}, element("td", {}, tick), ...cells), cells, open, tick };
}

function fillRow(row, run) {
  COLUMNS.forEach(([name], place) => {
    const text = told(run, name), cell = name === "name" ? row.open : row.cells[place];
    if (cell.textContent !== text) cell.textContent = text;
  });
  row.cells[1].className = "state " + run.state;
}

function sorted(runs) {
  if (board.sort === null) return runs;
  const { name, down } = board.sort;
  const missing = value => value === null || value === undefined;
  return [...runs].sort((one, other) => {
    const first = one[name], second = other[name];
    if (missing(first) || missing(second)) return missing(first) - missing(second);
    const order = typeof first === "number" ? first - second : String(first).localeCompare(String(second));
    return down ? -order : order;
  });
}

function showList() {
  const words = byId("filter").value.toLowerCase(), kept = new Set(), lines = [];
  for (const run of sorted(board.runs)) {
    kept.add(run.id);
    if (!board.rows.has(run.id)) board.rows.set(run.id, makeRow(run));
    const row = board.rows.get(run.id);
    fillRow(row, run);
    row.tick.checked = board.chosen.has(run.id);
    if (`${run.name} ${run.state}`.toLowerCase().includes(words)) lines.push(row.line);
  }
  for (const id of [...board.rows.keys()]) {
    if (!kept.has(id)) { board.rows.delete(id); board.chosen.delete(id); }
  }
  const body = byId("list").tBodies[0], there = body.children;
  if (lines.length !== there.length || lines.some((line, place) => there[place] !== line)) {
    const focused = document.activeElement;
    body.replaceChildren(...lines);
    if (body.contains(focused)) focused.focus();
  }
  byId("count").textContent = lines.length === board.runs.length ? `${lines.length} runs` : `${lines.length} of ${board.runs.length} runs`;
  byId("no-runs").hidden = board.runs.length > 0;
  showChosen();
}

function showChosen() {
  const count = board.chosen.size;
  byId("compare").disabled = count < 2 || count > 6;
  byId("compare").textContent = count ? `Compare ${count} chosen runs` + (count > 6 ? " (at most 6)" : "") : "Compare the chosen runs";
}

function makeHead() {
  const line = byId("list").tHead.rows[0];
  for (const [name, title] of COLUMNS) {
    const head = element("th", { scope: "col", class: WIDE.has(name) ? "wide" : "" });
    head.append(element("button", { type: "button", onclick: () => {
      board.sort = { name, down: board.sort?.name === name ? !board.sort.down : false };
      for (const other of line.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", board.sort.down ? "descending" : "ascending");
      showList();
    } }, title));
    line.append(head);
  }
}

async function refresh() {
  const found = await ask("runs");
  byId("asks-key").hidden = true;
  byId("folder").textContent = found.folder;
  for (const each of document.querySelectorAll(".making")) each.hidden = found.read_only;
  byId("notes").textContent = found.notes.join(" ");
  Object.assign(board, { runs: found.runs, jobs: found.jobs });
  showList();
  showJobs();
  showConfigs(found.configs);
  if (byId("status").className === "bad" && byId("status").textContent === board.seen) say("");
  board.seen = "";
}

// --- one run, or several ---------------------------------------------------------------------------------------------

function nameOf(id) {
  return board.runs.find(run => run.id === id)?.name ?? "a run that is gone";
}

async function showRuns() {
  const asked = board.shown;
  if (!asked.length) return;
  byId("run-name").textContent = asked.map(nameOf).join(" · ");
  const state = board.runs.find(run => run.id === asked[0])?.state ?? "";
  byId("run-state").textContent = asked.length > 1 ? "" : state;
  byId("run-state").className = "state " + state;
  for (const id of ["use-config", "talk"]) byId(id).disabled = asked.length > 1;
  const found = await ask("show", { runs: asked, stamp: board.stamp });
  if (asked !== board.shown) return;
  board.stamp = found.stamp;
  if (found.html === null) return;
  const shown = byId("shown"), open = new Map();
  for (const each of shown.querySelectorAll("details")) open.set(each.querySelector("summary").textContent.split(":")[0], each.open);
  shown.innerHTML = found.html;
  for (const each of shown.querySelectorAll("details")) {
    const was = open.get(each.querySelector("summary").textContent.split(":")[0]);
    if (was !== undefined) each.open = was;
  }
}

// --- jobs ------------------------------------------------------------------------------------------------------------

function endingOf(job) {
  if (job.exit_code === null) return job.stops ? "is stopping" : "runs";
  if (job.exit_code === 0) return "ended well";
  return job.exit_code === 75 ? "stopped after a saved checkpoint: start it again to go on" : `ended with exit code ${job.exit_code}`;
}

// A card is made once and filled again, so that focus and the place that is read stay.
function makeCard(job) {
  const stop = element("button", { type: "button", onclick: () =>
    attempt(stop, "Asking it to stop …", "It was asked to stop.", () => ask("jobs/stop", { job: job.job })) });
  const state = element("span", { class: "soft" }), said = element("pre", { tabindex: "0", "aria-label": "What it printed" });
  const link = element("a", { target: "_blank", rel: "noopener noreferrer" }, "Open its page");
  const title = element("h3", {}, `${job.kind === "train" ? "Training" : "Server"}: ${job.name}`);
  const bar = element("div", { class: "bar" }, title, state, link, element("span", { class: "space" }), stop);
  return { stop, state, said, link, box: element("article", { class: "card job" }, bar, said) };
}

function fillCard(card, job) {
  card.state.textContent = endingOf(job);
  card.stop.textContent = job.stops ? "Stop at once" : job.kind === "train" ? "Stop and save" : "Stop";
  card.stop.hidden = job.exit_code !== null;
  card.link.hidden = !job.address;
  if (job.address) card.link.href = job.address + "/";
  if (card.said.textContent === job.said) return;
  const follows = card.said.scrollHeight - card.said.scrollTop - card.said.clientHeight < 40;
  card.said.textContent = job.said;
  if (follows) card.said.scrollTop = card.said.scrollHeight;
}

function showJobs() {
  const running = board.jobs.filter(job => job.exit_code === null).length;
  byId("running-jobs").textContent = running ? `(${running})` : "";
  byId("no-jobs").hidden = board.jobs.length > 0;
  for (const job of [...board.jobs].reverse()) {
    if (!board.cards.has(job.job)) {
      board.cards.set(job.job, makeCard(job));
      byId("jobs").prepend(board.cards.get(job.job).box);
    }
    fillCard(board.cards.get(job.job), job);
  }
}

// --- views -----------------------------------------------------------------------------------------------------------

function follow() {
  const [view, chosen] = location.hash.slice(1).split("=");
  const name = ["run", "new", "jobs"].includes(view) ? view : "runs";
  for (const each of ["runs", "run", "new", "jobs"]) byId("view-" + each).hidden = each !== name;
  for (const each of document.querySelectorAll("nav button")) {
    const here = each.dataset.view === name || (name === "run" && each.dataset.view === "runs");
    if (here) each.setAttribute("aria-current", "page"); else each.removeAttribute("aria-current");
  }
  board.shown = name === "run" ? (chosen ?? "").split(",").filter(id => /^[0-9a-f]+$/.test(id)) : [];
  board.stamp = "";
  byId("shown").replaceChildren();
  if (name === "run") {
    byId("shown").append(element("p", { class: "soft" }, "Reading …"));
    byId("run-name").focus();
    showRuns().catch(error => { byId("shown").replaceChildren(); say(error.message, true); });
  }
  if (name === "new") prepareForm();
  if (name === "jobs") for (const { said } of board.cards.values()) said.scrollTop = said.scrollHeight;
}

// Asks again and again, slower where answers are slow, and not while nobody looks.
async function repeatedly(every, work) {
  for (;;) {
    const begun = performance.now();
    if (!document.hidden) {
      try { await work(); } catch (error) { board.seen = error.message; say(error.message, true); }
    }
    await new Promise(done => setTimeout(done, Math.max(every, 3 * (performance.now() - begun))));
  }
}

function begin() {
  makeHead();
  byId("filter").addEventListener("input", showList);
  byId("compare").addEventListener("click", () => { location.hash = "run=" + [...board.chosen].join(","); });
  byId("back").addEventListener("click", () => { location.hash = "runs"; });
  byId("talk").addEventListener("click", () => attempt(byId("talk"), "Starting a server for it …",
    "Its server is loading; the list of jobs has the link to its page.", async () => {
      await ask("jobs/serve", { run: board.shown[0] });
      location.hash = "jobs";
    }));
  for (const each of document.querySelectorAll("nav button")) each.addEventListener("click", () => { location.hash = each.dataset.view; });
  byId("asks-key").addEventListener("submit", event => { event.preventDefault(); say(""); refresh().then(follow).catch(error => say(error.message, true)); });
  window.addEventListener("hashchange", follow);
  beginMaking();
  refresh().then(follow).catch(error => { follow(); say(error.message, true); });
  repeatedly(LIST_EVERY_MS, () => byId("asks-key").hidden ? refresh() : null);
  repeatedly(LIVE_EVERY_MS, () => byId("asks-key").hidden ? showRuns() : null);
}
