/** Switches that affect new requests, the API key of this tab, and what this browser keeps. */

import { call } from "./api.js";
import { save } from "./conversations.js";
import { plural } from "./format.js";
import { mayChange } from "./node.js";
import { LIMIT } from "./store.js";
import { THEMES, setTheme, theme } from "./theme.js";
import { html, useEffect, useState } from "./vendor/htm-preact.module.js";

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
    text: "Each round drafts as many tokens as pay here, none among them, up to the model's max_k.",
  },
];

const AWAKE = {
  name: "keep_awake",
  title: "Keep this machine awake",
  text: "Prevents sleep by itself. A closed lid or the menu still sends it to sleep.",
  choices: { answers: "while it answers", always: "always", never: "never" },
};

const SOURCES = {
  default: "Default.",
  environment: "Fixed by an environment variable.",
  runtime: "Changed since the node started.",
};

export function Place({ data, talk, onForgetKey }) {
  const [settings, setSettings] = useState(null);
  const [error, setError] = useState(null);
  const refresh = () => call("GET", "/v1/settings").then(setSettings, setError);
  useEffect(() => void refresh(), []);
  return html`
    <div class="place narrow">
      <section aria-labelledby="decoding-title">
        <h2 id="decoding-title">Decoding</h2>
        ${error && html`<p class="notice bad" role="alert">${error.message}</p>`}
        ${!settings && !error && html`<p class="muted pulse">Asking the node…</p>`}
        <ul class="rows">
          ${settings && SWITCHES.filter(({ name }) => settings[name]).map((item) => html`
            <${Switch} key=${item.name} ...${item} setting=${settings[item.name]} may=${mayChange(data)} refresh=${refresh} />`)}
        </ul>
      </section>
      ${settings?.keep_awake && html`
        <section aria-labelledby="machine-title">
          <h2 id="machine-title">This machine</h2>
          <ul class="rows">
            <${Switch} ...${AWAKE} setting=${settings.keep_awake} may=${mayChange(data)} refresh=${refresh} />
          </ul>
        </section>`}
      <section aria-labelledby="browser-title">
        <h2 id="browser-title">This browser</h2>
        <ul class="rows">
          <${Theme} />
          <${Kept} talk=${talk} />
          ${onForgetKey && html`<${Key} onForgetKey=${onForgetKey} />`}
        </ul>
      </section>
      <p class="muted small"><a href="/static/vendor/THIRD-PARTY.md">Licences of third parties</a></p>
    </div>`;
}

function Theme() {
  const [name, setName] = useState(theme());
  const pick = ({ target }) => {
    setTheme(target.value);
    setName(target.value);
  };
  return html`
    <li class="line">
      <span><strong>Colours</strong> <span class="muted small">Light, dark, or as the system has it.</span></span>
      <select class="end" aria-label="Colours" value=${name} onChange=${pick}>
        ${THEMES.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}
      </select>
    </li>`;
}

function Kept({ talk }) {
  const [sure, setSure] = useState(false);
  const count = talk.list.length;
  const all = () => JSON.stringify({ format: "exo-node conversations 1", conversations: talk.list }, null, 2);
  const remove = () => (sure ? (talk.removeAll(), setSure(false)) : setSure(true));
  return html`
    <li class="line">
      <span><strong>${plural(count, "conversation")}</strong> <span class="muted small">
        Kept here and nowhere else, the latest ${LIMIT}.</span></span>
      <button class="end" disabled=${count === 0} onClick=${() => save("conversations.json", all())}>Export all</button>
      <button class=${sure ? "danger" : ""} disabled=${count === 0} onClick=${remove}>${sure ? "Really delete all" : "Delete all"}</button>
    </li>`;
}

function Switch({ name, title, text, choices, setting, may, refresh }) {
  const [wanted, setWanted] = useState(null);
  const [failure, setFailure] = useState("");
  const on = wanted ?? setting.value;

  async function flip(event) {
    const value = choices ? event.target.value : event.target.checked;
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

  const shared = {
    "aria-label": title,
    "aria-describedby": `${name}-text`,
    disabled: !may || !setting.writable || wanted !== null,
    onChange: flip,
  };
  return html`
    <li>
      <label class="switch-row">
        <span>
          <strong>${title}</strong>
          <span class="muted small" id=${`${name}-text`}>${text} ${SOURCES[setting.source] ?? ""}</span>
          ${setting.reason && html`<span class="small warn-text">${setting.reason}</span>`}
        </span>
        ${choices
          ? html`<select value=${on} ...${shared}>${Object.entries(choices).map(([value, label]) => html`
              <option key=${value} value=${value}>${label}</option>`)}</select>`
          : html`<input type="checkbox" role="switch" checked=${on} ...${shared} />`}
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
