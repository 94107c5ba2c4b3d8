/** All conversations of this browser, the one that is shown, and the answers that are streaming. */

import { leave, openStore, takeLeft } from "./store.js";
import { forgetDrafts } from "./drafts.js";
import { asBegun, branch, freshId, grown, newConversation, patched, spoken, turnedTo, without } from "./tree.js";
import { useEffect, useState } from "./vendor/htm-preact.module.js";

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
    forgetDrafts([id]);
    if (this.current.id === id) this.current = newConversation(this.current.options);
    this.#tell();
  }

  removeAll() {
    for (const { id } of this.list) this.stop(id);
    this.list = [];
    this.#store.clear();
    forgetDrafts();
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
  ask(text, request, parent = this.current.leaf, images = [], files = []) {
    const shown = { ...(images.length > 0 && { images }), ...(files.length > 0 && { files }) };
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
  answer(question, request) {
    const message = {
      id: freshId(), parent: question, role: "assistant", model: request.model,
      text: "", state: "waiting", at: Date.now(),
    };
    return this.#receive(grown(this.current, message), message, request);
  }

  /** The rest of an answer: the model reads the text as the beginning of its own. */
  async continueAnswer(message, request) {
    const before = { state: message.state, finish: message.finish };
    const begun = { state: "waiting", finish: undefined, error: undefined, parts: (message.parts ?? 1) + 1 };
    const conversation = patched(this.current, message.id, begun);
    const end = await this.#receive(conversation, message, request, [asBegun(message)]);
    if (end.state !== "failed" || end.text !== message.text) return;
    const stuck = end.error.status === 400; // the next attempt would be refused as well
    this.#patch(conversation.id, message.id, { ...before, error: end.error, stuck, parts: message.parts }, true);
  }

  /** Puts `text` in the place of an answer, as a branch of its own. */
  rewrite({ parent, model }, text) {
    const message = { id: freshId(), parent, role: "assistant", model, text, state: "done", edited: true, at: Date.now() };
    this.#put(grown(this.current, message), true);
  }

  /** Removes a message of the shown conversation with all that was said below it. */
  removeMessage(id) {
    const left = without(this.current, id);
    if (left.messages.length === 0) this.remove(left.id);
    else this.#put(left, true);
  }

  async #receive(conversation, message, { system, ...fields }, begun = []) {
    const before = branch({ ...conversation, leaf: message.parent });
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...spoken(before), ...begun];
    const abort = new AbortController();
    this.#running.get(conversation.id)?.abort();
    this.#running.set(conversation.id, abort);
    this.#put(conversation, true);
    const draw = (change, save) => this.#patch(conversation.id, message.id, change, save);
    const onLeave = (change) => leave(conversation.id, message.id, change);
    // Fetched with the first answer.
    const [{ received }, { sampleDuring }] = await Promise.all([import("./receiving.js"), import("./measures.js")]);
    const end = await sampleDuring(received({ ...fields, messages }, message, abort.signal, draw, onLeave));
    if (this.#running.get(conversation.id) === abort) this.#running.delete(conversation.id);
    draw(end, true);
    return end;
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
