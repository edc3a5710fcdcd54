"use strict";
// The playground: asks the server, shows every state of the text in place. Texts enter the page as text, never as markup.

const $ = (id) => document.getElementById(id);
const HUES = 8;
const FEWEST_SHOWN = 4; // steps unless somebody chooses: a single one leaves nothing to watch
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

function binOf(state, index, table) { return state.last[index] ? table.find((each) => state.last[index] <= each.last) : null; }

function tokenSpan(state, index, table) {
  const step = state.last[index], bin = binOf(state, index, table);
  const given = state.given.has(index);
  const names = [bin ? `k${bin.hue}` : given ? "given" : "kept"];
  if (state.marked.has(index)) names.push("marked");
  if (state.now.has(index)) names.push("now");
  const when = step ? `last changed at step ${step}` : given ? "given" : "never changed";
  const damaged = state.marked.has(index) ? "; damaged or replaced" : "";
  const ends = bin && binOf(state, index + 1, table) !== bin; // the number stands at the end of a run, as in a timeline
  return element("span", { class: names.join(" "), title: when + damaged, "data-bin": ends && bin.number }, visible(state.pieces[index]));
}

function draw(figure, state, steps) {
  const table = bins(steps);
  const spans = state.pieces.map((_, index) => tokenSpan(state, index, table));
  figure.text.replaceChildren(...spans);
  const every = state.pieces.map((_, index) => index), count = (test) => every.filter(test).length;
  const entry = (names, words, many, number) =>
    many && element("li", {}, element("span", { class: names, tabindex: 0, "data-bin": number }, words), ` ${many}`);
  figure.legend.replaceChildren(...[
    ...table.map((bin) => entry(`k${bin.hue}`, `step ${bin.first === bin.last ? bin.first : `${bin.first}-${bin.last}`}`,
      count((index) => binOf(state, index, table) === bin), bin.number)),
    entry("kept", "never changed", count((index) => !state.last[index] && !state.given.has(index))),
    entry("given", "given", count((index) => !state.last[index] && state.given.has(index))),
    entry("marked", "damaged or replaced", state.marked.size),
  ].filter(Boolean));
}

// --- a card: one model's text, its states, its slider ---------------------------------------------------------------

class Card {
  constructor(asked) { // what is asked for now: the form may change while a text is on its way
    const model = asked.model;
    this.asked = asked; this.mode = mode; this.steps = asked.steps; this.states = [];
    this.text = element("div", { class: "text", dir: "auto", role: "group", "aria-busy": "true", "aria-label": `The text of ${model}` });
    this.legend = element("ul", { class: "legend" });
    this.facts = element("p", { class: "facts", role: "status", "aria-live": "polite", "aria-busy": "true" }, "waiting …");
    this.notes = element("div");
    this.slider = element("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": `Step shown of ${model}` });
    this.play = element("button", { type: "button", class: "plain", "aria-label": "Play the steps" }, "▶");
    this.numbers = element("label", { hidden: true }, element("input", { type: "checkbox" }), " step numbers");
    this.at = element("output", {}, "");
    this.calls = element("span", { class: "calls" }, "");
    this.slider.addEventListener("input", () => { this.halt(); this.show(+this.slider.value); });
    this.play.addEventListener("click", () => (this.timer ? this.halt() : this.start()));
    this.bar = element("div", { class: "bar", hidden: true }, this.play, this.slider, this.at);
    this.node = element("article", { "data-model": model },
      element("h3", {}, element("span", {}, model), this.calls), this.facts,
      element("figure", { class: "fsdfm-timeline" },
        element("figcaption", {}, element("span", { class: "note" }, "Tokens by the step of their last change, and how many"), this.legend, this.numbers),
        this.text),
      this.notes, this.bar);
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
    this.steps = made.steps; this.length = d.length;
    const marked = d.marked.length ? d.marked : d.asked === null ? [] : d.replaced;
    const state = { pieces: d.pieces, last: d.last_changed, given: new Set(d.given), marked: new Set(marked), now: new Set() };
    if (this.states.length) this.states[this.states.length - 1] = state; else this.states.push(state);
    const waited = performance.now() - this.began;
    this.calls.textContent = `${made.calls} call${made.calls === 1 ? "" : "s"}`;
    this.facts.textContent = `${Math.round(1000 * made.seconds)} ms, ${Math.round(waited)} ms until it was here · seed ${made.seed}` +
      ` · from t = ${made.start.toFixed(2)}` +
      (this.mode === "write" ? (reason === "stop" ? " · the text ended" : ` · cut off at ${this.asked.max_tokens} tokens`) : "");
    this.notes.replaceChildren(...made.warnings.map((note) => element("p", { class: "note" }, note)));
    if (this.mode === "repair") this.repaired(d);
    this.rest();
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
  refresh() { this.slider.max = this.states.length - 1; this.bar.hidden = this.numbers.hidden = this.states.length < 2; }

