/** An answer token by token: which the model computed in turn, and which were accepted drafts. */

import { percent, whole } from "./format.js";
import { Positions } from "./stats.js";
import { html, useMemo, useState } from "./vendor/htm-preact.module.js";

export function Tokens({ tokens, stats }) {
  const shown = useMemo(() => pieces(tokens), [tokens]);
  const [tapped, setTapped] = useState(null);
  const drafts = tokens.filter(({ draft }) => draft).length;
  return html`
    <div class="tokens">
      <p class="legend small">
        <span><span class="token own">model</span> ${whole(tokens.length - drafts)}</span>
        <span><span class="token draft">accepted draft</span> ${whole(drafts)} (${percent(drafts, tokens.length)})</span>
        <span class="muted">Hover or tap for the probability. Drafts save time; the model checks each.</span>
        <span role="status">${tapped !== null && html`<strong>${shown[tapped].text.trim() || "␣"}</strong>: ${origin(shown[tapped])}`}</span>
      </p>
      <p class="token-text" dir="auto">${shown.map(({ text, draft, sure }, index) => html`
        <span key=${index} class=${`token ${draft ? "draft" : "own"}`}
          title=${origin({ draft, sure })} onClick=${() => setTapped(index)}>${text}</span>`)}</p>
      ${stats && html`<${Positions} stats=${stats} />`}
    </div>`;
}

const origin = ({ draft, sure }) => `${draft ? "accepted draft" : "model"}, ${sure}`;

/** A character may be of several tokens: it is shown with the last of them. */
function pieces(tokens) {
  const decoder = new TextDecoder();
  return tokens.map(({ bytes, control, draft, logprob }) => {
    const text = control || decoder.decode(Uint8Array.from(bytes), { stream: true });
    return { text, draft, sure: `${(100 * Math.exp(logprob)).toFixed(1)} %` };
  });
}
