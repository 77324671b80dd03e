"use strict";
// The page of one server: a chat, and what each step of its one stream brought. No library, no request to elsewhere.

const $ = (id) => document.getElementById(id);
const POLL_MS = 2000;
const PITCH = 8; // of a bar in the plot, pixels

let turns = []; // of this chat, each a message and its answer
let current = null; // the turn being answered
let shown = null; // the turn in the live panel
let info = null; // the last /server_info

const ms = (x) => (x >= 1e4 ? `${(x / 1e3).toFixed(1)} s` : `${x.toFixed(x < 10 ? 2 : x < 100 ? 1 : 0)} ms`);
const per = (x) => x.toFixed(x < 100 ? 1 : 0);
const several = (n, one) => `${n.toLocaleString("en")} ${one}${n === 1 ? "" : "s"}`;
const say = (text) => ($("status").textContent = text);

function make(tag, text, parent, kind = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  node.className = kind;
  parent.append(node);
  return node;
}

// ---- the server

class Refusal extends Error {}

let asking = null; // whoever meets a 401 waits for the same dialog
function askKey() {
  const dialog = $("key");
  $("key-why").textContent = sessionStorage.apiKey ? "The last one was not accepted." : "";
  asking ??= new Promise((done) => {
    dialog.returnValue = "";
    dialog.onclose = () => {
      const given = dialog.returnValue === "ok" && $("key-value").value.trim();
      if (given) sessionStorage.apiKey = given;
      $("key-value").value = "";
      asking = null;
      done(Boolean(given));
    };
    dialog.showModal();
  });
  return asking;
}

async function call(path, options = {}) {
  const key = sessionStorage.apiKey;
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Refusal("The server cannot be reached. Is it still running?");
  });
  if (response.ok) return response;
  // another request may have brought a new key in the meantime
  if (response.status === 401 && (sessionStorage.apiKey !== key || (await askKey()))) return call(path, options);
  const said = await response.json().catch(() => null);
  const message = said?.error?.message ?? `The server answered ${response.status} and gave no reason.`;
  throw Object.assign(new Refusal(message), { status: response.status });
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

const sent = ({ id, name, args }) => ({ id, type: "function", function: { name, arguments: args || "{}" } });

// What the model is told: earlier turns that brought something, and this turn's message.
function messages(turn) {
  const list = $("system").value.trim() ? [{ role: "system", content: $("system").value }] : [];
  for (const one of turns) {
    if (one !== turn && !one.content && !one.calls.length) continue;
    list.push({ role: "user", content: one.said });
    if (one === turn) break;
    const answer = { role: "assistant", content: one.content };
    if (one.reasoning) answer.reasoning_content = one.reasoning;
    if (one.calls.length) answer.tool_calls = one.calls.map(sent);
    list.push(answer);
  }
  return list;
}

function request(turn) {
  const body = { messages: messages(turn), stream: true, return_meta_info: true };
  body.stream_options = { include_usage: true };
  for (const name of ["temperature", "max_tokens", "seed"]) {
    if ($(name).value) body[name] = Number($(name).value);
  }
  if ($("thinking").value) body.chat_template_kwargs = { enable_thinking: $("thinking").value === "on" };
  try {
    if ($("tools").value.trim()) body.tools = JSON.parse($("tools").value);
  } catch (error) {
    throw new Refusal(`Tools is not JSON: ${error.message}`);
  }
  return body;
}

// ---- one turn

function begin(said) {
  const node = $("turn").content.cloneNode(true).firstElementChild;
  const part = (name) => node.querySelector(`.${name}`);
  const turn = { said, node, part, content: "", reasoning: "", calls: [], steps: [], tokens: 0, fresh: [] };
  node.turn = turn;
  part("said").textContent = said;
  part("copy").onclick = () => copy(turn);
  part("again").onclick = () => again(turn);
  turns.push(turn);
  $("hello").hidden = true;
  $("log").append(node);
  $("log").scrollTop = $("log").scrollHeight;
  poll(); // which ends while a key is missing
  answer(turn);
}

