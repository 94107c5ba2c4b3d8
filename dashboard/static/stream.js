/** One streamed answer: server-sent events in, a closed set of answer events out. */

import { ApiError, apiError, parsed, send } from "./api.js";

/**
 * Yields {kind: "text" | "reasoning", text}, {kind: "call", index, id, name, text} (a piece of
 * a tool call's arguments), {kind: "tokens", tokens} where `logprobs` were asked for, {kind: "note", text}
 * (loading, prefill, resuming), {kind: "finish", reason} and {kind: "stats", usage, stats}. Throws
 * ApiError for an error event and for a stream that ends without [DONE].
 */
export async function* streamChat(body, signal) {
  const options = { stream: true, stream_options: { include_usage: true } };
  const response = await send("POST", "/v1/chat/completions", {
    body: { ...body, ...options },
    signal,
  });
  for await (const line of lines(response)) {
    const note = line.startsWith(":") ? line.slice(1).trim() : "";
    if (note) yield { kind: "note", text: note };
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
  const { reasoning_content: reasoning, content, tool_calls: calls } = choice?.delta ?? {};
  if (reasoning) yield { kind: "reasoning", text: reasoning };
  if (content) yield { kind: "text", text: content };
  for (const { index = 0, id = "", function: call } of calls ?? []) {
    yield { kind: "call", index, id, name: call?.name ?? "", text: call?.arguments ?? "" };
  }
  if (choice?.logprobs) yield { kind: "tokens", tokens: tokens(choice) };
  if (choice?.finish_reason) yield { kind: "finish", reason: choice.finish_reason };
  if (chunk.usage || chunk.generation_stats) {
    yield { kind: "stats", usage: chunk.usage, stats: chunk.generation_stats };
  }
}

/** Each token's bytes, whether it is an accepted draft, and its log-probability. */
function tokens({ logprobs, accepted_draft_tokens: accepted = 0 }) {
  return (logprobs.content ?? []).map(({ token, bytes, logprob }, index) => ({
    bytes: bytes ?? [],
    control: bytes === null ? token : "",
    draft: index < accepted,
    logprob,
  }));
}

/** The lines of a streamed response. */
export async function* lines(response) {
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
