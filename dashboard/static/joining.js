/** Who asks to be let into the cluster, and on a new node the digits that let it into another. */

import { call } from "./api.js";
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.module.js";

const spaced = (code) => `${String(code).slice(0, 3)} ${String(code).slice(3)}`;
const plain = (typed) => typed.replace(/[\s-]/g, "");

/** A node that was refused asks again as another request, so what was decided is told out here. */
export function Joining({ joining, refresh }) {
  const [news, setNews] = useState(null);
  const requests = joining?.data ?? [];
  const asking = joining?.asking ?? [];
  const mayDecide = joining?.may_decide ?? false;
  const left = joining?.not_asked ?? [];
  async function askAgain() {
    try {
      await call("POST", "/v1/join/again", { body: {} });
      setNews({ bad: false, text: "This node asks again; its digits appear here in a moment." });
    } catch (error) {
      setNews({ bad: true, text: error.message });
    }
    refresh();
  }
  return html`
    <div aria-live="polite">
      ${news && html`
        <div class=${`notice ${news.bad ? "bad" : ""}`} role=${news.bad ? "alert" : "status"}>
          <span>${news.text}</span>
          <button onClick=${() => setNews(null)}>Dismiss</button>
        </div>`}
      ${requests.map((request) => html`
        <${Request} key=${`${request.node}/${request.at.node}`} request=${request} refresh=${refresh}
          mayDecide=${mayDecide} tell=${setNews} />`)}
      ${left.length > 0 && html`<div class="notice">
        <span>This node left the cluster of ${left.map(({ name }) => name).join(" and ")}, or was turned away there, and does not ask it again.</span>
        <button disabled=${!mayDecide} onClick=${askAgain}>Ask again</button></div>`}
      ${asking.length > 0 && html`
        <${Asking} asking=${asking} node=${joining.node} digits=${joining.digits} failure=${joining.failure} />`}
    </div>`;
}

function Request({ request, refresh, mayDecide, tell }) {
  const [digits, setDigits] = useState("");
  const [busy, setBusy] = useState("");
  const facts = [request.chip, request.address, request.version && `version ${request.version}`];
  const complete = /^[0-9]{6}$/.test(plain(digits));
  useGone(digits !== "" && busy === "", () =>
    tell({ bad: true, text: `${request.name} does not ask any more. It is shown here again when it does.` }));

  async function decide(word, done, deed, body) {
    setBusy(word);
    tell(null);
    try {
      await call("POST", `/v1/join/requests/${encodeURIComponent(request.id)}/${deed}`, { body });
      tell({ bad: false, text: `${request.name} ${done}.` });
    } catch (error) {
      tell({ bad: true, text: error.message });
    }
    setDigits("");
    setBusy("");
    refresh();
  }
  function approve(event) {
    event.preventDefault();
    decide("Approving…", "is in the cluster", "approve", { code: plain(digits) });
  }

  return html`
    <form class="joining" aria-label=${`${request.name} asks to join`} onSubmit=${approve}>
      <p class="line">
        <strong title=${request.node}>${request.name}</strong> asks to join
        <span class="muted small end"><code>${request.node}</code></span>
      </p>
      <p class="muted small">${facts.filter(Boolean).join(" · ")}</p>
      <div class="decision">
        <label>
          The six digits that its own screen shows
          <input class="typed" inputmode="numeric" autocomplete="off" maxlength="8" spellcheck="false"
            placeholder="000 000" value=${digits} disabled=${!mayDecide || busy !== ""}
            onInput=${(event) => setDigits(event.target.value)} />
        </label>
        <button class="primary" disabled=${!mayDecide || !complete || busy !== ""}
          aria-label=${`Approve ${request.name}`}>${busy || "Approve"}</button>
        <button type="button" disabled=${!mayDecide || busy !== ""} aria-label=${`Deny ${request.name}`}
          onClick=${() => decide("Denying…", "was turned away", "deny", {})}>Deny</button>
      </div>
    </form>`;
}

/** Calls `onGone` when the node stops asking while `concerned`: while somebody types its digits. */
function useGone(concerned, onGone) {
  const last = useRef(null);
  last.current = concerned ? onGone : null;
  useEffect(() => () => last.current?.(), []);
}

function Asking({ asking, node, digits, failure }) {
  return html`
    <div class="joining">
      <p class="line">
        <span>This node asks to join</span>
        ${digits && html`<span class="digits end">${spaced(digits)}</span>`}
      </p>
      <ul class="small">
        ${asking.map((asked) => html`<li key=${asked.cluster}>
          <strong title=${asked.node}>${asked.name}</strong> at ${asked.address}, cluster ${" "}
          <code>${asked.cluster}</code></li>`)}
      </ul>
      ${failure && html`<p class="notice bad small" role="alert">${failure}</p>`}
      <p class="small">Type these digits on the dashboard of a node of <em>your</em> cluster, or run ${" "}
        <code>exo-node approve ${digits ? spaced(digits) : "DIGITS"}</code> there.
        Where several nodes ask, this one's id is <code>${node}</code>.</p>
    </div>`;
}
