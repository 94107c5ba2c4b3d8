/** One answer: its text, what went wrong, and the final numbers. */

import { nameOf } from "./cluster.js";
import { percent, range, rate, seconds, whole } from "./format.js";
import { renderMarkdown } from "./markdown.js";
import { html, useMemo } from "./vendor/htm-preact.module.js";

export function Answer({ turn, known, onRetry }) {
  const { answer, state, note, finish, error, stats, usage } = turn;
  const markup = useMemo(() => ({ __html: renderMarkdown(answer) }), [answer]);
  return html`
    <div class=${`answer ${state}`}>
      ${answer && html`<div class="prose" dangerouslySetInnerHTML=${markup}></div>`}
      ${state === "waiting" && !note && html`<p class="muted small pulse">Waiting for the first token…</p>`}
      ${note && html`<p class="muted small pulse">${inWords(note)}</p>`}
      ${state === "stopped" && html`<p class="muted small">Stopped.</p>`}
      ${finish === "length" && html`<p class="muted small">The token limit ended this answer.</p>`}
      ${state === "failed" && html`
        <div class="notice bad" role="alert">
          <span>${error.message}</span>
          ${onRetry && html`<button onClick=${onRetry}>Try again</button>`}
        </div>`}
      ${stats && html`<${Stats} stats=${stats} usage=${usage} known=${known} />`}
    </div>`;
}

/** The server's progress comment, such as "prefill 512/4096", as a phrase. */
function inWords(note) {
  const prefill = /^prefill (\d+)\/(\d+)$/.exec(note);
  if (prefill) return `Reading the prompt: ${prefill[1]} of ${prefill[2]} tokens`;
  const rebuilt = /^resuming: (\d+)\/(\d+)$/.exec(note);
  if (rebuilt) return `A part of the model was lost. Catching up: ${rebuilt[1]} of ${rebuilt[2]} steps`;
  if (note.startsWith("resuming: ")) return `Resuming: ${note.slice("resuming: ".length)}`;
  return note;
}

function Stats({ stats, usage, known }) {
  const none = stats.drafter_kind === "none";
  const proposed = stats.proposed_draft_tokens;
  const accepted = stats.accepted_draft_tokens;
  return html`
    <div class="stats">
      <dl>
        <${Fact} name="Drafter" value=${stats.drafter_kind} />
        ${!none && html`<${Fact} name="K" value=${stats.num_draft_tokens} />`}
        ${!none && html`<${Fact} name="Accepted"
          value=${`${percent(accepted, proposed)} (${whole(accepted)} of ${whole(proposed)})`} />`}
        <${Fact} name="Speed" value=${`${rate(stats.generation_tps)} tokens/s`} />
        <${Fact} name="First token" value=${seconds(stats.time_to_first_token_s)} />
        ${usage && html`<${Fact} name="Tokens"
          value=${`${whole(usage.prompt_tokens)} in, ${whole(usage.completion_tokens)} out`} />`}
        ${stats.placement && html`<${Fact} name="Placement" value=${where(stats.placement, known)} />`}
        ${stats.resumes > 0 && html`<${Fact} name="Resumed"
          value=${`${stats.resumes}×, ${stats.resume_exact ? "exact" : "not exact"}`} />`}
      </dl>
      ${none && stats.drafting_reason && html`<p class="muted small">No drafts: ${stats.drafting_reason}</p>`}
      ${!none && html`<${Positions} stats=${stats} />`}
    </div>`;
}

const Fact = ({ name, value }) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`;

const where = ({ stages }, known) =>
  stages.map(({ node, layers }) => `${nameOf(known, node)} ${range(layers)}`).join(", ");

/** How often the draft at each position was accepted, of all verify rounds. */
function Positions({ stats }) {
  const rounds = stats.spec_decode_rounds;
  const counts = stats.accepted_per_position ?? [];
  if (!rounds || counts.length === 0) return null;
  return html`
    <ul class="positions" aria-label="Accepted drafts by position">
      ${counts.map((count, index) => html`
        <li key=${index} title=${`${whole(count)} of ${whole(rounds)} rounds`}>
          <span>draft ${index + 1}</span>
          <span class="track" aria-hidden="true">
            <span style=${{ width: `${Math.min(100, (100 * count) / rounds)}%` }}></span>
          </span>
          <span>${percent(count, rounds)}</span>
        </li>`)}
    </ul>`;
}
