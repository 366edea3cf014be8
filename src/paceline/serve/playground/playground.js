// The page at "/". Text of models, users and servers only ever becomes text nodes.
"use strict";

const $ = (id) => document.getElementById(id);
const AGAIN_MS = 2000; // between two looks for a server that is gone
let key = ""; // in memory alone
let messages = []; // of the conversation
let sources = []; // that the server drafts with
let choosable = true; // whether a request may choose among them
let tokens = []; // of the last answer, with where they come from
let steps = []; // of the last answer, as its trace has them
let asked = null; // the last request
const texts = new Set(); // of all requests of this page
let running = null; // its AbortController
let generation = 0; // grows with each new chat

class Refusal extends Error {}

// -- small helpers

function make(tag, content, kind) {
  const made = document.createElement(tag);
  if (content !== undefined) made.append(String(content));
  if (kind) made.className = kind;
  return made;
}

function draw(tag, fields, content) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(fields)) made.setAttribute(name, value);
  if (content !== undefined) made.append(content);
  return made;
}

function cells(...contents) {
  const row = make("tr");
  for (const content of contents) row.append(content instanceof Element ? content : make("td", content));
  return row;
}

function colour(source) {
  if (source === null || source === "") return "";
  if (!sources.includes(source)) sources.push(source);
  return `s${sources.indexOf(source) % 8}`;
}

function say(text, bad = false) {
  $("state").textContent = text;
  $("state").classList.toggle("bad", bad);
}

function complain(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

// -- the server

function headers() {
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function call(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers() });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  const error = new Refusal(told.error?.message ?? `the server answers ${answer.status}`);
  error.status = answer.status;
  throw error;
}

async function connect() {
  try {
    const served = (await (await call("/v1/models")).json()).data;
    const told = await (await call("/v1/speculation")).json();
    $("key-form").hidden = true;
    serve(served, told);
    say("ready");
  } catch (error) {
    if (error.status === 401) {
      say("a key is needed", true);
      if (key) complain(error.message);
      $("key-form").hidden = false;
      $("key").focus();
      return;
    }
    say(error instanceof Refusal ? error.message : "the server is gone", true);
    setTimeout(connect, AGAIN_MS);
  }
}

function serve(served, told) {
  const before = $("served").value;
  $("served").replaceChildren(...served.map((one) => make("option", one.id)));
  if (served.some((one) => one.id === before)) $("served").value = before;
  $("model").textContent = `${served[0].id}, drafter ${told.drafter ?? "none"}`;
  $("nodes").placeholder = told.max_nodes;
  choosable = told.engine.speculation.sources.length > 0;
  const known = choosable ? told.engine.speculation.sources : told.drafter ? [told.drafter] : [];
  if (known.join() !== sources.slice(0, known.length).join()) {
    sources = [...known];
    $("sources").querySelectorAll("label").forEach((old) => old.remove());
    $("sources").append(...known.map(choice));
  }
  legend();
  curl();
}

function choice(source) {
  const label = make("label"), box = make("input");
  Object.assign(box, { type: "checkbox", checked: true, value: source });
  label.append(box, " ", make("span", source, `swatch ${colour(source)}`));
  return label;
}

function lost(error) {
  console.warn(error);
  complain("The server is gone; what came of the answer stays. This page looks for it again.");
  say("the server is gone", true);
  setTimeout(connect, AGAIN_MS);
}

// -- the request

function speculation() {
  const boxes = [...$("sources").querySelectorAll("input")];
  const chosen = boxes.filter((box) => box.checked).map((box) => box.value);
  if (boxes.length && !chosen.length) return false;
  const wanted = { provenance: true, trace: true };
  if (chosen.length < boxes.length) wanted.sources = chosen;
  if (choosable && $("nodes").value) wanted.max_nodes = Number($("nodes").value);
  return wanted;
}

