// One answer in the conversation: its tool calls, its text, and the time and tokens of its last request.

import { ApiError } from "./api.js";
import { make } from "./dom.js";
import { count, duration, rate } from "./format.js";
import { badge } from "./replicas.js";

const NEAR_END = 60; // pixels: do not scroll if the user has scrolled up further
const ALL_AT_ONCE_S = 0.05;

export class Answer {
  /** Append an empty answer to the log. */
  constructor(log) {
    this.log = log;
    this.text = document.createTextNode("");
    this.stopped = false;
    this.body = make("div", { className: "text" }, this.text);
    this.element = make("div", { className: "message assistant", "data-state": "streaming" }, this.body);
    log.append(this.element);
    this.begin();
    this.toEnd();
  }

  /** A request is sent, the first or the one with the results of tools. */
  begin() {
    this.sent = performance.now();
    this.first = this.reason = undefined;
    this.text.data = "";
    this.replica = "";
    this.usage = null;
    this.calls = []; // in the API's format
  }

  toEnd() {
    this.log.scrollTop = this.log.scrollHeight;
  }

  add(chunk) {
    this.usage = chunk.usage ?? this.usage;
    const [choice] = chunk.choices;
    if (!choice) return;
    this.last = performance.now();
    if (this.first === undefined) [this.first, this.firstTokens] = [this.last, this.usage?.completion_tokens ?? 1];
    this.reason = choice.finish_reason ?? this.reason;
    const { log } = this;
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
    this.text.appendData(choice.delta.content ?? "");
    for (const delta of choice.delta.tool_calls ?? []) this.addToCall(delta);
    if (isAtEnd) this.toEnd();
  }

  /** The first delta of a call has its id and name; all have parts of its arguments. */
  addToCall({ index, function: part, ...rest }) {
    this.calls[index] ??= { ...rest, function: { name: part.name, arguments: "" } };
    this.calls[index].function.arguments += part.arguments ?? "";
  }

  /** Show a call and its result; what the model has said so far stays above it. */
  showCall({ name, arguments: sent }, result) {
    if (this.text.data.trim()) this.body.before(make("div", { className: "said" }, this.text.data));
    this.text.data = "";
    const row = (label, text) => make("div", {}, make("dt", {}, label), make("dd", {}, make("code", {}, text)));
    this.body.before(make("dl", { className: "call", "data-tool": name }, row(name, sent), row("result", result)));
    this.toEnd();
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
    this.toEnd();
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
