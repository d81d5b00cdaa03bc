// The playground: a streamed conversation, with the time and tokens of each answer.

import { Answer } from "./answer.js";
import { ApiError, streamChat } from "./api.js";
import { byId, make } from "./dom.js";
import { asJson, definitions, resultOf } from "./tools.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "frequency_penalty", "seed"];
const MAX_ROUNDS = 4; // of tool calls before an answer

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
      if ("tools" in button.dataset) form.elements.tools.checked = true;
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
  if (form.elements.tools.checked) body.tools = definitions;
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
  log.append(make("div", { className: "message user" }, text));
  const answer = new Answer(log);
  const exchange = [{ role: "user", content: text }];
  const controller = (running = new AbortController());
  setBusy(true);
  try {
    await complete(exchange, answer, controller.signal);
  } catch (error) {
    if (controller.signal.aborted) answer.stopped = true;
    else answer.fail(error);
  }
  answer.finish();
  running = null;
  setBusy(false);
  if (!answer.element.isConnected) return; // a new chat has started meanwhile
  // An unanswered message is not part of the conversation.
  if (answer.text.data) messages.push(...exchange, { role: "assistant", content: answer.text.data });
}

/** Request an answer, as often as it calls tools; add the calls and their results to the exchange. */
async function complete(exchange, answer, signal) {
  for (let round = 0; round < MAX_ROUNDS; round++) {
    await stream(exchange, answer, signal);
    if (!answer.calls.length) return;
    exchange.push(...callTools(answer));
  }
  throw new ApiError(`the model called tools ${MAX_ROUNDS} times without an answer`);
}

/** Request the next part of an exchange and show it as it comes. */
async function stream(exchange, answer, signal) {
  const system = form.elements.system.value.trim();
  const head = system ? [{ role: "system", content: system }] : [];
  answer.begin();
  const body = { messages: [...head, ...messages, ...exchange], ...parameters() };
  const { replica, chunks } = await streamChat(body, signal);
  answer.replica = replica;
  for await (const chunk of chunks) answer.add(chunk);
}

/** Run the tools that an answer calls, show it, and return the messages for the next request. */
function callTools(answer) {
  const { calls, text } = answer;
  const asked = { role: "assistant", content: text.data, tool_calls: calls };
  const results = [];
  for (const call of calls) {
    const content = asJson(resultOf(call.function));
    answer.showCall(call.function, content);
    results.push({ role: "tool", tool_call_id: call.id, content });
  }
  return [asked, ...results];
}

function setBusy(busy) {
  log.setAttribute("aria-busy", String(busy)); // screen readers wait for the whole answer
  const [gone, here] = busy ? [byId("send"), byId("halt")] : [byId("halt"), byId("send")];
  const hadFocus = document.activeElement === gone;
  gone.hidden = true;
  here.hidden = false;
  if (hadFocus) here.focus(); // else the keyboard focus returns to the top of the page
}