function request(text, seed) {
  const body = { model: $("served").value, messages: [...messages, { role: "user", content: text }] };
  body.max_completion_tokens = Number($("tokens").value) || 200;
  body.temperature = Number($("temperature").value);
  body.seed = seed;
  if ($("schema").value.trim()) {
    let schema;
    try {
      schema = JSON.parse($("schema").value);
    } catch (error) {
      throw new Refusal(`The schema is no JSON: ${error.message}`);
    }
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  return { ...body, speculation: speculation(), return_token_ids: true, stream: true };
}

function curl() {
  let body = asked;
  try {
    if ($("text").value.trim() || !asked) body = request($("text").value, Number($("seed").value));
  } catch (error) {
    $("curl").textContent = error.message;
    return;
  }
  const quoted = JSON.stringify(body, null, 1).replaceAll("'", "'\\''");
  const keyed = key ? " -H \"authorization: Bearer $PACELINE_KEY\"" : "";
  const where = `${location.origin}/v1/chat/completions`;
  $("curl").textContent = `curl -N ${where} -H 'content-type: application/json'${keyed} -d '${quoted}'`;
}

// Events of an answer, as they come; Refusal where one is an error, TypeError where the server is lost.
async function* events(body, signal) {
  const answer = await call("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) throw new TypeError("the stream has no end");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (!part.startsWith("data: ")) continue;
      const told = JSON.parse(part.slice(6));
      if (told.error) throw new Refusal(told.error.message);
      yield told;
    }
  }
}

// -- an answer

// Tokens whose text has not come yet: a stop string may be held back, a letter may have several tokens.
class Painter {
  constructor(into) {
    this.into = into;
    this.waiting = [];
  }

  take(text, provenance) {
    this.waiting.push(...provenance);
    while (text) {
      const at = this.waiting.findIndex((one) => one.token && text.startsWith(one.token));
      const next = at >= 0 ? this.waiting.splice(0, at + 1)[at] : this.waiting.shift();
      const length = at >= 0 ? next.token.length : this.until(text);
      this.paint(text.slice(0, length), next);
      text = text.slice(length);
    }
  }

  // Where the text of the next waiting token begins.
  until(text) {
    const places = this.waiting.map((one) => (one.token ? text.indexOf(one.token) : -1)).filter((at) => at > 0);
    return places.length ? Math.min(...places) : text.length;
  }

  paint(text, origin) {
    const source = origin?.source ?? null;
    const span = make("span", text, `token ${colour(source)}`);
    span.title = source === null ? "the target's own" : `${source}, depth ${origin.depth}`;
    this.into.append(span);
  }
}

function bubble(role) {
  const item = make("li", undefined, role);
  item.append(make("span", role === "user" ? "You" : "Model", "who"));
  $("log").append(item);
  return item;
}

function clock() {
  return { first: 0, last: 0, later: 0, ids: [] };
}

function tick(times, ids) {
  if (!ids?.length) return;
  times.last = performance.now();
  if (times.first) times.later += ids.length;
  else times.first = times.last;
  times.ids.push(...ids);
}

function rate(times) {
  const seconds = (times.last - times.first) / 1000;
  return seconds > 0 ? times.later / seconds : 0;
}

async function send() {
  const text = $("text").value;
  if (!text.trim() || running) return;
  complain("");
  const again = texts.has(text);
  const drawn = Math.floor(Math.random() * 2 ** 31);
  let body;
  try {
    body = request(text, $("seed").value ? Number($("seed").value) : drawn);
  } catch (error) {
    complain(error.message);
    return;
  }
  asked = body;
  texts.add(text);
  $("examples").hidden = true;
  $("text").value = "";
  curl();
  bubble("user").append(text);
  messages.push({ role: "user", content: text });
  await during(() => answer(body, bubble("model"), again));
}

// Run something that Stop stops, and say how it went.
async function during(work) {
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  $("log").ariaBusy = "true";
  try {
    await work();
    say("ready");
  } catch (error) {
    if (error.name === "AbortError") say("stopped");
    else if (error instanceof Refusal) refused(error);
    else lost(error);
  } finally {
    running = null;
    $("send").disabled = false;
    $("stop").disabled = true;
    $("log").ariaBusy = "false";
  }
}

function refused(error) {
  complain(error.message);
  say("refused", true);
  if (error.status === 401) connect();
}

