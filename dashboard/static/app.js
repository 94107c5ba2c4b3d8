/** The page: its frame, the place that the address names, and the key prompt. */

import { apiKey, beginSession, forgetKey, rememberKey } from "./api.js";
import { Chat } from "./chat.js";
import { draftName } from "./drafts.js";
import { setCommand } from "./format.js";
import { LOOKING, mayChange, useNode } from "./node.js";
import { Header, SideBar } from "./frame.js";
import { Keys } from "./keys.js";
import { Talk, useTalk } from "./talk.js";
import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact.module.js";

/** Fetched when they are first gone to. */
const PLACES = {
  cluster: () => import("./cluster.js"),
  models: () => import("./models.js"),
  insight: () => import("./insight.js"),
  connect: () => import("./connect.js"),
  settings: () => import("./settings.js"),
};
/** Where the node's own user changes something. */
const CHANGED = new Set(["cluster", "models", "settings"]);
const talk = new Talk();

function App({ refusal }) {
  const [state, refresh] = useNode();
  const { data, lost, locked } = state;
  const address = useAddress();
  const { place, detail } = address;
  useTalk(talk);
  if (data.cluster?.command) setCommand(data.cluster.command);
  // Without a detail it is the conversation that was shown last.
  useEffect(() => {
    if (place === "chat" && detail && talk.ready) talk.show(detail);
  }, [address]);
  // What changed without an event, such as a setting, is known where somebody goes to look.
  useEffect(() => {
    if (data.cluster) refresh();
  }, [place]);
  // The address names the conversation once it has a beginning, so that a reload finds it.
  const shown = draftName(talk.current);
  useEffect(() => {
    const now = draftName(talk.current);
    if (place === "chat" && now && now !== read().detail) history.replaceState(null, "", `#/chat/${now}`);
  }, [address, shown]);

  const enter = (key) => {
    if (key) rememberKey(key);
    else forgetKey();
    refresh();
  };
  const props = { state, data, talk, refresh, onForgetKey: apiKey() ? () => enter("") : null };
  return html`
    <a class="skip" href="#main">Skip to content</a>
    <${Keys} talk=${talk} />
    <${SideBar} place=${place} talk=${talk} joining=${data.joining} locked=${locked} />
    <div class="stage">
      <${Header} place=${place} state=${state} talk=${talk} />
      <div aria-live="assertive">
        ${lost && html`<p class="banner"><strong>Connection lost, retrying.</strong> ${" "}
          What you see is the last known state. Check that <code>exo-node start</code> is running on ${" "}
          ${location.host}.</p>`}
      </div>
      ${refusal && html`<p class="banner" role="alert">${refusal}</p>`}
      <main id="main" tabindex=${place === "chat" ? "-1" : "0"} class=${`place-${place} ${lost ? "stale" : ""}`}>
        ${!locked && CHANGED.has(place) && !mayChange(data) && html`<p id=${LOOKING} class="looking muted small">
          Looking only: to change anything, run <code>${data.cluster?.command ?? "exo-node"} dashboard</code> on this machine and open its link.</p>`}
        ${locked
          ? html`<${KeyPrompt} onKey=${enter} />`
          : place === "chat"
            ? html`<${Chat} ...${props} />`
            : html`<${Elsewhere} key=${place} place=${place} ...${props} />`}
      </main>
    </div>`;
}

/** {place, detail} of an address such as `#/chat/ID`; chat is home. */
function useAddress() {
  const [address, setAddress] = useState(read);
  useEffect(() => {
    const onChange = () => setAddress(read());
    addEventListener("hashchange", onChange);
    return () => removeEventListener("hashchange", onChange);
  }, []);
  return address;
}

function read() {
  const [place = "", detail = ""] = location.hash.replace(/^#\/?/, "").split("/");
  return place in PLACES ? { place, detail } : { place: "chat", detail };
}

function Elsewhere({ place, ...props }) {
  const [found, setFound] = useState({});
  useEffect(() => {
    PLACES[place]().then(
      ({ Place }) => setFound({ Place }),
      () => setFound({ failed: true }),
    );
  }, [place]);
  if (found.failed) return html`<p class="notice bad" role="alert">This part of the page could not be
    fetched. Reload when the node answers again.</p>`;
  return found.Place ? html`<${found.Place} ...${props} />` : html`<p class="muted pulse">One moment…</p>`;
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
    <form class="key" onSubmit=${submit}>
      <h2>This node asks for its API key or a token</h2>
      <p class="muted">It is kept for this browser tab only. ${" "}
        The link that <code>exo-node dashboard</code> prints on the node's machine needs neither.</p>
      <label>
        API key or token
        <input ref=${field} type="password" autocomplete="off" required spellcheck="false" />
      </label>
      ${refused.current && html`<p class="notice bad" role="alert" key=${tried}>
        The node refused the key. Enter the one that the node was started with, or a token that was not revoked.</p>`}
      <button class="primary">Continue</button>
    </form>`;
}

const refusal = await beginSession();
talk.open(read().detail, {});
render(html`<${App} refusal=${refusal} />`, document.getElementById("app"));
