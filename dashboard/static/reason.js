/** Reasons: the decision in one clause, its conditions and figures where somebody asks why. */

import { html } from "./vendor/htm-preact.module.js";

/** As the terminal and the events shorten it: up to the first semicolon or bracket. */
export const firstClause = (reason) => String(reason ?? "").split("; ")[0].split(" (")[0];

/** `reason` after `lead`, which stands in for its first clause where there is one. */
export function Reason({ reason, lead }) {
  const shown = lead || firstClause(reason);
  if (!shown) return null;
  return html`
    <div class="reason muted small">
      <p>${shown}</p>
      ${reason && reason !== shown && html`<details><summary>Why</summary><p>${reason}</p></details>`}
    </div>`;
}
