/**
 * A conversation as a tree: every message names its parent, and `leaf` is the end of the branch
 * that is shown. Editing a question or asking for another answer adds a sibling, so nothing that
 * was said is lost. All functions are pure.
 */

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
  title: conversation.title || titleOf(message.text),
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

/** Showing the branch through `id`, down to what was said last below it. */
export function turnedTo(conversation, id) {
  let leaf = id;
  for (;;) {
    const next = conversation.messages.findLast(({ parent }) => parent === leaf);
    if (!next) return { ...conversation, leaf };
    leaf = next.id;
  }
}

/** What a model is sent of a branch; a question without an answer would be two in a row. */
export function spoken(messages) {
  return messages.flatMap((message, index) => {
    if (message.role === "assistant") {
      return message.text ? [{ role: "assistant", content: message.text }] : [];
    }
    const answered = messages[index + 1];
    return answered && !answered.text ? [] : [{ role: "user", content: message.text }];
  });
}

/** The first line of a question, for the list. */
export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}

/** A conversation as Markdown, the branch that is shown. */
export function asMarkdown(conversation) {
  const parts = branch(conversation).map(({ role, text, model }) =>
    role === "user" ? `**You**\n\n${text}` : `**${model ?? "Answer"}**\n\n${text}`,
  );
  return `# ${conversation.title || "Conversation"}\n\n${parts.join("\n\n---\n\n")}\n`;
}

const byId = ({ messages }) => new Map(messages.map((message) => [message.id, message]));
