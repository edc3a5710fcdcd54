"use strict";
// The playground: asks the server, shows every state of the text in place. Texts enter the page as text, never as markup.

const $ = (id) => document.getElementById(id);
const HUES = 8;
const EXAMPLE_SPAN = 220; // milliseconds a state stays when states are played

// --- how a text looks: the rules of fsdfm's timelines ---------------------------------------------------------------

function bins(steps) {
  const count = Math.min(steps, HUES), edge = (n) => Math.ceil((n * steps) / count);
  return Array.from({ length: count }, (_, n) => ({
    number: n + 1, first: edge(n) + 1, last: edge(n + 1), hue: Math.round((n * (HUES - 1)) / Math.max(count - 1, 1)),
  }));
}

const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/u;

function visible(piece) {
  let shown = "";
  for (const character of piece) {
    if (character === "\n") shown += "↵\n";
    else if (character === "\t") shown += "⇥ ";
    else if (HIDDEN.test(character) && character !== "\u200c" && character !== "\u200d")
      shown += "\\u{" + character.codePointAt(0).toString(16) + "}";
    else shown += character;
  }
  return shown || "∅";
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes))
    if (key === "class") made.className = value;
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value === true ? "" : value);
  made.append(...children);
  return made;
}

function tokenSpan(state, index, table) {
  const step = state.last[index], bin = step ? table.find((each) => step <= each.last) : null;
  const given = state.given.has(index);
  const names = [bin ? `k${bin.hue}` : given ? "given" : "kept"];
  if (state.marked.has(index)) names.push("marked");
  if (state.now.has(index)) names.push("now");
  const when = step ? `last changed at step ${step}` : given ? "given" : "never changed";
  const damaged = state.marked.has(index) ? "; damaged or replaced" : "";
  return element("span", { class: names.join(" "), title: when + damaged }, visible(state.pieces[index]));
}

function draw(figure, state, steps) {
  const table = bins(steps);
  const spans = state.pieces.map((_, index) => tokenSpan(state, index, table));
  figure.text.replaceChildren(...spans);
  const counts = new Map();
  for (const step of state.last) {
    const bin = step ? table.find((each) => step <= each.last) : null;
    if (bin) counts.set(bin.number, (counts.get(bin.number) || 0) + 1);
  }
  figure.legend.replaceChildren(...table.filter((bin) => counts.has(bin.number)).map((bin) => {
    const label = bin.first === bin.last ? bin.first : `${bin.first}-${bin.last}`;
    return element("li", {}, element("span", { class: `k${bin.hue}`, tabindex: 0 }, `step ${label}`), ` ${counts.get(bin.number)}`);
  }));
}

// --- a card: one model's text, its states, its slider ---------------------------------------------------------------

