/** The page: header, connection banner, the four sections and the key prompt. */

import { apiKey, beginSession, forgetKey, rememberKey } from "./api.js";
import { Chat } from "./chat.js";
import { Cluster } from "./cluster.js";
import { plural, short } from "./format.js";
import { Models } from "./models.js";
import { useNode } from "./poll.js";
import { Settings } from "./settings.js";
import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact.module.js";

const SECTIONS = ["Cluster", "Models", "Chat", "Settings"];

function App({ refusal }) {
  const [{ data, errors, lost, locked }, refresh] = useNode();
  const nodes = data.cluster?.nodes ?? [];
  const models = data.models?.data;
  const placements = data.placements?.data;

  function unlock(key) {
    rememberKey(key);
    refresh();
  }
  function lock() {
    forgetKey();
    refresh();
  }

  return html`
    <a class="skip" href="#chat">Skip to chat</a>
    <${Header} cluster=${data.cluster} nodes=${nodes} lost=${lost} locked=${locked} />
    <div aria-live="assertive">
      ${lost && html`<p class="banner"><strong>Connection lost, retrying.</strong> ${" "}
        What you see below is the last known state. Check that <code>exo-node start</code> is
        running on ${location.host}.</p>`}
    </div>
    ${refusal && html`<p class="banner" role="alert">${refusal}</p>`}
    ${locked && html`<${KeyPrompt} onKey=${unlock} />`}
    <main hidden=${locked} class=${lost ? "stale" : ""}>
      <${Cluster}
        cluster=${data.cluster} placements=${placements} joining=${data.joining}
        error=${errors.cluster ?? errors.joining} refresh=${refresh} />
      <${Models}
        models=${models} placements=${placements} nodes=${nodes}
        error=${errors.models ?? errors.placements} refresh=${refresh} />
      <${Chat} models=${models} placements=${placements} nodes=${nodes} refresh=${refresh} />
      <${Settings}
        settings=${data.settings} error=${errors.settings} refresh=${refresh}
        onForgetKey=${apiKey() ? lock : null} />
    </main>
    <footer>
      <a href="/static/vendor/THIRD-PARTY.md">Third-party licences</a>
    </footer>`;
}

function Header({ cluster, nodes, lost, locked }) {
  const alive = nodes.filter((node) => node.status === "alive").length;
  return html`
    <header>
      <h1>exo-node</h1>
      <nav aria-label="Sections">
        ${SECTIONS.map((name) => html`<a key=${name} href=${`#${name.toLowerCase()}`}>${name}</a>`)}
      </nav>
      <p class="facts" role="status">
        ${cluster && html`
          <span class="wide-only">version ${cluster.version}</span>
          <span class="wide-only" title=${`Cluster ${cluster.cluster}, term ${cluster.term}`}>
            cluster <code>${short(cluster.cluster)}</code>
          </span>
          <span>${alive} of ${plural(nodes.length, "node")} alive</span>`}
        <span class=${`state ${lost || locked ? "bad" : cluster ? "good" : "idle"}`}>
          ${lost ? "Disconnected" : locked ? "Locked" : cluster ? "Connected" : "Connecting"}
        </span>
      </p>
    </header>`;
}

function KeyPrompt({ onKey }) {
  const refused = useRef(Boolean(apiKey()));
  const field = useRef(null);
  const [tried, setTried] = useState(0);
  useEffect(() => field.current.focus(), []);

  function submit(event) {
    event.preventDefault();
    refused.current = true;
    setTried(tried + 1);
    onKey(field.current.value.trim());
  }

  return html`
    <form class="panel key" onSubmit=${submit}>
      <h2>API key</h2>
      <p>This node asks for a key. It is kept for this browser tab only.</p>
      <label>
        Key
        <input ref=${field} type="password" autocomplete="off" required spellcheck="false" />
      </label>
      ${refused.current && html`<p class="notice bad" role="alert" key=${tried}>
        The node refused the key. Enter the one that the node was started with.</p>`}
      <button class="primary">Continue</button>
    </form>`;
}

const refusal = await beginSession();
render(html`<${App} refusal=${refusal} />`, document.getElementById("app"));
