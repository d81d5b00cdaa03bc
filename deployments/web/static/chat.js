// The playground: a streamed conversation, with the time and tokens of each answer.

import { ApiError, streamChat } from "./api.js";
import { byId, make } from "./dom.js";
import { count, duration, rate } from "./format.js";
import { badge } from "./replicas.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "frequency_penalty", "seed"];
const NEAR_END = 60; // pixels: do not scroll if the user has scrolled up further
const ALL_AT_ONCE_S = 0.05;

const messages = []; // of the conversation, in the API's format
let running = null; // the AbortController of the streaming answer
let form, prompt, log, welcome;

export function start() {
  [form, prompt, log, welcome] = ["composer", "prompt", "log", "welcome"].map(byId);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  byId("halt").addEventListener("click", () => {
    running?.abort();
    prompt.focus();
  });
  byId("new-chat").addEventListener("click", reset);
  for (const button of byId("suggestions").querySelectorAll("button")) {
    button.addEventListener("click", () => {
      prompt.value = button.textContent;
      send();
      prompt.focus();
    });
  }
}

function reset() {
  running?.abort();
  messages.length = 0;
  log.replaceChildren(welcome);
  prompt.value = "";
  prompt.focus();
}

/** The sampling parameters from the form. */
function parameters() {
  const body = {};
  for (const name of NUMBERS) {
    const text = form.elements[name].value.trim();
    if (text) body[name] = Number(text);
  }
  const stop = form.elements.stop.value.split("\n").filter((line) => line);
  if (stop.length) body.stop = stop;
  return body;
}

function isValid() {
  if (form.checkValidity()) return true;
  byId("parameters").open = true; // else the browser cannot show the invalid field
  form.reportValidity();
  return false;
}

async function send() {
  const text = prompt.value.trim();
  if (!text || running || !isValid()) return;
  prompt.value = "";
  welcome.remove();
  messages.push({ role: "user", content: text });
  log.append(make("div", { className: "message user" }, text));
  const answer = new Answer();
  const system = form.elements.system.value.trim();
  const conversation = system ? [{ role: "system", content: system }, ...messages] : [...messages];
  const controller = (running = new AbortController());
  setBusy(true);
  try {
    const { replica, chunks } = await streamChat({ messages: conversation, ...parameters() }, controller.signal);
    answer.replica = replica;
    for await (const chunk of chunks) answer.add(chunk);
  } catch (error) {
    if (controller.signal.aborted) answer.stopped = true;
    else answer.fail(error);
  }
  answer.finish();
  running = null;
  setBusy(false);
  if (!messages.length) return; // a new chat has started meanwhile
  if (answer.text.data) messages.push({ role: "assistant", content: answer.text.data });
  else messages.pop(); // an unanswered message is not part of the conversation
}

function setBusy(busy) {
  log.setAttribute("aria-busy", String(busy)); // screen readers wait for the whole answer
  const [gone, here] = busy ? [byId("send"), byId("halt")] : [byId("halt"), byId("send")];
  const hadFocus = document.activeElement === gone;
  gone.hidden = true;
  here.hidden = false;
  if (hadFocus) here.focus(); // else the keyboard focus returns to the top of the page
}

/** One answer and its statistics. */
class Answer {
  constructor() {
    this.sent = performance.now();
    this.text = document.createTextNode("");
    this.replica = "";
    this.usage = null;
    this.stopped = false;
    this.body = make("div", { className: "text" }, this.text);
    this.element = make("div", { className: "message assistant", "data-state": "streaming" }, this.body);
    log.append(this.element);
    log.scrollTop = log.scrollHeight;
  }

  add(chunk) {
    this.usage = chunk.usage ?? this.usage;
    const [choice] = chunk.choices;
    if (!choice) return;
    this.last = performance.now();
    if (this.first === undefined) [this.first, this.firstTokens] = [this.last, this.usage?.completion_tokens ?? 1];
    this.reason = choice.finish_reason ?? this.reason;
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
    this.text.appendData(choice.delta.content ?? "");
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  fail(error) {
    const later = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
    const status = error.status ? `${error.status}: ` : "";
    const message = error instanceof ApiError ? error.message : "the server cannot be reached";
    const sentence = `${status}${message.replace(/[.…]?$/, ".")}${later}`;
    this.element.append(make("p", { className: "error", role: "alert" }, sentence));
    this.failed = true;
  }

  finish() {
    this.element.dataset.state = this.failed ? "failed" : this.stopped ? "stopped" : "done";
    if (this.usage && this.first !== undefined) this.element.append(this.facts());
    else if (this.stopped) this.element.append(make("p", { className: "hint" }, "stopped"));
    log.scrollTop = log.scrollHeight;
  }

  /**
   * The statistics of the answer. The rate covers the tokens after the first chunk. If all tokens came at once, as a busy
   * server may send a short answer, the rate covers the whole time.
   */
  facts() {
    const { prompt_tokens: asked, completion_tokens: made, prompt_tokens_details: details } = this.usage;
    const seconds = (this.last - this.first) / 1000;
    const later = made - this.firstTokens;
    const facts = make("dl", { className: "facts" });
    const fact = (name, label, ...value) =>
      facts.append(make("div", { "data-fact": name }, make("dt", {}, label), make("dd", {}, ...value)));
    if (this.replica) fact("replica", "replica", badge(this.replica));
    fact("ttft", "first token", duration(this.first - this.sent));
    const speed = seconds > ALL_AT_ONCE_S ? later / seconds : (1000 * made) / (this.last - this.sent);
    if (later > 0) fact("rate", "speed", `${rate(speed)} tokens/s`);
    const ending = this.stopped ? ", stopped" : this.reason === "length" ? ", cut at the limit" : "";
    fact("tokens", "answer", `${count(made)} tokens${ending}`);
    const meter = make("span", { className: "meter", "aria-hidden": "true" }, make("span"));
    meter.firstChild.style.width = `${(100 * details.cached_tokens) / asked}%`;
    fact("cached", "prompt", meter, `${count(details.cached_tokens)} of ${count(asked)} tokens cached`);
    return facts;
  }
}
