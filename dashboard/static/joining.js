/** Who asks to be let into the cluster, and on a new node the digits that let it into another. */

import { call } from "./api.js";
import { html, useState } from "./vendor/htm-preact.module.js";

const spaced = (code) => `${String(code).slice(0, 3)} ${String(code).slice(3)}`;
const plain = (typed) => typed.replace(/[\s-]/g, "");

export function Joining({ joining, refresh }) {
  const requests = joining?.data ?? [];
  const asking = joining?.asking ?? [];
  const mayDecide = joining?.may_decide ?? false;
  return html`
    <div aria-live="polite">
      ${joining?.open && html`<p class="notice bad">
        <strong>Open.</strong> Nodes that were started with the same <code>--open</code> join this
        cluster without approval.</p>`}
      ${(requests.length > 0 || asking.length > 0) && !mayDecide && html`<p class="notice">
        This page may look and not decide. Open it by the link that
        <code>exo-node dashboard</code> prints on this machine.</p>`}
      ${requests.map((request) => html`
        <${Request} key=${request.id} request=${request} refresh=${refresh} mayDecide=${mayDecide} />`)}
      ${asking.length > 0 && html`<${Asking} asking=${asking} digits=${joining.digits} />`}
    </div>`;
}

function Request({ request, refresh, mayDecide }) {
  const [digits, setDigits] = useState("");
  const [busy, setBusy] = useState("");
  const [failure, setFailure] = useState("");
  const facts = [request.chip, request.address, request.version && `version ${request.version}`];
  const complete = /^[0-9]{6}$/.test(plain(digits));

  async function decide(word, deed, body) {
    setBusy(word);
    setFailure("");
    try {
      await call("POST", `/v1/join/requests/${encodeURIComponent(request.id)}/${deed}`, { body });
    } catch (error) {
      setFailure(error.message);
    }
    setBusy("");
    setDigits("");
    refresh();
  }
  function approve(event) {
    event.preventDefault();
    decide("Approving…", "approve", { code: plain(digits) });
  }

  return html`
    <form class="joining" aria-label=${`${request.name} asks to join`} onSubmit=${approve}>
      <p class="line">
        <strong title=${request.node}>${request.name}</strong> asks to join
        <span class="muted small end"><code>${request.node}</code></span>
      </p>
      <p class="muted small">${facts.filter(Boolean).join(" · ")}</p>
      <label>
        The six digits that its own screen shows
        <input class="digits" inputmode="numeric" autocomplete="off" maxlength="8" spellcheck="false"
          value=${digits} disabled=${!mayDecide || busy !== ""}
          onInput=${(event) => setDigits(event.target.value)} />
      </label>
      <div class="actions">
        <button type="button" disabled=${!mayDecide || busy !== ""} aria-label=${`Deny ${request.name}`}
          onClick=${() => decide("Denying…", "deny", {})}>Deny</button>
        <button class="primary" disabled=${!complete || busy !== ""}
          aria-label=${`Approve ${request.name}`}>${busy || "Approve"}</button>
      </div>
      ${failure && html`<p class="notice bad" role="alert">${failure}</p>`}
    </form>`;
}

function Asking({ asking, digits }) {
  return html`
    <div class="joining">
      <p class="line">
        <span>This node asks to join</span>
        ${digits && html`<span class="digits end">${spaced(digits)}</span>`}
      </p>
      <ul class="small">
        ${asking.map((asked) => html`<li key=${asked.cluster}>
          <strong title=${asked.node}>${asked.name}</strong> at ${asked.address}, cluster
          <code>${asked.cluster}</code></li>`)}
      </ul>
      <p class="small">Type these digits on the dashboard of a node of <em>your</em> cluster, or run
        <code>exo-node approve ${digits ? spaced(digits) : "DIGITS"}</code> there.</p>
    </div>`;
}
