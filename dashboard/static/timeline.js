/** What happened in the cluster, newest first, as its events tell it. */

import { html, useState } from "./vendor/htm-preact.module.js";

const FIRST = 12;
const TONES = {
  joined: "good", recovered: "good", refuted: "good", placed: "good", resumed: "good", loop_recovered: "good",
  join_approved: "good", term_stored: "good", pulled: "good",
  suspected: "warn", leaving: "warn", superseded: "warn", replanned: "warn",
  join_requested: "warn", join_refused: "warn", dropped: "warn", adopted: "busy",
  woke: "busy", head_changed: "busy", election: "busy",
  died: "bad", stage_lost: "bad", gpu_fault: "bad", load_failed: "bad", pull_failed: "bad", loop_ended: "bad", term_not_stored: "bad",
};

export function Timeline({ events }) {
  const [all, setAll] = useState(false);
  const shown = events.slice(all ? 0 : -FIRST).reverse();
  return html`
    <section aria-labelledby="timeline-title">
      <h2 id="timeline-title">Events</h2>
      ${events.length === 0 && html`<p class="muted">Nothing has happened yet.</p>`}
      <ol class="timeline" aria-live="polite" aria-relevant="additions">
        ${shown.map(({ id, time, kind, text }) => html`
          <li key=${id} class=${Object.hasOwn(TONES, kind) ? TONES[kind] : "idle"}>
            <time datetime=${new Date(time * 1000).toISOString()} title=${new Date(time * 1000).toLocaleString()}>
              ${new Date(time * 1000).toLocaleTimeString([], { hour12: false })}</time>
            <span>${text}</span>
          </li>`)}
      </ol>
      ${events.length > FIRST && html`<button class="quiet" onClick=${() => setAll(!all)}>
        ${all ? "Show fewer" : `Show all ${events.length}`}</button>`}
    </section>`;
}
