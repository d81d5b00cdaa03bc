// The OpenAI API for the page: streamed chat, and errors with readable messages.

export class ApiError extends Error {
  constructor(message, status = 0, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

async function errorOf(response) {
  let message = `the server answered with ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // no JSON, for instance from a proxy: show the status
  }
  return new ApiError(message, response.status, response.headers.get("Retry-After"));
}

/** Yield the data of each server-sent event of a response. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice("data: ".length);
  }
}

/** POST a chat; return the replica and an async iterator of chunks. Both may throw ApiError. */
export async function streamChat(body, signal) {
  const options = { include_usage: true, continuous_usage_stats: true }; // so that a stopped answer has token counts too
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: options }),
    signal,
  });
  if (!response.ok) throw await errorOf(response);
  return { replica: response.headers.get("X-Pagoda-Replica") ?? "", chunks: chunks(response) };
}

async function* chunks(response) {
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message);
    yield chunk;
  }
  throw new ApiError("the connection was cut before the end of the answer");
}

/** GET the cluster's state. */
export async function liveState() {
  const response = await fetch("live", { cache: "no-store", signal: AbortSignal.timeout(8000) });
  if (!response.ok) throw await errorOf(response);
  return response.json();
}
