// --- the form of a new run -------------------------------------------------------------------------------------------

const form = { fields: [], first: 0, inputs: new Map(), configs: "", ready: null };
const MOST_SHOWN = 60;

function inputOf(field) {
  const id = "key-" + field.key, words = { id, name: field.key, "aria-describedby": id + "-help" };
  if (field.kind === "choice") {
    const nothing = element("option", { value: "" }, field.default ? `default: ${field.default}` : "not set");
    return element("select", words, nothing, ...field.choices.map(word => element("option", { value: word }, word)));
  }
  const made = element("input", { ...words, placeholder: field.default, autocomplete: "off", spellcheck: "false" });
  if (field.kind === "number") {
    made.type = "number";
    made.step = field.whole ? "1" : "any";
    if (field.least !== undefined) made.min = field.least;
    if (field.most !== undefined) made.max = field.most;
  }
  return made;
}

function boxOf(field) {
  const input = form.inputs.get(field.key) ?? inputOf(field);
  form.inputs.set(field.key, input);
  return element("div", { class: "field" }, element("label", { for: input.id }, field.key), input,
    element("p", { class: "soft", id: input.id + "-help" }, field.help));
}

function showFields() {
  const words = byId("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const filled = field => form.inputs.get(field.key)?.value;
  const fits = field => words.every(word => `${field.key} ${field.help}`.toLowerCase().includes(word));
  const found = words.length ? form.fields.filter(fits) : form.fields.slice(0, form.first);
  const more = form.fields.filter(field => filled(field) && !found.includes(field));
  byId("fields").replaceChildren(...[...more, ...found.slice(0, MOST_SHOWN)].map(boxOf));
  byId("found").textContent = found.length > MOST_SHOWN ? `${MOST_SHOWN} of ${found.length} keys`
    : words.length ? `${found.length} keys` : `the usual ones of ${form.fields.length} keys`;
}

async function prepareForm() {
  form.ready ??= ask("fields").then(answer => { Object.assign(form, answer); showFields(); });
  try { await form.ready; } catch (error) { form.ready = null; say(error.message, true); }
}

function showConfigs(names) {
  const text = JSON.stringify(names), select = byId("configs");
  if (form.configs === text) return;
  form.configs = text;
  const chosen = select.value;
  select.replaceChildren(element("option", { value: "" }, "a new configuration"), ...names.map(name => element("option", { value: name }, name)));
  select.value = names.includes(chosen) ? chosen : "";
}

function showFindings(title, findings) {
  const lines = findings.map(each => element("li", {}, [each.where, each.key, each.what].filter(Boolean).join("  "),
    each.way_out ? element("div", { class: "soft" }, each.way_out) : ""));
  byId("findings").replaceChildren(element("div", { class: "card" }, element("h3", {}, title), element("ul", {}, ...lines)));
}

async function putIntoYaml() {
  const values = {};
  for (const [key, input] of form.inputs) {
    if (!input.checkValidity()) { input.reportValidity(); throw new Error(`${key}: ${input.validationMessage}`); }
    if (input.value.trim()) values[key] = input.value;
  }
  const { text } = await ask("configs/compose", { text: byId("yaml").value, values });
  byId("yaml").value = text;
  for (const input of form.inputs.values()) input.value = "";
  showFields();
  return Object.keys(values).length;
}

async function checkText() {
  const { findings } = await ask("configs/check", { text: byId("yaml").value, name: byId("name").value });
  showFindings(findings.length ? `${findings.length} problems` : "No problem was found in its keys and values.", findings);
  return findings.length;
}

async function save() {
  const { name } = await ask("configs/save", { name: byId("name").value, text: byId("yaml").value, replace: byId("replace").checked });
  byId("name").value = name;
  byId("yaml").dataset.saved = byId("yaml").value;
  await refresh();
  return name;
}

// What is looked at or started is the file: what differs from it is saved first.
async function savedName() {
  return byId("yaml").dataset.saved === byId("yaml").value && byId("name").value ? byId("name").value : save();
}

async function checkWhole() {
  const found = await ask("configs/check-whole", { name: await savedName() });
  const findings = found.findings, warnings = found.warnings.map(what => ({ what: "warning: " + what }));
  const memory = found.memory.map(what => ({ what }));
  showFindings(findings.length ? `${findings.length} problems` : "No problem was found, up to the first batch.", [...findings, ...warnings, ...memory]);
}

async function showRows() {
  const { html } = await ask("preview", { name: await savedName(), count: 5 });
  byId("preview").srcdoc = html;
  byId("preview").hidden = byId("preview-title").hidden = false;
  byId("preview-title").scrollIntoView();
}

async function start() {
  if (await checkText()) throw new Error("Mend these first.");
  await ask("jobs/train", { name: await savedName(), nproc: Number(byId("nproc").value) });
  await refresh();
  location.hash = "jobs";
}

function open(text, name) {
  byId("yaml").value = text;
  byId("yaml").dataset.saved = name ? text : "";
  byId("name").value = name;
  byId("replace").checked = false;
  byId("findings").replaceChildren();
}

function beginMaking() {
  const actions = {
    put: ["Putting …", count => `${count} keys were put into the YAML.`, putIntoYaml],
    check: ["Checking …", "Checked.", checkText],
    save: ["Saving …", name => `Saved ${name}.`, save],
    "check-whole": ["Checking model and rows, which takes some seconds …", "Checked.", checkWhole],
    "show-rows": ["Reading rows, which takes some seconds …", "Rows are below.", showRows],
    start: ["Starting …", "It was started.", start],
    "use-config": ["Reading …", "Give it a name and another training.save, then save it.", async () => {
      open((await ask("configs/of-run", { run: board.shown[0] })).text, "");
      location.hash = "new";
    }],
  };
  for (const [id, [doing, done, work]] of Object.entries(actions)) {
    byId(id).addEventListener("click", () => attempt(byId(id), doing, done, work));
  }
  byId("find").addEventListener("input", showFields);
  byId("fields").addEventListener("submit", event => { event.preventDefault(); byId("put").click(); });
  byId("configs").addEventListener("change", () => attempt(byId("configs"), "Reading …", "", async () => {
    const name = byId("configs").value;
    open(name ? (await ask("configs/read", { name })).text : "", name);
  }));
}

begin();