async function answer(turn) {
  const control = (turn.control = new AbortController());
  turn.began = performance.now();
  turn.state = "waiting";
  current = shown = turn;
  draw();
  say("Waiting for the answer.");
  try {
    const body = JSON.stringify(request(turn));
    const response = await call("/v1/chat/completions", { method: "POST", body, signal: control.signal });
    turn.state = "answering";
    turn.place = Number(response.headers.get("X-Queue-Position"));
    turn.waited = Number(response.headers.get("X-Queue-Wait-Ms"));
    for await (const event of events(response.body)) take(turn, event);
    if (!turn.finish) throw new Refusal("The stream broke off before the answer had ended.");
    turn.state = "done";
  } catch (error) {
    turn.state = control.signal.aborted ? "stopped" : "failed";
    turn.fault = error instanceof Refusal ? error.message : `The answer was lost: ${error.message}`;
  }
  if (current === turn) current = null;
  if (!turn.node.isConnected) return; // another chat was begun
  turn.over = true;
  draw();
  if (turn.state !== "failed") say(`${turn.state === "done" ? "Answer" : "Stopped"}: ${turn.content}`);
}

// One event. meta_info comes with the last event of a step: its count less the one before is the step's tokens.
function take(turn, event) {
  if (event.error) throw new Refusal(event.error.message);
  const choice = event.choices[0];
  if (!choice) return; // usage, which meta_info has told
  const { delta, meta_info: meta } = choice;
  const step = turn.steps.length;
  const text = (where, piece) => piece && turn.fresh.push({ where, piece, step });
  text("reasoning", delta.reasoning_content);
  text("content", delta.content);
  turn.reasoning += delta.reasoning_content ?? "";
  turn.content += delta.content ?? "";
  for (const { index, id, function: said } of delta.tool_calls ?? []) {
    turn.calls[index] ??= { id, name: said.name, args: "" };
    turn.calls[index].args += said.arguments;
    turn.fresh.push({ where: index, piece: said.arguments, step }); // also without text: it shows the name
  }
  if (meta && meta.completion_tokens > turn.tokens) {
    turn.steps.push({ tokens: meta.completion_tokens - turn.tokens, at: performance.now() });
    turn.tokens = meta.completion_tokens;
  }
  if (choice.finish_reason) [turn.finish, turn.meta] = [choice.finish_reason, meta];
  frame ||= requestAnimationFrame(draw);
}

function again(turn) {
  if (current) return;
  turns.pop(); // only the last one has the button
  turn.node.remove();
  begin(turn.said);
  $("stop").focus(); // where the keyboard was is gone
}

function send(event) {
  event.preventDefault();
  const said = $("input").value.trim();
  if (!said || current) return;
  $("input").value = "";
  grow();
  begin(said);
}

const stop = () => current?.control.abort(); // the server lets go of the request within a step

function renew() {
  stop();
  turns = [];
  current = shown = null;
  for (const node of document.querySelectorAll(".turn")) node.remove();
  $("hello").hidden = false;
  $("input").focus();
  untip();
  draw();
  say("New chat.");
}

