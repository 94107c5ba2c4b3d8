/**
 * A conversation as a tree: every message names its parent, and `leaf` is the end of the branch
 * that is shown. Editing a question or asking for another answer adds a sibling, so nothing that
 * was said is lost. All functions are pure.
 */

import { withFiles } from "./files.js";

/** A random id; `crypto.randomUUID` exists on https and loopback only. */
export function freshId() {
  const bytes = crypto.getRandomValues(new Uint8Array(9));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export const newConversation = (options, now = Date.now()) => ({
  id: freshId(),
  title: "",
  created: now,
  updated: now,
  options,
  leaf: null,
  messages: [],
});

/** The messages from the first one to the leaf. */
export function branch(conversation) {
  const known = byId(conversation);
  const found = [];
  for (let at = known.get(conversation.leaf); at; at = known.get(at.parent)) found.unshift(at);
  return found;
}

/** With `message` as the new leaf below `parent`. */
export const grown = (conversation, message, now = Date.now()) => ({
  ...conversation,
  title: conversation.title || titleOf(message.text) || message.files?.[0].name || (message.images ? "An image" : ""),
  updated: now,
  leaf: message.id,
  messages: [...conversation.messages, message],
});

/** With one message changed. */
export const patched = (conversation, id, change) => ({
  ...conversation,
  messages: conversation.messages.map((one) => (one.id === id ? { ...one, ...change } : one)),
});

/** The ids of the messages that are said in the same place, oldest first. */
export const siblings = (conversation, message) =>
  conversation.messages.filter(({ parent }) => parent === message.parent).map(({ id }) => id);

/** Without the message `id` and all that was said below it. */
export function without(conversation, id) {
  const gone = new Set([id]);
  for (const one of conversation.messages) if (gone.has(one.parent)) gone.add(one.id); // parents come first
  const { parent } = conversation.messages.find((one) => one.id === id);
  const left = { ...conversation, messages: conversation.messages.filter((one) => !gone.has(one.id)) };
  if (!gone.has(conversation.leaf)) return left;
  return turnedTo(left, left.messages.findLast((one) => one.parent === parent)?.id ?? parent);
}

/** Whether a model can go on with an answer: not within thoughts, nor after a call. */
export const isUnfinished = ({ text, calls, state, finish, edited, stuck }) =>
  Boolean(text.trim()) && !calls?.length && !stuck && (state !== "done" || finish === "length" || Boolean(edited));

/** The beginning of an answer as a model reads it, to go on with it. */
export const asBegun = ({ text, reasoning }) => ({
  role: "assistant",
  content: text,
  ...(reasoning && { reasoning_content: reasoning }),
});

/** Showing the branch through `id`, down to what was said last below it. */
export function turnedTo(conversation, id) {
  let leaf = id;
  for (;;) {
    const next = conversation.messages.findLast(({ parent }) => parent === leaf);
    if (!next) return { ...conversation, leaf };
    leaf = next.id;
  }
}

/**
 * What a model is sent of a branch. A question without an answer would be two in a row, and a call
 * without its result is one that templates do not expect: both are left out.
 */
export function spoken(messages) {
  return messages.flatMap((message, index) => {
    const [next, after] = messages.slice(index + 1, index + 3);
    if (message.role === "tool") return message.results.map(asResult);
    if (message.role === "user") {
      const unanswered = next && !next.text && after?.role !== "tool";
      return unanswered ? [] : [{ role: "user", content: asContent(message) }];
    }
    if (next?.role === "tool") return [asCalls(message)];
    return message.text ? [{ role: "assistant", content: message.text }] : [];
  });
}

/** A question's text, or parts of it if it has images. */
function asContent({ text: written, images = [], files }) {
  const text = withFiles(written, files);
  if (images.length === 0) return text;
  const pictures = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return [...pictures, ...(text.trim() ? [{ type: "text", text }] : [])];
}

const asResult = ({ id, text }) => ({ role: "tool", tool_call_id: id, content: text });

/** With its thoughts: families that think between calls read them again. */
const asCalls = ({ text, reasoning, calls }) => ({
  role: "assistant",
  content: text,
  ...(reasoning && { reasoning_content: reasoning }),
  tool_calls: calls.map((call, index) => ({
    id: callId(call, index),
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  })),
});

/** Of a call; what was kept by an older page has none. */
export const callId = (call, index) => call.id || `call_${index}`;

/** The first line of a question, for the list. */
export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}

/** A conversation as Markdown, the branch that is shown. */
export function asMarkdown(conversation) {
  const parts = branch(conversation).map(
    ({ role, text, model, calls = [], images = [], files }) =>
      `**${SPEAKERS[role] ?? model ?? "Answer"}**\n\n${[...images.map(() => "*An image*"), withFiles(text, files), ...calls.map(asCode)].filter(Boolean).join("\n\n")}`,
  );
  return `# ${conversation.title || "Conversation"}\n\n${parts.join("\n\n---\n\n")}\n`;
}

const SPEAKERS = { user: "You", tool: "Results of tools" };
const asCode = (call) => `\`\`\`\n${call.name} ${call.arguments}\n\`\`\``;

const byId = ({ messages }) => new Map(messages.map((message) => [message.id, message]));
