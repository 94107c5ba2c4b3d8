/** The branch of a conversation that is shown: questions, answers, and what can be done with them. */

import { Answer } from "./answer.js";
import { copy } from "./clipboard.js";
import { Files, Pictures } from "./pictures.js";
import { callId, isUnfinished, siblings } from "./tree.js";
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.module.js";

const FOLDED_CHARS = 1000;

export function Thread({ talk, messages, busy, request, known, mayAsk }) {
  const may = !busy && mayAsk;
  const below = (index) => messages.length - 1 - index;
  const shared = { talk, may, busy, request, known };
  return html`
    <div class="thread">
      ${messages.map((message, index) =>
        message.role === "user"
          ? html`<${Question} key=${message.id} message=${message} below=${below(index)} ...${shared} />`
          : message.role === "tool"
          ? html`<${Given} key=${message.id} results=${message.results} />`
          : html`<${Said} key=${message.id} message=${message} below=${below(index)} ...${shared} />`)}
      ${may && messages.at(-1).role !== "assistant" && html`
        <p class="muted small">This has no answer. ${" "}
          <button onClick=${() => talk.answer(messages.at(-1).id, request())}>Ask again</button></p>`}
    </div>`;
}

function Question({ message, below, talk, may, busy, request }) {
  const [editing, setEditing] = useState(false);
  if (editing) {
    const send = (text) => {
      setEditing(false);
      talk.ask(text, request(), message.parent, message.images, message.files);
    };
    return html`<${Editor} text=${message.text} what="question" onSend=${send} onCancel=${() => setEditing(false)} />`;
  }
  return html`
    <div class="question">
      <${Pictures} urls=${message.images} />
      <${Files} files=${message.files} />
      ${message.text && html`<${Long} text=${message.text} />`}
      <div class="acts">
        <${Branches} talk=${talk} message=${message} what="question" />
        <${Copy} text=${message.text} what="question" />
        <button class="quiet" disabled=${!may} onClick=${() => setEditing(true)}>Edit</button>
        <${Delete} what="question" below=${below} busy=${busy} onDelete=${() => talk.removeMessage(message.id)} />
      </div>
    </div>`;
}

/** A question; of a long one the beginning, until somebody wants it whole. */
function Long({ text }) {
  const [whole, setWhole] = useState(false);
  if (text.length <= FOLDED_CHARS * 2) return html`<p dir="auto">${text}</p>`;
  const count = text.trim().split(/\s+/).length;
  return html`
    <p dir="auto">${whole ? text : `${text.slice(0, FOLDED_CHARS)}…`}</p>
    <button class="quiet small" aria-expanded=${whole} onClick=${() => setWhole(!whole)}>
      ${whole ? "Show less" : `Show all ${count.toLocaleString("en")} words`}</button>`;
}

/** Enter sends a question; in an answer, which has many lines, it breaks one. */
function Editor({ text, what, onSend, onCancel }) {
  const [draft, setDraft] = useState(text);
  const field = useRef(null);
  useEffect(() => field.current.focus(), []);
  const submit = (event) => {
    event.preventDefault();
    if (draft.trim()) onSend(draft);
  };
  const onKeyDown = (event) => {
    const sends = what === "question" ? !event.shiftKey : event.ctrlKey || event.metaKey;
    if (event.key === "Enter" && sends && !event.isComposing) submit(event);
    if (event.key === "Escape") onCancel();
  };
  return html`
    <form class=${`editing ${what}`} onSubmit=${submit}>
      <textarea ref=${field} rows=${what === "question" ? 3 : 12} dir="auto" aria-label=${`Edit the ${what}`} value=${draft} onKeyDown=${onKeyDown}
        onInput=${(event) => setDraft(event.target.value)}></textarea>
      <div class="acts">
        <button type="button" onClick=${onCancel}>Cancel</button>
        <button class="primary" disabled=${!draft.trim()}>${what === "question" ? "Send" : "Save"} as a new branch</button>
      </div>
    </form>`;
}