async function answer(body, item, again) {
  const painter = new Painter(item), times = clock(), begun = performance.now(), mine = generation;
  let text = "", why = "stopped";
  steps = [];
  tokens = [];
  $("speed").textContent = "";
  say("answering");
  try {
    for await (const told of events(body, running.signal)) {
      for (const one of told.choices) {
        text += one.delta.content ?? "";
        tokens.push(...(one.provenance ?? []));
        painter.take(one.delta.content ?? "", one.provenance ?? []);
        tick(times, one.token_ids);
        if (one.finish_reason) why = one.finish_reason;
        if (one.trace?.length) traced(one.trace);
      }
      $("log").scrollTop = $("log").scrollHeight;
    }
  } finally {
    item.append(make("span", `${times.ids.length} tokens, ${why}`, "end"));
    if (mine === generation && text) messages.push({ role: "assistant", content: text });
    else if (mine === generation) takeBack(item, why);
  }
  const first = `${rate(times).toFixed(0)} tokens/s, the first after ${(times.first - begun).toFixed(0)} ms`;
  const remembered = again && body.speculation && (body.speculation.sources ?? sources).includes("suffix");
  $("speed").textContent = remembered ? `Asked before, and look-ups (suffix) remember its answer: ${first}` : first;
  if ($("compare").checked && body.speculation) await plainly(body, times);
}

// No text came of a message: it goes back into its box, and out of the log where the model was not heard at all.
function takeBack(item, why) {
  const { content } = messages.pop();
  $("text").value ||= content;
  if (why === "stopped") for (const one of [item.previousSibling, item]) one.remove();
}

async function plainly(body, drafted) {
  const before = $("speed").textContent, times = clock();
  $("speed").textContent = `${before}; now the same plainly ..`;
  say("the same request, plainly");
  try {
    for await (const told of events({ ...body, speculation: false }, running.signal)) {
      for (const one of told.choices) tick(times, one.token_ids);
    }
  } catch (error) {
    $("speed").textContent = before;
    throw error;
  }
  const same = times.ids.join() === drafted.ids.join() ? "the same tokens" : "other tokens";
  const [fast, plain] = [rate(drafted), rate(times)];
  const ratio = plain ? `: ${(fast / plain).toFixed(2)} times as fast` : "";
  $("speed").textContent = `${before}; plainly ${plain.toFixed(0)} tokens/s${ratio}, ${same}`;
}

// -- what speculation did

function traced(more) {
  steps.push(...more);
  const slider = $("step");
  const fullest = steps.reduce((best, step, at) => (step.path.length > steps[best].path.length ? at : best), 0);
  slider.max = steps.length; // before its value, which is cut at it
  slider.value = fullest + 1;
  slider.disabled = false;
  tree(steps[fullest], fullest + 1);
  legend();
  lengths();
}

function legend() {
  const drafted = new Map(sources.map((name) => [name, [0, 0]]));
  let own = 0;
  for (const step of steps) {
    step.sources.forEach((name, node) => {
      if (!node) return;
      const counts = drafted.get(name) ?? [0, 0];
      drafted.set(name, [counts[0] + 1, counts[1] + step.path.includes(node)]);
    });
    own += step.emitted > step.path.length;
  }
  const rows = [...drafted].map(([name, counts]) => cells(swatch(name), ...counts));
  $("legend").replaceChildren(...rows, cells("the target's own", "", own));
}

function swatch(name) {
  const cell = make("td");
  cell.append(make("span", name, `swatch ${colour(name)}`));
  return cell;
}

function lengths() {
  const counts = [];
  for (const { emitted } of steps) counts[emitted] = (counts[emitted] ?? 0) + 1;
  const rows = [...counts.keys()].filter((length) => counts[length]).map((length) => {
    const cell = make("td", undefined, "wide"), bar = make("span", undefined, "bar");
    bar.style.width = `${(100 * counts[length]) / steps.length}%`;
    cell.append(bar);
    return cells(length, counts[length], cell);
  });
  $("lengths").replaceChildren(...rows);
  const tokens = steps.reduce((sum, step) => sum + step.emitted, 0);
  $("mean").textContent = `${(tokens / steps.length).toFixed(2)} tokens a step in ${steps.length} steps`;
}

