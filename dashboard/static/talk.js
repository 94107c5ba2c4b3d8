/** All conversations of this browser, the one that is shown, and the answers that are streaming. */

import { leave, openStore, takeLeft } from "./store.js";
import { branch, freshId, grown, newConversation, patched, spoken, turnedTo } from "./tree.js";
import { useEffect, useState } from "./vendor/htm-preact.module.js";

const REDRAW_MS = 60;
const SAVE_MS = 1000;
const UNDER_WAY = new Set(["waiting", "streaming"]);

/**
 * `list` has all conversations, newest first; `current` is the one that is shown, maybe not in the
 * list yet. Answers go on while another conversation is shown. An answer is a message of role
 * "assistant" with `state` one of waiting | streaming | done | stopped | cut | failed.
 */
export class Talk {
  list = [];
  current = newConversation({});
  lasting = true;
  ready = false;
  #running = new Map();
  #listeners = new Set();
  #store = null;

  async open(id, options) {
    this.#store ??= await openStore();
    this.lasting = this.#store.lasting;
    const left = takeLeft();
    this.list = (await this.#store.all()).map((one) => asRead(one, left));
    this.ready = true;
    this.show(id, options);
  }

  show(id, options) {
    const found = this.list.find((one) => one.id === id);
    this.current = found ?? newConversation(options ?? this.current.options);
    this.#tell();
  }

  subscribe(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  isRunning(id) {
    return this.#running.has(id);
  }

  setOptions(options) {
    this.#put({ ...this.current, options }, this.current.messages.length > 0);
  }

  rename(id, title) {
    const found = this.list.find((one) => one.id === id);
    if (found && title.trim()) this.#put({ ...found, title: title.trim() }, true);
  }

  remove(id) {
    this.stop(id);
    this.list = this.list.filter((one) => one.id !== id);
    this.#store.remove(id);
    if (this.current.id === id) this.current = newConversation(this.current.options);
    this.#tell();
  }

  removeAll() {
    for (const { id } of this.list) this.stop(id);
    this.list = [];
    this.#store.clear();
    this.current = newConversation(this.current.options);
    this.#tell();
  }

  stop(id = this.current.id) {
    this.#running.get(id)?.abort();
  }

  turnTo(message) {
    this.#put(turnedTo(this.current, message), true);
  }

  /** Asks below `parent`: undefined for the end of what is shown, null for a new beginning. */
  ask(text, request, parent = this.current.leaf, images = []) {
    const shown = images.length > 0 ? { images } : {};
    const question = { id: freshId(), parent, role: "user", text, ...shown, at: Date.now() };
    this.#put(grown(this.current, question), true);
    return this.answer(question.id, request);
  }

  /** Says what the tools that the answer `parent` called gave back: [{id, name, text}]. */
  reply(parent, results, request) {
    const text = results.map((result) => result.text).join("\n\n");
    const given = { id: freshId(), parent, role: "tool", text, results, at: Date.now() };
    this.#put(grown(this.current, given), true);
    return this.answer(given.id, request);
  }

  /** Another answer to `question`, beside those that it has. */
  async answer(question, { system, ...fields }) {
    const message = {
      id: freshId(), parent: question, role: "assistant", model: fields.model,
      text: "", state: "waiting", at: Date.now(),
    };
    const conversation = grown(this.current, message);
    const before = branch({ ...conversation, leaf: question });
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...spoken(before)];
    const abort = new AbortController();
    this.#running.get(conversation.id)?.abort();
    this.#running.set(conversation.id, abort);
    this.#put(conversation, true);
    const draw = (change, save) => this.#patch(conversation.id, message.id, change, save);
    const onLeave = (change) => leave(conversation.id, message.id, change);
    const end = await received({ ...fields, messages }, abort.signal, draw, onLeave);
    if (this.#running.get(conversation.id) === abort) this.#running.delete(conversation.id);
    draw(end, true);
  }

  #patch(id, message, change, save) {
    const found = this.list.find((one) => one.id === id);
    if (found) this.#put(patched(found, message, change), save);
  }

  #put(conversation, save) {
    if (this.current.id === conversation.id) this.current = conversation;
    if (conversation.messages.length > 0) {
      const others = this.list.filter(({ id }) => id !== conversation.id);
      this.list = [conversation, ...others].sort((a, b) => b.updated - a.updated);
    }
    if (save && conversation.messages.length > 0) this.#store?.put(conversation);
    this.#tell();
  }