function Said({ message, below, talk, may, busy, request, known }) {
  const [editing, setEditing] = useState(false);
  const last = below === 0;
  const again = () => talk.answer(message.parent, request());
  const under = message.state === "waiting" || message.state === "streaming";
  const keep = (text) => {
    setEditing(false);
    talk.rewrite(message, text);
  };
  if (editing) return html`<${Editor} text=${message.text} what="answer" onSend=${keep} onCancel=${() => setEditing(false)} />`;
  return html`
    <article class="said" aria-busy=${under} aria-label=${`Answer of ${message.model}`}>
      <${Answer} message=${message} known=${known} onRetry=${may && last ? again : null}>
        <${Branches} talk=${talk} message=${message} what="answer" />
        ${message.text && html`<${Copy} text=${message.text} what="answer" />`}
        ${!under && last && isUnfinished(message) && html`<button class="quiet" disabled=${!may}
          onClick=${() => talk.continueAnswer(message, { ...request(), model: message.model })}>Continue</button>`}
        ${!under && html`<button class="quiet" disabled=${!may} onClick=${again}>Regenerate</button>`}
        ${!under && message.text && html`<button class="quiet" disabled=${busy} aria-label="Edit answer"
          onClick=${() => setEditing(true)}>Edit</button>`}
        ${!under && html`<${Delete} what="answer" below=${below} busy=${busy} onDelete=${() => talk.removeMessage(message.id)} />`}
      <//>
      ${may && last && message.state === "done" && message.calls?.length > 0 && html`
        <${Results} calls=${message.calls} onSend=${(results) => talk.reply(message.id, results, request())} />`}
    </article>`;
}

/** A field for what each called tool gave back. The page runs none: somebody does, and says what came of it. */
function Results({ calls, onSend }) {
  const [texts, setTexts] = useState(() => calls.map(() => ""));
  const submit = (event) => {
    event.preventDefault();
    onSend(calls.map((call, index) => ({ id: callId(call, index), name: call.name, text: texts[index] })));
  };
  return html`
    <form class="results" aria-label="Results of the tools" onSubmit=${submit}>
      ${calls.map(({ name }, index) => html`
        <label key=${index}>Result of ${name}
          <textarea rows="2" dir="auto" value=${texts[index]} spellcheck="false"
            onInput=${({ target }) => setTexts(texts.with(index, target.value))}></textarea>
        </label>`)}
      <div class="line">
        <span class="muted small">This page runs no tools: say what ${calls.length > 1 ? "they" : "it"} gave back.</span>
        <button class="primary end" disabled=${!texts.every((text) => text.trim())}>Send ${calls.length > 1 ? "results" : "result"}</button>
      </div>
    </form>`;
}

/** What tools gave back. */
const Given = ({ results }) => html`
  <div class="given">
    ${results.map(({ id, name, text }) => html`
      <details key=${id} class="call" open=${text.length < 400}>
        <summary class="small"><span class="muted">Result of</span> <strong>${name}</strong></summary>
        <pre tabindex="0" dir="auto">${text}</pre>
      </details>`)}
  </div>`;

/** Asks once more before it deletes. */
function Delete({ what, below, busy, onDelete }) {
  const [sure, setSure] = useState(false);
  const rest = below > 0 ? ` and ${below} after it` : "";
  return html`<button class=${sure ? "danger" : "quiet"} disabled=${busy} aria-label=${sure ? null : `Delete ${what}`}
    onClick=${() => (sure ? onDelete() : setSure(true))} onBlur=${() => setSure(false)}>${sure ? `Really delete it${rest}` : "Delete"}</button>`;
}

/** Turns between what was said in the same place. */
function Branches({ talk, message, what }) {
  const all = siblings(talk.current, message);
  if (all.length < 2) return null;
  const at = all.indexOf(message.id);
  const step = (by, word, sign) => html`
    <button class="quiet" disabled=${!all[at + by]} aria-label=${`${word} ${what}`}
      onClick=${() => talk.turnTo(all[at + by])}>${sign}</button>`;
  return html`<span class="branches">${step(-1, "Previous", "‹")}<span>${at + 1} / ${all.length}</span>${step(1, "Next", "›")}</span>`;
}

function Copy({ text, what }) {
  const [done, setDone] = useState("");
  async function onClick() {
    setDone((await copy(text)) ? "Copied" : "Not allowed");
    setTimeout(() => setDone(""), 1500);
  }
  return html`<button class="quiet" aria-label=${`Copy ${what}`} onClick=${onClick}>${done || "Copy"}</button>`;
}
