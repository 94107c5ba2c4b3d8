/** The settings section: switches that affect new requests. */

import { call } from "./api.js";
import { html, useState } from "./vendor/htm-preact.module.js";

const SWITCHES = [
  {
    name: "native_mtp_enabled",
    title: "Native multi-token prediction",
    text: "Drafts with the model's own MTP head and verifies them in one pass. Affects new requests.",
  },
  {
    name: "native_mtp_async_draft_eval",
    title: "Overlapped drafting",
    text: "Computes the drafts while the verify pass is being built.",
  },
  {
    name: "native_mtp_adaptive",
    title: "Adaptive drafting",
    text: "Each round drafts as many tokens as pay here, none among them, up to the card's number.",
  },
];

const SOURCES = {
  default: "Default.",
  environment: "Fixed by an environment variable.",
  runtime: "Changed since the node started.",
};

export function Settings({ settings, error, refresh, onForgetKey }) {
  return html`
    <section id="settings" class="panel" aria-labelledby="settings-title">
      <h2 id="settings-title">Settings</h2>
      ${error && html`<p class="notice bad" role="alert">${error.message}</p>`}
      ${!settings && !error && html`<p class="muted">Asking the node…</p>`}
      <ul class="rows">
        ${settings && SWITCHES.filter(({ name }) => settings[name]).map((item) => html`
          <${Switch} key=${item.name} ...${item} setting=${settings[item.name]} refresh=${refresh} />`)}
        ${onForgetKey && html`<${Key} onForgetKey=${onForgetKey} />`}
      </ul>
    </section>`;
}

function Switch({ name, title, text, setting, refresh }) {
  const [wanted, setWanted] = useState(null);
  const [failure, setFailure] = useState("");
  const on = wanted ?? setting.value;

  async function flip(event) {
    const value = event.target.checked;
    setWanted(value);
    setFailure("");
    try {
      await call("PATCH", "/v1/settings", { body: { [name]: value } });
    } catch (error) {
      setFailure(error.message);
    }
    await refresh();
    setWanted(null);
  }

  return html`
    <li>
      <label class="switch-row">
        <span>
          <strong>${title}</strong>
          <span class="muted small" id=${`${name}-text`}>${text} ${SOURCES[setting.source] ?? ""}</span>
          ${!setting.writable && html`<span class="small warn-text">${setting.reason}</span>`}
        </span>
        <input type="checkbox" role="switch" checked=${on} aria-label=${title}
          aria-describedby=${`${name}-text`} disabled=${!setting.writable || wanted !== null}
          onChange=${flip} />
      </label>
      ${failure && html`<p class="notice bad" role="alert">${failure}</p>`}
    </li>`;
}

function Key({ onForgetKey }) {
  return html`
    <li class="line">
      <span><strong>API key</strong> <span class="muted small">Kept for this browser tab.</span></span>
      <button class="end" onClick=${onForgetKey}>Forget key</button>
    </li>`;
}