  #tell() {
    for (const listener of this.#listeners) listener();
  }
}

/** Draws again whenever `talk` changes. */
export function useTalk(talk) {
  const [, draw] = useState(0);
  useEffect(() => talk.subscribe(() => draw((n) => n + 1)), [talk]);
  return talk;
}

/** What was kept while an answer was under way ended with the page that asked for it. */
const asRead = (conversation, left) => ({
  ...conversation,
  messages: conversation.messages.map((one) => {
    if (!UNDER_WAY.has(one.state)) return one;
    const last = left.find(({ message }) => message === one.id);
    return { ...one, ...last?.change, state: "cut", note: "" };
  }),
});

/** Streams one answer, redrawn at most every REDRAW_MS, and returns the message's last change. */
async function received(body, signal, draw, onLeave) {
  const { streamChat } = await import("./stream.js");
  const said = { text: "", reasoning: "", calls: [], tokens: [] };
  const end = { state: "done", note: "" };
  let timer = 0;
  let saved = performance.now();
  const redraw = (save) => {
    timer = 0;
    if (save) saved = performance.now();
    draw({ ...taken(said), state: "streaming", note: "" }, save);
  };
  const page = watchPage(() => redraw(true), () => onLeave(taken({ ...said, tokens: [] })));
  try {
    for await (const event of streamChat(body, signal)) {
      if (event.kind === "note") draw({ note: event.text }, false);
      else if (event.kind === "finish") end.finish = event.reason;
      else if (event.kind === "stats") Object.assign(end, { usage: event.usage, stats: event.stats });
      else {
        take(said, event);
        timer ||= setTimeout(() => redraw(performance.now() - saved > SAVE_MS), REDRAW_MS);
      }
    }
  } catch (error) {
    end.state = signal.aborted ? "stopped" : page.left ? "cut" : "failed";
    if (end.state === "failed") end.error = { message: error.message, code: error.code ?? "error" };
  } finally {
    page.end();
    clearTimeout(timer);
  }
  return { ...taken(said), ...end };
}

/** Calls `onHide` when another tab is looked at and `onLeave` when the page goes: `left` from then on. */
function watchPage(onHide, onLeave) {
  const page = { left: false, end };
  const hide = () => document.hidden && onHide();
  const go = () => {
    page.left = true; // its requests break now, which is no fault of the node's
    onLeave();
  };
  function end() {
    removeEventListener("pagehide", go);
    document.removeEventListener("visibilitychange", hide);
  }
  addEventListener("pagehide", go);
  document.addEventListener("visibilitychange", hide);
  return page;
}

function take(said, event) {
  if (event.kind === "text") {
    if (said.reasoning) said.thoughtMs ??= Math.round(performance.now() - said.since);
    said.text += event.text;
  } else if (event.kind === "reasoning") {
    said.since ??= performance.now();
    said.reasoning += event.text;
  } else if (event.kind === "tokens") {
    said.tokens.push(...event.tokens);
  } else {
    const call = (said.calls[event.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= event.id;
    call.name += event.name;
    call.arguments += event.text;
  }
}

const taken = ({ text, reasoning, calls, tokens, thoughtMs }) => ({
  text,
  ...(reasoning && { reasoning, thoughtMs }),
  ...(calls.length > 0 && { calls: calls.map((call) => ({ ...call })) }),
  ...(tokens.length > 0 && { tokens: tokens.slice() }),
});