const WIDE = 96, HIGH = 30, ROOM = 12; // of a node with its surroundings, and letters in it

// Leaves take a line each, from top to bottom; a parent stands beside its first child.
function places(parents) {
  const depth = [], line = [], children = parents.map(() => []);
  parents.forEach((parent, node) => parent >= 0 && children[parent].push(node));
  let lines = 0;
  const place = (node, deep) => {
    depth[node] = deep;
    for (const child of children[node]) place(child, deep + 1);
    line[node] = children[node].length ? line[children[node][0]] : lines++;
  };
  place(0, 0);
  return { depth, line, lines };
}

function tree(step, number) {
  const { depth, line, lines } = places(step.parents), on = new Set(step.path);
  const picture = draw("svg", { width: (Math.max(...depth) + 2) * WIDE, height: lines * HIGH + HIGH + 8 });
  const box = (x, y, text, kind) => {
    picture.append(draw("rect", { x: x + 2, y: y + 4, width: WIDE - 16, height: HIGH - 6, rx: 4, class: kind }));
    picture.append(draw("text", { x: x + 7, y: y + 20 }, short(text)));
  };
  const edge = (from, to, kind) => {
    const [x, y, end] = [from[0] + WIDE - 14, from[1] + 16, to[1] + 16];
    picture.append(draw("path", { d: `M${x} ${y}C${x + 8} ${y} ${x + 8} ${end} ${to[0] + 2} ${end}`, class: kind }));
  };
  const at = (node) => [depth[node] * WIDE, line[node] * HIGH];
  step.parents.forEach((parent, node) => parent >= 0 && edge(at(parent), at(node), on.has(node) ? "on" : ""));
  step.texts.forEach((text, node) => box(...at(node), text, `${colour(step.sources[node])} ${on.has(node) ? "on" : ""}`));
  const last = step.path.at(-1) ?? 0, own = [(depth[last] + 1) * WIDE, lines * HIGH];
  if (step.emitted > step.path.length) {
    edge(at(last), own, "on");
    box(...own, tokens[step.first + step.path.length]?.token ?? "", "own");
  }
  $("tree").replaceChildren(picture);
  describe(step, number);
}

function describe(step, number) {
  const kept = step.path.map((node) => `“${step.texts[node]}”`).join(" ");
  const drafted = step.tokens.length - 1;
  $("tree").ariaLabel = `Step ${number}: ${drafted} drafted behind “${step.texts[0]}”, ${step.path.length} accepted ${kept}`;
  const ms = ["draft", "verify", "host"].map((part) => `${part} ${step[`${part}_ms`].toFixed(1)} ms`).join(", ");
  const nodes = `${drafted} of ${step.allowed} allowed nodes, ${step.path.length} accepted, ${step.emitted} tokens`;
  $("step-says").textContent = `Step ${number}: ${nodes}. Budget: ${step.why || "none"}. ${ms}.`;
}

function short(text) {
  const shown = text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·");
  return [...shown].length > ROOM - 1 ? `${[...shown].slice(0, ROOM - 2).join("")}…` : shown;
}

// -- events

function stop() {
  running?.abort();
}

function clear() {
  stop();
  generation += 1;
  messages = [];
  steps = [];
  asked = null;
  for (const id of ["log", "tree", "lengths"]) $(id).replaceChildren();
  for (const id of ["speed", "mean", "step-says"]) $(id).textContent = "";
  $("examples").hidden = false;
  $("tree").ariaLabel = "No step yet";
  $("step").disabled = true;
  complain("");
  legend();
  curl();
  $("text").focus();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
$("examples").addEventListener("click", (event) => {
  if (event.target.tagName !== "BUTTON") return;
  $("text").value = event.target.textContent;
  send();
});
$("stop").addEventListener("click", stop);
$("clear").addEventListener("click", clear);
$("step").addEventListener("input", () => tree(steps[$("step").value - 1], Number($("step").value)));
$("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText($("curl").textContent).then(() => say("copied"), () => say("select and copy it", true));
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value;
  $("key").value = "";
  complain("");
  connect();
});
document.querySelector("aside").addEventListener("input", curl);
$("text").addEventListener("input", curl);
connect();