  show(index) {
    this.slider.value = index; this.at.textContent = `${index} / ${this.states.length - 1}`;
    draw(this, this.states[index], this.steps);
  }

  start() {
    let index = +this.slider.value >= this.states.length - 1 ? 0 : +this.slider.value;
    this.button("❚❚", "Pause");
    const tick = () => {
      this.show(index);
      if (++index < this.states.length) this.timer = setTimeout(tick, EXAMPLE_SPAN); else this.halt();
    };
    tick();
  }

  halt() { clearTimeout(this.timer); this.timer = null; this.button("▶", "Play the steps"); }
  button(sign, words) { this.play.textContent = sign; this.play.setAttribute("aria-label", words); }

  fail(words) { this.facts.textContent = words; this.rest(); }
  rest() { for (const part of [this.text, this.facts]) part.setAttribute("aria-busy", "false"); } // now it may be read out
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
  $("go").setAttribute("aria-disabled", "true"); $("stop").hidden = false; // not disabled: the focus stays where it is
  if ($("results").getBoundingClientRect().top > innerHeight - 120) $("go").scrollIntoView(); // on a phone
  const ends = await Promise.allSettled(models.map((model) => run(model, running.signal)));
  running = null;
  if (document.activeElement === $("stop")) $("go").focus();
  $("go").setAttribute("aria-disabled", "false"); $("stop").hidden = true;
  const failed = ends.find((end) => end.status === "rejected");
  if (failed) { say(failed.reason.message); look(); } else if (ends[0].value) writeCode(ends[0].value);
}

function say(words) { $("message").textContent = words; $("message").hidden = !words; }

// --- the same elsewhere ---------------------------------------------------------------------------------------------

const shellQuote = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

function literal(value) { // in Python
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each)}`).join(", ")}}`;
}

const list = (options) => Object.entries(options).map(([name, value]) => `${name}=${literal(value)}`).join(", ");

function writeCode(card) {
  const { asked, mode } = card, origin = location.origin, key = $("key").value;
  $("curl").textContent = `curl ${origin}/${PATHS[mode]} \\\n  -H 'content-type: application/json' \\\n` +
    (key ? `  -H "authorization: Bearer $FSDFM_API_KEY" \\\n` : "") + `  -d ${shellQuote(JSON.stringify(asked))}`;
  const { steps, ...rest } = asked;
  const client = `from openai import OpenAI\n\nclient = OpenAI(base_url=${literal(origin + "/v1")}, api_key=${key ? 'os.environ["FSDFM_API_KEY"]' : '"none"'})\n`;
  $("python").textContent = (key ? "import os\n\n" : "") + client + (mode === "write"
    ? `answer = client.completions.create(${list({ prompt: null, ...rest })}, extra_body={"steps": ${steps}})\nprint(answer.choices[0].text)`
    : `answer = client.post("/${mode === "gaps" ? "infill" : "repair"}", body=${literal(asked)}, cast_to=object)\nprint(answer["choices"][0]["text"])`);
  $("library").textContent = `import fsdfm\n\nlm = fsdfm.load(${literal(asked.model)})\n${inLibrary(card)}\nprint(text.text)`;
  $("code").hidden = false;
}

