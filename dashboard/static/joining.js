/** Who asks to be let into the cluster, and whom this node asks itself: both with six digits. */

import { call } from "./api.js";
import { html, useState } from "./vendor/htm-preact.module.js";

const spaced = (code) => `${String(code).slice(0, 3)} ${String(code).slice(3)}`;

export function Joining({ joining, refresh }) {
  const requests = joining?.data ?? [];
  const asking = joining?.asking ?? [];
  return html`
    <div aria-live="polite">
      ${joining?.open && html`<p class="notice bad">
        <strong>Open.</strong> Nodes that were started with the same <code>--open</code> join this
        cluster without approval.</p>`}
      ${requests.map((request) => html`
        <${Request} key=${request.id} request=${request} refresh=${refresh} />`)}
      ${asking.map((asked) => html`<${Asking} key=${asked.cluster} asked=${asked} />`)}
    </div>`;
}

function Request({ request, refresh }) {
  const [busy, setBusy] = useState("");
  const [failure, setFailure] = useState("");
  const facts = [request.chip, request.address, request.version && `version ${request.version}`];

  async function decide(word, deed, body) {
    setBusy(word);
    setFailure("");
    try {
      await call("POST", `/v1/join/requests/${encodeURIComponent(request.id)}/${deed}`, { body });
    } catch (error) {
      setFailure(error.message);
    }
    setBusy("");
    refresh();
  }

  return html`
    <div class="joining" role="group" aria-label=${`${request.name} asks to join`}>
      <p class="line">
        <strong title=${request.node}>${request.name}</strong> asks to join
        <span class="digits end">${spaced(request.code)}</span>
      </p>
      <p class="muted small">${facts.filter(Boolean).join(" · ")}</p>
      <p class="small">Approve only if its screen shows the same digits.</p>
      <div class="actions">
        <button disabled=${busy !== ""} aria-label=${`Deny ${request.name}`}
          onClick=${() => decide("Denying…", "deny", {})}>Deny</button>
        <button class="primary" disabled=${busy !== ""} aria-label=${`Approve ${request.name}`}
          onClick=${() => decide("Approving…", "approve", { code: request.code })}>
          ${busy || "The digits are the same: approve"}</button>
      </div>
      ${failure && html`<p class="notice bad" role="alert">${failure}</p>`}
    </div>`;
}

function Asking({ asked }) {
  return html`
    <div class="joining">
      <p class="line">
        <span>This node asks <strong title=${asked.node}>${asked.name}</strong> to join its cluster</span>
        <span class="digits end">${spaced(asked.code)}</span>
      </p>
      <p class="small">Approve it there, if the same digits are shown.</p>
    </div>`;
}
