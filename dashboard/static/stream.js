/** One streamed answer: server-sent events in, closed set of answer events out. */

import { ApiError, apiError, parsed, send } from "./api.js";

/**
 * Yields {kind: "text", text}, {kind: "note", text} (prefill progress, resuming),
 * {kind: "finish", reason} and {kind: "stats", usage, stats}. Throws ApiError for an error event
 * and for a stream that ends without [DONE].
 */
export async function* streamChat(body, signal) {
  const options = { stream: true, stream_options: { include_usage: true } };
  const response = await send("POST", "/v1/chat/completions", {
    body: { ...body, ...options },
    signal,
  });
  for await (const line of lines(response)) {
    const note = line.startsWith(":") ? line.slice(1).trim() : "";
    if (note && note !== "keep-alive") yield { kind: "note", text: note };
    if (!line.startsWith("data:")) continue;
    const data = line.slice("data:".length).trim();
    if (data === "[DONE]") return;
    yield* events(parsed(data), response.status);
  }
  throw new ApiError("The connection ended before the answer did.", { code: "cut_off" });
}

function* events(chunk, status) {
  if (chunk === undefined) throw new ApiError("The node sent a malformed event.", { code: "bad_event" });
  if (chunk.error) throw apiError(chunk, status);
  const [choice] = chunk.choices ?? [];
  if (choice?.delta?.content) yield { kind: "text", text: choice.delta.content };
  if (choice?.finish_reason) yield { kind: "finish", reason: choice.finish_reason };
  if (chunk.usage || chunk.generation_stats) {
    yield { kind: "stats", usage: chunk.usage, stats: chunk.generation_stats };
  }
}

async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await read(reader);
    if (done) break;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) yield part.replace(/\r$/, "");
  }
  if (rest) yield rest;
}

/** A broken connection rejects the read with a TypeError; it is named for a person here. */
async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection to the node broke during the answer.");
  }
}