function inLibrary({ asked, mode, length }) {
  const { text, steps, seed, temperature } = asked;
  const options = list({ steps, seed, ...(temperature === undefined ? {} : { temperature }) });
  if (mode === "gaps") return `text = lm.infill(${literal(text)}, ${options})`;
  if (mode === "repair" && asked.corrupt)
    return `damaged = lm.corrupt(${literal(text)}, ${asked.corrupt}, seed=${seed})\n` +
      `text = lm.repair(damaged.tokens, ${asked.blind ? "None" : "damaged.damaged"}, ${options})`;
  if (mode === "repair") return `text = lm.repair(${literal(text)}, ${options})`;
  const suffix = asked.suffix ? `suffix=${literal(asked.suffix)}, ` : "";
  return `text = lm.generate(${literal(asked.prompt ?? null)}, ${suffix}length=${length}, ${options})`;
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
const isSpace = (part) => typeof part === "string" && !part.trim();

function without(list, index) { // a gap that was a word is that word again; of two spaces around another, one goes
  if (list[index].was !== undefined) return list.with(index, list[index].was);
  const double = index > 0 && isSpace(list[index - 1]) && (index + 1 === list.length || isSpace(list[index + 1]));
  return list.filter((_, place) => place !== index && !(double && place === index - 1));
}

function drawWords(list = parts($("gaps").value), focus = null) {
  const put = (next, place) => { $("gaps").value = joined(next); drawWords(next, place); };
  let number = 0;
  $("words").replaceChildren(...list.map((part, index) => { // a node for each part
    if (isSpace(part)) return document.createTextNode(" ");
    if (typeof part === "string") {
      const word = element("button", { type: "button", class: "word", "aria-label": `make a gap of ${part}` }, visible(part));
      word.addEventListener("click", () => put(list.with(index, { gap: Math.max(1, Math.ceil(part.length / 4)), was: part }), index));
      return word;
    }
    const name = `gap ${++number}`;
    const size = element("output", {}, String(part.gap));
    const slide = element("input", { type: "range", min: 1, max: 40, value: Math.min(40, part.gap), "aria-label": `${name}, tokens` });
    slide.addEventListener("input", () => { part.gap = +slide.value; size.textContent = slide.value; $("gaps").value = joined(list); });
    const close = element("button", { type: "button", class: "plain", "aria-label": `close ${name}${part.was ? `: ${part.was} again` : ""}` }, "×");
    close.addEventListener("click", () => put(without(list, index), index));
    return element("span", { class: "gap", style: `--tokens:${Math.min(40, part.gap)}` }, slide, size, close);
  }));
  if (focus === null) return;
  const near = [...$("words").childNodes].slice(Math.max(0, Math.min(focus, list.length) - 1));
  const node = $("words").childNodes[focus];
  const target = node && node.nodeType === Node.ELEMENT_NODE ? node : near.find((each) => each.nodeType === Node.ELEMENT_NODE);
  (target ? target.querySelector("input") || target : $("gaps")).focus();
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

let described = null, stepsChosen = false;

function describeModel() {
  const model = known.find((each) => each.id === $("model").value), other = otherModel();
  if (model && model.id !== described) { // what the user has set stays
    described = model.id;
    if (!stepsChosen) $("steps").value = Math.max(FEWEST_SHOWN, (model.advice && model.advice.steps) || 8);
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
  if (name === "gaps" && !$("words").children.length) drawWords();
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
      const at = names.indexOf(mode), to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: -1 }[event.key];
      if (to !== undefined) { event.preventDefault(); choose(names.at(to % names.length), true); }
    });
  }
  $("ask").addEventListener("submit", (event) => { event.preventDefault(); go(); });
  $("ask").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); go(); } });
  $("stop").addEventListener("click", () => running && running.abort());
  $("dice").addEventListener("click", () => { $("seed").value = Math.floor(Math.random() * 1e6); });
  $("gaps").addEventListener("input", () => drawWords());
  $("model").addEventListener("change", describeModel);
  $("key").addEventListener("change", look);
  $("steps").addEventListener("input", () => { stepsChosen = true; });
  for (const id of ["steps", "room", "corrupt"]) $(id).addEventListener("input", showValues);
  showValues(); choose("write"); look();
}

setUp();