async function copy(turn) {
  const [text, button] = [turn.content || turn.reasoning, turn.part("copy")];
  await navigator.clipboard?.writeText(text).catch(() => null);
  if (!navigator.clipboard) {
    const area = make("textarea", text, document.body, "unseen"); // plain HTTP from another machine: the old way
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

// ---- drawing, once a frame however fast steps come

let frame = 0;
function draw() {
  cancelAnimationFrame(frame);
  frame = 0;
  const log = $("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60; // whoever reads further up stays there
  if (shown) drawTurn(shown);
  if (atEnd) log.scrollTop = log.scrollHeight;
  const [now, gone] = current ? ["stop", "send"] : ["send", "stop"];
  const moves = document.activeElement === $(gone);
  [$(now).hidden, $(gone).hidden] = [false, true];
  if (moves) $(now).focus(); // one stands where the other stood
  drawState();
  drawLive();
}

function drawTurn(turn) {
  const { part, state, over, fault } = turn;
  for (const { where, piece, step } of turn.fresh.splice(0)) write(turn, place(turn, where), piece, step);
  part("waiting").hidden = over || turn.tokens > 0;
  part("fault").hidden = state !== "failed";
  part("fault").textContent = state === "failed" ? fault : "";
  part("copy").hidden = !over || !(turn.content || turn.reasoning);
  part("again").hidden = !over;
  part("again").textContent = state === "failed" ? "Retry" : "Again";
  if (!over) return;
  const { accept, tpot } = numbers(turn);
  const facts = turn.tokens ? [several(turn.tokens, "token")] : [];
  if (accept) facts.push(`${accept.toFixed(2)} a step`);
  if (tpot) facts.push(`${ms(tpot)} each`);
  if (state === "stopped") facts.push("stopped");
  if (turn.finish === "abort") facts.push("ended by the server");
  if (turn.finish === "length") facts.push("cut at the token limit");
  part("facts").textContent = facts.join(" · ");
}

// The node that a kind of text goes to: reasoning, content, or the call of an index.
function place(turn, where) {
  const [reasoning, content] = [turn.part("reasoning"), turn.part("content")];
  if (where === "reasoning") {
    reasoning.hidden = false;
    return reasoning.querySelector(".text");
  }
  if (!content.firstChild && !turn.calls.some((call) => call.node)) reasoning.open = false; // the answer begins
  if (where === "content") return content;
  const told = turn.calls[where];
  if (!told.node) {
    const box = make("div", "", turn.part("calls"), "call");
    make("code", told.name, make("h3", "Call of ", box));
    told.node = make("div", "", box, "text");
  }
  return told.node;
}

// A step's text is one band, also where it comes in several events.
function write(turn, node, text, step) {
  const last = node.lastElementChild;
  if (last?.step === step) last.textContent += text;
  else if (text) {
    const band = make("span", text, node, step % 2 ? "band odd" : "band");
    band.step = step;
    if (!turn.stop) rove(turn, band);
  }
}

function numbers({ steps: [first, ...later], tokens, meta, began }) {
  const last = later.at(-1);
  const rest = tokens - first?.tokens; // the first piece came with the prompt and took no step
  const here = last?.at > first?.at ? (last.at - first.at) / rest : null;
  const there = meta?.tpot_s ? meta.tpot_s * 1e3 : null;
  const [ttftHere, ttftThere] = [first && first.at - began, meta?.ttft_s && meta.ttft_s * 1e3];
  const [rateHere, rateThere] = [here && 1e3 / here, meta?.decode_throughput];
  return {
    here, there, tpot: there ?? here, ttftHere, ttftThere, rateHere, rateThere, rate: rateThere ?? rateHere,
    accept: last ? rest / later.length : null,
  };
}

function drawLive() {
  const n = shown ? numbers(shown) : {};
  const put = (id, value, how) => ($(id).textContent = value == null ? "–" : how(value));
  put("tpot", n.tpot, ms);
  put("rate", n.rate, per);
  put("accept", n.accept, (x) => x.toFixed(2));
  put("ttft-here", n.ttftHere, ms);
  put("ttft-there", n.ttftThere, ms);
  put("tpot-here", n.here, ms);
  put("tpot-there", n.there, ms);
  put("rate-here", n.rateHere, per);
  put("rate-there", n.rateThere, per);
  const line = (waited) => (shown.place ? `${shown.place} in front, waited ${ms(waited)}` : "served at once");
  put("own", shown?.waited, line);
  $("brief").textContent = n.tpot ? `${ms(n.tpot)} a token, ${n.accept.toFixed(2)} tokens a step` : "";
  if (!$("live").open) return;
  drawPlot(shown?.steps ?? [], n.accept);
  drawBudget(n);
}

function svg(tag, parent, values) {
  const node = parent.appendChild(document.createElementNS($("plot").namespaceURI, tag));
  for (const [name, value] of Object.entries(values)) node.setAttribute(name, value);
  return node;
}

// A bar a step, the newest that fit.
function drawPlot(steps, mean) {
  const { clientWidth: width, clientHeight: height } = $("plot");
  const left = 18;
  const fit = Math.max(1, Math.floor((width - left) / PITCH));
  const from = Math.max(0, steps.length - fit);
  const most = Math.max(info?.speculative_num_draft_tokens ?? 1, ...steps.slice(from).map((step) => step.tokens));
  const y = (tokens) => height - 2 - (tokens / most) * (height - 12);
  for (const part of ["grid", "bars", "mean"]) $(part).replaceChildren();
  for (let tokens = 0; tokens <= most; tokens += Math.ceil(most / 4)) {
    svg("line", $("grid"), { x1: left, x2: width, y1: y(tokens), y2: y(tokens) });
    svg("text", $("grid"), { x: left - 6, y: y(tokens) + (tokens ? 4 : 1) }).textContent = tokens;
  }
  for (let step = from; step < steps.length; step++) {
    const [x, top] = [left + (step - from) * PITCH + 1, y(steps[step].tokens)];
    const kind = step % 2 ? "odd" : step ? "even" : "first";
    svg("rect", $("bars"), { class: kind, x, y: top, width: PITCH - 2, height: height - 2 - top }).step = step;
  }
  if (mean) svg("line", $("mean"), { x1: left, x2: width, y1: y(mean), y2: y(mean) });
  const told = mean ? `mean ${mean.toFixed(2)}` : "";
  $("span").textContent = from ? `${told}, last ${fit} of ${steps.length}` : told;
  $("plot").setAttribute("aria-label", mean ? `${several(steps.length, "step")}, ${told} tokens` : "no steps yet");
}

// The time of a step, cut into what each of its tokens costs: TPOT x accept length.
function drawBudget({ tpot, accept }) {
  const step = tpot && tpot * accept;
  const power = step && 10 ** Math.floor(Math.log10(step));
  const end = step && [1, 2, 5, 10].find((k) => k * power >= step) * power; // of the scale, which so stays put
  $("budget").replaceChildren();
  for (let tokens = accept ?? 0; step && tokens > 0.005; tokens--) {
    make("span", "", $("budget")).style.width = `${(100 * tpot * Math.min(1, tokens)) / end}%`;
  }
  $("sum").textContent = step ? `${ms(step)} = ${ms(tpot)} × ${accept.toFixed(2)}` : "";
  $("scale").textContent = step ? `${Number(end.toPrecision(1))} ms` : "–";
}

// ---- what the server tells of itself

function drawState(trouble = info ? "" : "connecting") {
  const quiet = info?.running ? "busy elsewhere" : "ready";
  const text = trouble || (current ? current.state : quiet);
  $("state").textContent = info?.queued && !trouble ? `${text}, ${info.queued} in line` : text;
  const well = { ready: "good", "not reachable": "bad", "key needed": "bad" };
  $("state").dataset.kind = well[text] ?? "busy";
}

function drawCard() {
  const rows = (node, entries) => {
    node.replaceChildren();
    for (const [name, value, why] of entries) {
      const row = make("div", "", node);
      make("dt", name, row);
      make("dd", value, row);
      if (why) make("dd", why, row, "quiet");
    }
  };
  const average = info.internal_states[0].avg_spec_accept_length;
  $("name").textContent = info.served_model_name;
  $("line").textContent = `${Number(info.running)} running, ${info.queued} queued`;
  rows($("card"), [
    ["model", info.served_model_name], ["device", info.device], ["dtype", info.dtype],
    ["context", several(info.max_context, "token")], ["speculation", info.speculation],
    ["rows a step", info.speculative_num_draft_tokens ?? 1], ["run-ahead", several(info.run_ahead, "step")],
    ["accepted since the start", average ? `${average.toFixed(2)} a step` : "–"],
  ]);
  // each is "name = value: reason"
  rows($("decisions"), info.decisions.map((text) => text.match(/^(.+?) = (.*?): (.*)$/s)?.slice(1) ?? [text, ""]));
}

let [timer, asked] = [0, -POLL_MS];
function poll() {
  clearTimeout(timer);
  if (document.hidden) return; // nobody looks
  timer = setTimeout(ask, Math.max(0, asked + POLL_MS - performance.now()));
}

async function ask() {
  asked = performance.now();
  try {
    info = await (await call("/server_info")).json();
    drawState();
    drawCard();
  } catch ({ status }) {
    drawState({ 401: "key needed", 503: "loading" }[status] ?? "not reachable");
    if (status === 401) return; // the next message asks again
  }
  poll();
}

// ---- bands: what a step brought, for pointer and keys

const banded = () => $("bands").ariaPressed === "true";

// One band of an answer is in the tab order; the arrow keys go on from there.
function rove(turn, band) {
  turn.stop?.removeAttribute("tabindex");
  turn.stop = band;
  band.tabIndex = banded() ? 0 : -1;
}

function untip() {
  $("tip").hidden = true;
  for (const node of document.querySelectorAll(".lit")) node.classList.remove("lit");
}

function tip(event) {
  untip();
  // streaming and arrow keys scroll: the tip of a focused band goes along
  const node = event.type === "scroll" ? document.activeElement : event.target;
  const turn = node.closest(".turn")?.turn ?? shown;
  if (node.step === undefined || !banded()) return;
  if (shown !== turn && !current) {
    shown = turn; // an older answer's steps
    drawLive();
  }
  const { tokens, at } = turn.steps[node.step] ?? { tokens: 0 };
  const gap = node.step && tokens && at - turn.steps[node.step - 1].at; // the network may bring several steps at once
  const later = gap < 0.1 ? "came with the last" : `${ms(gap)} later`;
  const when = node.step ? `step ${node.step}, ${later}` : "with the prompt";
  $("tip").textContent = tokens ? `${several(tokens, "token")} · ${when}` : "held back until the end";
  $("tip").hidden = false;
  const boxes = [...node.getClientRects()];
  const widest = boxes.reduce((one, other) => (other.width > one.width ? other : one));
  const near = boxes.find((box) => event.clientY >= box.top && event.clientY <= box.bottom) ?? widest;
  const { width, height } = $("tip").getBoundingClientRect();
  $("tip").style.left = `${Math.max(6, Math.min(near.left, innerWidth - width - 6))}px`;
  $("tip").style.top = `${near.top > height + 10 ? near.top - height - 6 : near.bottom + 6}px`;
  node.setAttribute("aria-describedby", "tip");
  for (const other of [...turn.node.querySelectorAll(".band"), ...(turn === shown ? $("bars").children : [])]) {
    if (other.step === node.step) other.classList.add("lit");
  }
}

function walk(event) {
  const way = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
  if (!way || event.target.step === undefined) return;
  event.preventDefault();
  const { turn } = event.target.closest(".turn");
  const seen = [...turn.node.querySelectorAll(".band")].filter((band) => band.checkVisibility());
  const next = seen[Math.max(0, Math.min(seen.indexOf(event.target) + way, seen.length - 1))];
  rove(turn, next);
  next.focus();
}

// ---- keys, buttons, the look

function grow() {
  $("input").style.height = "auto";
  $("input").style.height = `${$("input").scrollHeight + 2}px`;
}

function look(theme) {
  document.documentElement.dataset.theme = localStorage.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
}

document.addEventListener("keydown", (event) => {
  const chord = event.ctrlKey || event.metaKey;
  if ($("key").open) return; // Esc is the dialog's
  if (chord && event.key.toLowerCase() === "k") {
    event.preventDefault();
    renew();
  } else if (event.key === "Escape") {
    stop();
    untip();
  } else if (event.key === "/" && !chord && !event.target.matches("input, textarea, select")) {
    event.preventDefault();
    $("input").focus();
  }
});
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event); // composing: it picks a character
});
$("input").addEventListener("input", grow);
$("form").addEventListener("submit", send);
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", renew);
$("key-cancel").addEventListener("click", () => $("key").close());
$("theme").addEventListener("click", () => look({ auto: "light", light: "dark", dark: "auto" }[localStorage.theme]));
$("bands").addEventListener("click", () => {
  $("bands").ariaPressed = String(!banded());
  for (const turn of turns) if (turn.stop) rove(turn, turn.stop);
});
$("settings").addEventListener("input", () => {
  const changed = [...$("settings").querySelectorAll("[id]")].filter((one) => "value" in one)
    .filter((one) => one.value !== (one.defaultValue ?? ""));
  $("changed").textContent = changed.map((one) => one.id.replace("_", " ")).join(", ");
});
for (const area of [$("log"), $("plot")]) {
  for (const kind of ["pointerover", "focusin", "scroll"]) area.addEventListener(kind, tip);
  for (const kind of ["pointerleave", "focusout"]) area.addEventListener(kind, untip);
}
$("log").addEventListener("keydown", walk);
$("live").addEventListener("toggle", drawLive);
new ResizeObserver(drawLive).observe($("plot"));
window.addEventListener("resize", grow);
document.addEventListener("visibilitychange", poll);

if (matchMedia("(max-width: 56rem)").matches) $("live").open = false; // a phone is for the chat first
look(localStorage.theme ?? "auto");
poll();
