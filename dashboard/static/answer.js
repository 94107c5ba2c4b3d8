/** One answer: its thinking, its text, its tool calls, what went wrong, and the final numbers. */

import { copy } from "./clipboard.js";
import { rate, percent, seconds } from "./format.js";
import { onImproved, renderBlocks } from "./markdown.js";
import { Stats } from "./stats.js";
import { Tokens } from "./tokens.js";
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.module.js";

export function Answer({ message, known, onRetry, children }) {
  const { text, state, note, finish, error, stats, tokens, parts, edited, stuck } = message;
  const [view, setView] = useState("");
  const toggle = (name) => () => setView(view === name ? "" : name);
  return html`
    <${Thinking} message=${message} />
    ${view === "tokens" ? html`<${Tokens} tokens=${tokens} stats=${stats} />` : text && html`<${Prose} text=${text} />`}
    ${(message.calls ?? []).map((call, index) => html`<${Call} key=${index} call=${call} />`)}
    <${Progress} state=${state} note=${note} said=${text || message.reasoning} />
    ${state === "stopped" && html`<p class="muted small">Stopped.</p>`}
    ${state === "cut" && html`<p class="muted small">Cut off: this page was closed or loaded anew while the answer
      was arriving. What had arrived is kept.</p>`}
    ${thoughtsAlone(message) && html`<p class="muted small">The model stopped in its thoughts and gave no answer${
      finish === "length" ? ", because the token limit ended it" : ""}.</p>`}
    ${finish === "length" && !thoughtsAlone(message) && html`<p class="muted small">The token limit ended this answer.</p>`}
    ${edited && html`<p class="muted small">Edited by you.</p>`}
    ${error && state !== "waiting" && state !== "streaming" && html`
      <div class="notice bad" role="alert">
        <span>${stuck && "This answer cannot be continued; “Regenerate” asks for another. "}${error.message}</span>
        ${onRetry && state === "failed" && html`<button onClick=${onRetry}>Try again</button>`}
      </div>`}
    ${state !== "waiting" && state !== "streaming" && html`
      <div class="acts">
        ${children}
        ${tokens?.length > 0 && html`<button class="quiet" aria-pressed=${view === "tokens"}
          onClick=${toggle("tokens")}>Tokens</button>`}
        ${stats && html`<button class="quiet brief" aria-expanded=${view === "stats"}
          onClick=${toggle("stats")}>${brief(stats)}</button>`}
      </div>`}
    ${view === "stats" && parts > 1 && html`<p class="muted small">It was continued: these figures are of its last part.</p>`}
    ${view === "stats" && html`<${Stats} stats=${stats} usage=${message.usage} known=${known} />`}`;
}

/** The numbers that people look at first. */
function brief(stats) {
  const proposed = stats.proposed_draft_tokens;
  return [
    Number.isFinite(stats.generation_tps) && `${rate(stats.generation_tps)} tok/s`,
    stats.load_s > 0 && `loaded in ${seconds(stats.load_s)}`,
    Number.isFinite(stats.time_to_first_token_s) && `first token ${seconds(stats.time_to_first_token_s)}`,
    proposed > 0 && `${percent(stats.accepted_draft_tokens, proposed)} of drafts accepted`,
    stats.resumes > 0 && `resumed ${stats.resumes}×`,
  ].filter(Boolean).join(" · ") || "Figures";
}

/** Whether the answer ended and has thoughts, but neither text nor a call of a tool. */
const thoughtsAlone = ({ reasoning, text, calls, state }) =>
  state === "done" && Boolean(reasoning) && !text.trim() && !calls?.length;

function Thinking({ message }) {
  const { reasoning, thoughtMs, text, state } = message;
  if (!reasoning) return null;
  const under = !text && (state === "streaming" || state === "waiting");
  const title = under ? "Thinking…" : thoughtMs ? `Thought for ${seconds(thoughtMs / 1000)}` : "Thoughts";
  return html`
    <details class="thinking" open=${under || thoughtsAlone(message)}>
      <summary class=${under ? "pulse" : ""}>${title}</summary>
      <div dir="auto">${reasoning}</div>
    </details>`;
}

/** Blocks that are complete keep their elements while the last one grows. */
function Prose({ text }) {
  const [, draw] = useState(0);
  const rendered = useRef(new Map());
  useEffect(() => onImproved(rendered.current, () => draw((n) => n + 1)), []);
  return html`
    <div class="prose" onClick=${copyCode}>
      ${renderBlocks(text, rendered.current).map((block, index) => html`
        <div key=${index} class="block" dangerouslySetInnerHTML=${block}></div>`)}
    </div>`;
}

async function copyCode({ target }) {
  if (!target.matches("button.copy-code")) return;
  const done = await copy(target.closest(".code").querySelector("pre").textContent);
  target.textContent = done ? "Copied" : "Not allowed";
  setTimeout(() => (target.textContent = "Copy"), 1500);
}

function Call({ call }) {
  return html`
    <div class="call">
      <p class="small"><span class="muted">Calls the tool</span> <strong>${call.name}</strong></p>
      <pre tabindex="0">${pretty(call.arguments)}</pre>
    </div>`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still growing, or no JSON: as the model wrote it
  }
}

function Progress({ state, note, said }) {
  const prefill = /^prefill (\d+)\/(\d+)$/.exec(note ?? "");
  if (prefill) {
    const [done, total] = prefill.slice(1).map(Number);
    return html`
      <p class="progress muted small">
        <span>Reading the prompt: ${done} of ${total} tokens</span>
        <progress aria-label="Prompt read" max=${Math.max(1, total)} value=${done}></progress>
      </p>`;
  }
  if (note) return html`<p class="muted small pulse">${inWords(note)}</p>`;
  if (state === "waiting" && !said) return html`<p class="muted small pulse">Waiting for the first token…</p>`;
  return null;
}

/** The steps of a load; a large model takes minutes. */
const LOADS = /^(reading|warming up|timing its layers|checking that)/;

/** The server's progress comment as a phrase. */
export function inWords(note) {
  const rebuilt = /^resuming: (\d+)\/(\d+)$/.exec(note);
  if (rebuilt) return `A part of the model was lost. Catching up: ${rebuilt[1]} of ${rebuilt[2]} steps`;
  if (note.startsWith("resuming: ")) return `Resuming: ${note.slice("resuming: ".length)}`;
  return LOADS.test(note) ? `Loading the model: ${note}…` : note;
}
