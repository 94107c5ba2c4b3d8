/** The chat section: which model and how it samples, the transcript and the composer. */

import { Answer } from "./answer.js";
import { roster } from "./cluster.js";
import { useConversation } from "./conversation.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.module.js";

const UNTOUCHED = { model: "", k: "", temperature: "", maxTokens: "", system: "" };

export function Chat({ models = [], placements = [], nodes, refresh }) {
  const [form, setForm] = useState(UNTOUCHED);
  const { turns, busy, ask, stop, retry, clear } = useConversation();
  const set = (change) => setForm((before) => ({ ...before, ...change }));
  const model = models.find(({ id }) => id === form.model) ?? atHand(models);
  const drafts = draftsOf(model, placements);
  const options = () => requestFields(model, drafts, form);

  // An answer may have loaded the model or met a locked node: ask what changed.
  useEffect(() => {
    if (!busy && turns.length > 0) refresh();
  }, [busy]);

  return html`
    <section id="chat" class="panel" aria-labelledby="chat-title" tabindex="-1">
      <div class="line">
        <h2 id="chat-title">Chat</h2>
        <button class="quiet end" disabled=${turns.length === 0} onClick=${clear}>New chat</button>
      </div>
      <${Controls} models=${models} model=${model} drafts=${drafts} form=${form} set=${set} />
      <${Transcript} turns=${turns} busy=${busy} known=${roster(nodes)} model=${model}
        onRetry=${(id) => retry(id, options())} />
      <p class="unseen" role="status">${announcement(turns)}</p>
      <${Composer} busy=${busy} disabled=${!model} onStop=${stop}
        onSend=${(text) => ask(text, options())} />
    </section>`;
}

/** The model of somebody who has not chosen: loaded, or on disk and fitting; else there is none. */
const atHand = (models) =>
  models.find((m) => m.loaded) ?? models.find((m) => m.downloaded && !m.error && m.fits?.nodes > 0);

/** {defaultK, maxK} where the model drafts, {reason} where it does not. */
function draftsOf(model, placements) {
  const head = model?.native_mtp;
  if (!head) return { reason: "This model has no MTP head." };
  const drafting = placements.find((placement) => placement.model === model.id)?.drafting;
  if (drafting?.drafter_kind === "none") return { reason: drafting.reason };
  if (!head.enabled) return { reason: head.reason };
  return { defaultK: head.default_k, maxK: head.max_k };
}

function requestFields(model, drafts, { k, temperature, maxTokens, system }) {
  return {
    model: model.id,
    system: system.trim(),
    ...(temperature !== "" && { temperature: Number(temperature) }),
    ...(maxTokens !== "" && { max_tokens: Number(maxTokens) }),
    ...(drafts.maxK && k !== "" && { num_draft_tokens: Math.min(Number(k), drafts.maxK) }),
  };
}

function announcement(turns) {
  const words = { done: "Answer finished.", stopped: "Answer stopped." };
  return words[turns.at(-1)?.state] ?? "";
}

function Controls({ models, model, drafts, form, set }) {
  const pick = (name) => (event) => set({ [name]: event.target.value });
  return html`
    <div class="controls">
      <label class="grow">
        Model
        <select value=${model?.id ?? ""} disabled=${models.length === 0}
            onChange=${(event) => set({ model: event.target.value, k: "" })}>
          ${models.length === 0 && html`<option value="">none</option>`}
          ${models.map(({ id, loaded }) => html`<option key=${id} value=${id}>
            ${loaded ? id : `${id} (not loaded)`}</option>`)}
        </select>
      </label>
      <${DraftChoice} drafts=${drafts} k=${form.k} onPick=${pick("k")} />
      <label>
        Temperature
        <input type="number" min="0" max="2" step="0.1" placeholder="card default"
          value=${form.temperature} onInput=${pick("temperature")} />
      </label>
      ${model && drafts.reason && html`<p class="muted small">No drafts: ${drafts.reason}</p>`}
    </div>
    <details>
      <summary>System prompt and length</summary>
      <label>
        System prompt
        <textarea rows="3" value=${form.system} onInput=${pick("system")}></textarea>
      </label>
      <label class="narrow">
        Longest answer, in tokens
        <input type="number" min="1" step="1" placeholder="up to the context"
          value=${form.maxTokens} onInput=${pick("maxTokens")} />
      </label>
    </details>`;
}

function DraftChoice({ drafts: { defaultK, maxK }, k, onPick }) {
  const choices = Array.from({ length: maxK ?? 0 }, (_, index) => index + 1);
  return html`
    <label>
      Drafts (K)
      <select value=${maxK ? k : ""} disabled=${!maxK} onChange=${onPick}>
        <option value="">${maxK ? `card default (${defaultK})` : "off"}</option>
        ${maxK && html`<option value="0">0, off</option>`}
        ${choices.map((n) => html`<option key=${n} value=${n}>${n}</option>`)}
      </select>
    </label>`;
}

function Transcript({ turns, busy, known, model, onRetry }) {
  const box = useRef(null);
  const follow = useRef(true);
  const onScroll = ({ target }) => {
    follow.current = target.scrollHeight - target.scrollTop - target.clientHeight < 40;
  };
  useEffect(() => {
    follow.current = true;
  }, [turns.length]);
  useLayoutEffect(() => {
    if (follow.current) box.current.scrollTop = box.current.scrollHeight;
  }, [turns]);
  return html`
    <div class="transcript" ref=${box} onScroll=${onScroll} tabindex="0" role="region"
        aria-label="Conversation">
      ${turns.length === 0 && html`<p class="muted empty">${invitation(model)}</p>`}
      ${turns.map((turn) => html`
        <article key=${turn.id}>
          <p class="question">${turn.question}</p>
          <${Answer} turn=${turn} known=${known} 
            onRetry=${busy || turn !== turns.at(-1) ? null : () => onRetry(turn.id)} />
        </article>`)}
    </div>`;
}

function invitation(model) {
  if (!model) return "No model to talk to yet.";
  if (!model.loaded) return `${model.id} is not loaded. The first message loads it, which can take a while.`;
  return `Ask ${model.id} something.`;
}

function Composer({ busy, disabled, onSend, onStop }) {
  const [text, setText] = useState("");
  const field = useRef(null);

  function submit(event) {
    event.preventDefault();
    if (busy || disabled || !text.trim()) return;
    onSend(text);
    setText("");
    field.current.focus();
  }
  function onKeyDown(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
    if (event.key === "Escape" && busy) onStop();
  }
  return html`
    <form class="composer" onSubmit=${submit}>
      <textarea ref=${field} rows="2" aria-label="Message" disabled=${disabled} value=${text}
        placeholder="Message. Enter sends, Shift+Enter starts a new line."
        onInput=${(event) => setText(event.target.value)} onKeyDown=${onKeyDown}></textarea>
      ${busy
        ? html`<button type="button" key="stop" onClick=${onStop}>Stop</button>`
        : html`<button class="primary" key="send" disabled=${disabled || !text.trim()}>Send</button>`}
    </form>`;
}