class Card {
  constructor(asked) { // what is asked for now: the form may change while a text is on its way
    const model = asked.model;
    this.asked = asked; this.mode = mode; this.steps = asked.steps; this.states = [];
    this.text = element("p", { class: "text", dir: "auto", "aria-busy": "true", "aria-label": "The text" });
    this.legend = element("ul", { class: "legend" });
    this.facts = element("p", { class: "facts", role: "status", "aria-live": "polite" }, "waiting …");
    this.notes = element("div");
    this.slider = element("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "Step shown" });
    this.play = element("button", { type: "button", class: "plain", "aria-label": "Play the steps" }, "▶");
    this.at = element("output", {}, "");
    this.calls = element("span", { class: "calls" }, "");
    this.slider.addEventListener("input", () => { this.halt(); this.show(+this.slider.value); });
    this.play.addEventListener("click", () => (this.timer ? this.halt() : this.start()));
    this.bar = element("div", { class: "bar", hidden: true }, this.play, this.slider, this.at);
    this.node = element("article", { "data-model": model },
      element("h3", {}, element("span", {}, model), this.calls), this.facts,
      element("figure", { class: "fsdfm-timeline" },
        element("figcaption", {}, element("span", { class: "note" }, "Tokens by the step of their last change, and how many"), this.legend),
        this.text),
      this.bar, this.notes);
    this.began = performance.now();
  }

  step(facts) {
    const before = this.states.at(-1);
    const last = facts.pieces.map((_, i) => (before && before.last[i]) || 0);
    for (const place of facts.changed_tokens) last[place] = facts.step;
    this.add({ pieces: facts.pieces, last, given: new Set(facts.given), marked: new Set(), now: new Set(facts.changed_tokens) });
    this.facts.textContent = `step ${facts.step} of ${facts.steps}, t = ${facts.t.toFixed(2)}`;
  }

  finish(made, reason) {
    const d = made.details;
    this.steps = made.steps; this.given = d.given.length;
    const marked = d.marked.length ? d.marked : d.asked === null ? [] : d.replaced;
    const state = { pieces: d.pieces, last: d.last_changed, given: new Set(d.given), marked: new Set(marked), now: new Set() };
    if (this.states.length) this.states[this.states.length - 1] = state; else this.states.push(state);
    const waited = performance.now() - this.began;
    this.calls.textContent = `${made.calls} call${made.calls === 1 ? "" : "s"}`;
    this.facts.textContent = `${Math.round(1000 * made.seconds)} ms, ${Math.round(waited)} ms with the way here · seed ${made.seed}` +
      ` · from t = ${made.start.toFixed(2)}` + (this.mode === "write" ? (reason === "stop" ? " · ended by itself" : " · the room is full") : "");
    this.notes.replaceChildren(...made.warnings.map((note) => element("p", { class: "note" }, note)));
    if (this.mode === "repair") this.repaired(d);
    this.text.setAttribute("aria-busy", "false");
    this.refresh(); this.show(this.states.length - 1);
  }

  repaired(d) {
    if (!d.replaced.length && !d.marked.length) {
      this.notes.prepend(element("p", { class: "note" }, "Nothing here is surely wrong to this model, so it changed nothing."));
      return;
    }
    this.notes.prepend(
      element("p", { class: "asked" }, element("b", {}, "Before "), visible(d.asked).replaceAll("↵\n", "↵ ")),
      element("p", { class: "note" }, `${d.replaced.length} of ${d.pieces.length} tokens replaced.`));
  }

  add(state) { this.states.push(state); this.refresh(); this.show(this.states.length - 1); }
  refresh() { this.slider.max = this.states.length - 1; this.bar.hidden = this.states.length < 2; }

  show(index) {
    this.slider.value = index; this.at.textContent = `${index} / ${this.states.length - 1}`;
    draw(this, this.states[index], this.steps);
  }

  start() {
    let index = +this.slider.value >= this.states.length - 1 ? 0 : +this.slider.value;
    this.play.textContent = "❚❚";
    const tick = () => {
      this.show(index);
      if (++index < this.states.length) this.timer = setTimeout(tick, EXAMPLE_SPAN); else this.halt();
    };
    tick();
  }

  halt() { clearTimeout(this.timer); this.timer = null; this.play.textContent = "▶"; }

  fail(words) { this.facts.textContent = words; this.text.setAttribute("aria-busy", "false"); }
}

// --- what is asked ----------------------------------------------------------------------------------------------------

let mode = "write";
const PATHS = { write: "v1/completions", gaps: "v1/infill", repair: "v1/repair" };
const VERBS = { write: "Write", gaps: "Fill the gaps", repair: "Repair" };

function body(model) {
  const asked = { model, steps: +$("steps").value, seed: Math.trunc(+$("seed").value) };
  if ($("temperature").value !== "") asked.temperature = +$("temperature").value;
  if (mode === "write") {
    if ($("prompt").value) asked.prompt = $("prompt").value;
    if ($("suffix").value) asked.suffix = $("suffix").value;
    asked.max_tokens = +$("room").value;
  } else if (mode === "gaps") asked.text = $("gaps").value;
  else {
    asked.text = $("damaged").value;
    if ($("corrupt").value) { asked.corrupt = +$("corrupt").value; asked.blind = $("blind").checked; }
  }
  return asked;
}

function headers() {
  const own = { "content-type": "application/json" };
  if ($("key").value) own.authorization = `Bearer ${$("key").value}`;
  return own;
}

class Refused extends Error {}

async function refusal(response) {
  let words = `the server answered ${response.status}`;
  try { words = (await response.json()).error.message; } catch { /* not ours: a proxy's answer */ }
  if (response.status === 401) { $("key-row").hidden = false; $("key").focus(); }
  if (response.status === 429) words += " (the server is busy)";
  return new Refused(words);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

async function run(model, signal) {
  const asked = body(model), card = new Card(asked);
  $("results").append(card.node);
  try {
    const response = await fetch(PATHS[mode], {
      method: "POST", headers: headers(), signal,
      body: JSON.stringify({ ...asked, stream: true, diffusing: true, details: true, ...(mode === "write" ? { echo: true } : {}) }),
    });
    if (!response.ok) throw await refusal(response);
    let finished = false;
    for await (const data of events(response)) {
      if (data === "[DONE]") { finished = true; break; }
      const told = JSON.parse(data);
      if (told.error) throw new Refused(told.error.message);
      for (const choice of told.choices)
        if (choice.finish_reason) card.finish(choice.fsdfm, choice.finish_reason); else card.step(choice.fsdfm);
    }
    if (!finished) throw new Refused("the answer broke off; the server may be gone");
    return card;
  } catch (error) {
    const words = error.name === "AbortError" ? "stopped" :
      error instanceof Refused ? error.message : "the server does not answer; is it running?";
    card.fail(words);
    if (!card.states.length) card.node.remove();
    if (error.name !== "AbortError") throw new Refused(words);
  }
}

let running = null;

async function go() {
  if (running) return;
  say("");
  const models = [$("model").value];
  const other = otherModel();
  if ($("compare").checked && other) models.push(other);
  $("results").replaceChildren();
  $("code").hidden = true;
  $("results").className = `cards of-${models.length === 1 ? 1 : 2}`;
  running = new AbortController();
  $("go").disabled = true; $("stop").hidden = false;
  const ends = await Promise.allSettled(models.map((model) => run(model, running.signal)));
  running = null;
  $("go").disabled = false; $("stop").hidden = true;
  const failed = ends.find((end) => end.status === "rejected");
  if (failed) { say(failed.reason.message); look(); } else if (ends[0].value) writeCode(ends[0].value);
}

function say(words) { $("message").textContent = words; $("message").hidden = !words; }

// --- the same elsewhere ---------------------------------------------------------------------------------------------

const shellQuote = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
const literal = (value) => value === true ? "True" : value === false ? "False" : JSON.stringify(value);

function writeCode(card) {
  const { asked, mode } = card, origin = location.origin, key = $("key").value;
  $("curl").textContent = `curl ${origin}/${PATHS[mode]} \\\n  -H 'content-type: application/json' \\\n` +
    (key ? `  -H "authorization: Bearer $FSDFM_API_KEY" \\\n` : "") + `  -d ${shellQuote(JSON.stringify(asked))}`;
  const { steps, ...rest } = asked;
  const list = (options) => Object.entries(options).map(([name, value]) => `${name}=${literal(value)}`).join(", ");
  const client = `from openai import OpenAI\n\nclient = OpenAI(base_url=${literal(origin + "/v1")}, api_key=${key ? 'os.environ["FSDFM_API_KEY"]' : '"none"'})\n`;
  $("python").textContent = (key ? "import os\n\n" : "") + client + (mode === "write"
    ? `answer = client.completions.create(${list({ prompt: null, ...rest }).replace("prompt=null", "prompt=None")}, extra_body={"steps": ${steps}})\nprint(answer.choices[0].text)`
    : `answer = client.post("/${mode === "gaps" ? "infill" : "repair"}", body=${literal(asked).replace("true", "True").replace("false", "False")}, cast_to=object)\nprint(answer["choices"][0]["text"])`);
  const options = list({ steps, seed: asked.seed, ...(asked.temperature ? { temperature: asked.temperature } : {}) });
  const call = mode === "gaps" ? `lm.infill(${literal(asked.text)}, ${options})`
    : mode === "repair" && asked.corrupt
      ? `damaged = lm.corrupt(${literal(asked.text)}, ${asked.corrupt}, seed=${asked.seed})\nlm.repair(damaged.tokens, ${asked.blind ? "None" : "damaged.damaged"}, ${options})`
      : mode === "repair" ? `lm.repair(${literal(asked.text)}, ${options})`
        : `lm.generate(${asked.prompt ? literal(asked.prompt) : "None"}, ${asked.suffix ? `suffix=${literal(asked.suffix)}, ` : ""}length=${card.given + asked.max_tokens + 1}, ${options})`;
  $("library").textContent = `import fsdfm\n\nlm = fsdfm.load(${literal(asked.model)})\n${call}`;
  $("code").hidden = false;
}

// --- gaps by hand -----------------------------------------------------------------------------------------------------

const GAP = /\\\[\[|\[\[(\d{1,6})\]\]/g;

function parts(text) { // words, white space and gaps in turn
  const found = [];
  let at = 0;
  for (const match of text.matchAll(GAP)) {
    if (match[1] === undefined) continue;
    found.push(...(text.slice(at, match.index).match(/\s+|[^\s]+/g) || []), { gap: +match[1] });
    at = match.index + match[0].length;
  }
  return [...found, ...(text.slice(at).match(/\s+|[^\s]+/g) || [])];
}

const joined = (list) => list.map((part) => (typeof part === "string" ? part : `[[${part.gap}]]`)).join("");

function drawWords(focus = null) {
  const list = parts($("gaps").value);
  const put = (next, place) => { $("gaps").value = joined(next); drawWords(place); };
  $("words").replaceChildren(...list.map((part, index) => {
    if (typeof part === "string") {
      if (!part.trim()) return document.createTextNode(" ");
      const word = element("button", { type: "button", class: "word", "aria-label": `make a gap of ${part}` }, visible(part));
      word.addEventListener("click", () => put(list.with(index, { gap: Math.max(1, Math.ceil(part.length / 4)) }), index));
      return word;
    }
    const size = element("output", {}, String(part.gap));
    const slide = element("input", { type: "range", min: 1, max: 40, value: Math.min(40, part.gap), "aria-label": `length of gap, tokens` });
    slide.addEventListener("input", () => { part.gap = +slide.value; size.textContent = slide.value; $("gaps").value = joined(list); });
    const close = element("button", { type: "button", class: "plain", "aria-label": "close the gap" }, "×");
    close.addEventListener("click", () => put(list.filter((_, place) => place !== index), index));
    return element("span", { class: "gap", style: `--tokens:${Math.min(40, part.gap)}` }, slide, size, close);
  }));
  if (focus !== null) ($("words").children[Math.min(focus, $("words").children.length - 1)]?.querySelector("input") || $("gaps")).focus();
}

// --- the server -------------------------------------------------------------------------------------------------------

let known = [];
let looking = null;

function otherModel() { return known.map((model) => model.id).find((id) => id !== $("model").value); }

function fillModels(list) {
  const chosen = $("model").value;
  known = list;
  $("model").replaceChildren(...list.map((model) => element("option", { value: model.id, selected: model.id === chosen }, model.id)));
  describeModel();
}

let described = null;

function describeModel() {
  const model = known.find((each) => each.id === $("model").value), other = otherModel();
  if (model && model.id !== described) { // what the user has set stays until another model is chosen
    described = model.id;
    $("steps").value = (model.advice && model.advice.steps) || 8;
  }
  if (model) { $("room").max = Math.max(8, Math.floor((model.length - 16) / 8) * 8); showValues(); }
  $("compare-row").hidden = !other;
  $("compare-name").textContent = other || "";
}

async function look() {
  clearTimeout(looking);
  let words, state, delay = 15000;
  try {
    const response = await fetch("v1/models", { headers: headers(), cache: "no-store" });
    if (response.ok) {
      fillModels((await response.json()).data);
      state = "up"; words = `${known.length} model${known.length === 1 ? "" : "s"}: ${known.map((model) => model.id).join(", ")}`;
    } else {
      state = "down"; words = (await refusal(response)).message;
    }
  } catch { state = "down"; delay = 2000; words = "the server does not answer; trying again …"; }
  $("server").dataset.state = state;
  $("server-words").textContent = words;
  looking = setTimeout(look, delay);
}

// --- the form -----------------------------------------------------------------------------------------------------------

function choose(name, focus = false) {
  mode = name;
  for (const each of Object.keys(PATHS)) {
    const tab = $(`tab-${each}`), on = each === name;
    tab.setAttribute("aria-selected", on); tab.tabIndex = on ? 0 : -1;
    $(`panel-${each}`).hidden = !on;
    if (on && focus) tab.focus();
  }
  $("go").textContent = VERBS[name];
  if (name === "gaps") drawWords();
}

function showValues() {
  $("blind-row").hidden = !$("corrupt").value; // what is not damaged here is always looked for
  $("steps-value").textContent = $("steps").value;
  $("room-value").textContent = $("room").value;
}

function setUp() {
  const names = Object.keys(PATHS);
  for (const name of names) {
    $(`tab-${name}`).addEventListener("click", () => choose(name));
    $(`tab-${name}`).addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (move) { event.preventDefault(); choose(names[(names.indexOf(mode) + move + names.length) % names.length], true); }
    });
  }
  $("ask").addEventListener("submit", (event) => { event.preventDefault(); go(); });
  $("ask").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); go(); } });
  $("stop").addEventListener("click", () => running && running.abort());
  $("dice").addEventListener("click", () => { $("seed").value = Math.floor(Math.random() * 1e6); });
  $("gaps").addEventListener("input", () => drawWords());
  $("model").addEventListener("change", describeModel);
  $("key").addEventListener("change", look);
  for (const id of ["steps", "room", "corrupt"]) $(id).addEventListener("input", showValues);
  showValues(); choose("write"); look();
}

setUp();
