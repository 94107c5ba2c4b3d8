/** The copies of a model (replicas): how many answer, how many are desired, and what changes that. */

import { call } from "./api.js";
import { naturally, plural } from "./format.js";
import { LOOKING, nameOf } from "./node.js";
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.module.js";

const MOST = 8;
const EVERY_MS = 2000;

/** The placements of each model, ordered by the names of their nodes. */
export function byModel(placements, known) {
  const where = ({ stages, id }) => `${nameOf(known, stages[0]?.node)} ${id}`;
  const groups = new Map();
  for (const placement of [...placements].sort((a, b) => naturally(where(a), where(b)))) {
    groups.set(placement.model, [...(groups.get(placement.model) ?? []), placement]);
  }
  return groups;
}

/** The answers in progress on all copies. */
export const answersOn = (copies) => copies.reduce((sum, { answers = 0 }) => sum + answers, 0);

export const answerWords = (count) => (count > 0 ? plural(count, "answer") : "");

/** How many copies answer: "2", or "1 of 2" where some are missing. */
export const readyWords = (ready, desired) => (ready === desired ? `${ready}` : `${ready} of ${desired}`);

/**
 * Asks for the state by the clock while it is looked at and answers share copies or are in progress:
 * they begin and end without an event.
 */
export function useAnswers(placements, refresh) {
  const shared = placements.some(({ replicas, auto_replicas: auto, answers }) => replicas > 1 || auto || answers > 0);
  useEffect(() => {
    if (!shared) return;
    const timer = setInterval(() => document.hidden || refresh(), EVERY_MS);
    return () => clearInterval(timer);
  }, [shared]);
}

/**
 * The number of copies of a loaded model, with buttons. Buttons at a bound stay focusable, so that
 * the focus is not lost there. Changes are sent in their order; the last one is shown until the
 * node has it.
 */
export function Copies({ copies, may, refresh }) {
  const { model, replicas = 1, auto_replicas: auto = false, replicas_missing: reason, asked_for: options } = copies[0];
  const [change, setChange] = useState(null);
  const [failure, setFailure] = useState("");
  const sending = useRef(Promise.resolve());
  const ready = copies.filter(({ status }) => status === "ready").length;
  const follows = change ? change.replicas === "auto" : auto;
  const desired = change && !follows ? change.replicas : replicas;
  const locked = !may || ready === 0;

  function request(number, dropped = {}) {
    const next = { ...dropped, replicas: number };
    setChange(next);
    setFailure("");
    sending.current = sending.current.then(() => send(next));
  }
  async function send(next) {
    try {
      await call("POST", "/v1/placements", { body: { model, ...next } });
    } catch (error) {
      setFailure(error.message);
    }
    await refresh();
    setChange((latest) => (latest === next ? null : latest));
  }
  const step = (name, sign, number) => {
    const bound = follows || number < 1 || number > MOST;
    return html`<button type="button" class="step" aria-label=${name} disabled=${locked} aria-disabled=${bound}
      aria-describedby=${may ? null : LOOKING} onClick=${() => bound || request(number)}>${sign}</button>`;
  };
  return html`
    <div class="copies" role="group" aria-label=${`Copies of ${model}`}>
      <span class="line">
        <span>Copies</span>
        ${step("One copy less", "−", desired - 1)}
        <output>${readyWords(ready, desired)}</output>
        ${step("One copy more", "+", desired + 1)}
      </span>
      <label class="follow">
        <input type="checkbox" role="switch" checked=${follows} disabled=${locked}
          aria-describedby=${may ? null : LOOKING}
          onChange=${({ target }) => request(target.checked ? "auto" : replicas)} />
        <span>As many as answers need</span>
      </label>
      <p class="warn-text small" aria-live="polite">${!change && reason && `Not ${desired} yet: ${reason}`}</p>
      ${options && html`<p class="line small">
        <span>Placed with ${options}, as was asked for.</span>
        <button type="button" disabled=${locked} onClick=${() => request(follows ? "auto" : desired, { min_nodes: 1 })}>Drop that</button></p>`}
      ${failure && html`<p class="notice bad" role="alert">${failure}</p>`}
    </div>`;
}
