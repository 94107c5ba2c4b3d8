/** Downloads of models: those that run, wait, failed or are paused on any node, and their controls. */

import { call } from "./api.js";
import { bytes, duration, modelName, percent, plural } from "./format.js";
import { LOOKING, mayTalk } from "./node.js";
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.module.js";

const EVERY_MS = 1000;
const LATER_MS = 3000;
const PATH = "/v1/models/pull";
export const TONES = { downloading: "busy", pausing: "busy", failed: "bad" };
const ACTIVE = new Set(["waiting", "downloading", "pausing"]);

export const on = (node) => (node ? `?node=${encodeURIComponent(node)}` : "");

/**
 * The unfinished downloads, with `begin`, `pause` and `cancel`. They are asked for when the place is
 * opened, when `news` is another, and by the clock while one runs. `refresh`: of the lists of models,
 * which a download that ended has changed. `ended`: the models whose downloads were listed before.
 */
export function usePulls(news, refresh) {
  const [{ pulls, unreachable }, setState] = useState({ pulls: [], unreachable: [] });
  const [failure, setFailure] = useState("");
  const seen = useRef(new Set());
  const active = pulls.some(({ status }) => ACTIVE.has(status));
  const names = pulls.map(keyOf).join();

  async function ask() {
    try {
      const { data, unreachable } = await call("GET", PATH);
      for (const { model } of data) seen.current.add(model);
      setState({ pulls: data, unreachable });
    } catch (error) {
      setFailure(error.message);
    }
  }
  async function change(path, { model, node }, options) {
    setFailure("");
    try {
      await call("POST", `${path}${on(node)}`, { body: { model, ...options } });
    } catch (error) {
      setFailure(error.message);
    }
    await ask();
  }
  useEffect(() => void ask(), [news]);
  const before = useRef(names);
  useEffect(() => {
    if (before.current === names) return;
    before.current = names;
    refresh();
    // What is new on another node's disk comes with its next heartbeat.
    const later = setTimeout(refresh, LATER_MS);
    return () => clearTimeout(later);
  }, [names]);
  useEffect(() => {
    if (!active) return;
    const timer = setInterval(() => document.hidden || ask(), EVERY_MS);
    return () => clearInterval(timer);
  }, [active]);
  return {
    pulls,
    ended: [...seen.current].filter((model) => pulls.every((pull) => pull.model !== model)),
    unreachable,
    failure,
    begin: (pull) => change(PATH, pull, { stream: false }),
    pause: (pull) => change(`${PATH}/pause`, pull),
    cancel: (pull) => change(`${PATH}/cancel`, pull),
  };
}

export const keyOf = ({ model, node }) => `${model} on ${node}`;

/** The region of downloads; nothing where there are none. `here`: the models on disk by id. */
export function Pulls({ downloads, several, may, here, onChat }) {
  const { pulls, ended, unreachable, failure } = downloads;
  const whole = ended.map((model) => here.get(model)).filter(Boolean);
  if (pulls.length + whole.length + unreachable.length === 0 && !failure) return null;
  return html`
    <section aria-label="Downloads">
      <h2>Downloads</h2>
      ${failure && html`<p class="notice bad" role="alert">${failure}</p>`}
      ${unreachable.map(({ node, reason }) => html`
        <p key=${node} class="muted small">The downloads of ${node} are not known: ${reason}.</p>`)}
      <ul class="models">
        ${pulls.map((pull) => html`<${Row} key=${keyOf(pull)} pull=${pull} several=${several} may=${may} downloads=${downloads} />`)}
        ${whole.map((model) => html`<${Whole} key=${model.id} model=${model} onChat=${onChat} />`)}
      </ul>
    </section>`;
}

/** A model whose download ended while the place was open. */
function Whole({ model, onChat }) {
  return html`
    <li class="model">
      <p class="line"><${Name} id=${model.id} /><span class="state good" role="status">downloaded</span></p>
      <p class="muted small">${bytes(model.size_bytes)} on disk. ${mayTalk(model) ? "It is loaded with your first message." : ""}</p>
      ${mayTalk(model) && html`<div class="actions"><button class="primary"
        aria-label=${`Chat with ${model.id}`} onClick=${() => onChat(model.id)}>Chat</button></div>`}
    </li>`;
}

function Name({ id }) {
  const { owner, name } = modelName(id);
  return html`<strong class="model-id">${owner && html`<span class="owner">${owner}/</span>`}${name}</strong>`;
}

function Row({ pull, several, may, downloads }) {
  const { model, status, error, done_bytes: done, total_bytes: total, files } = pull;
  return html`
    <li class="model">
      <p class="line">
        <${Name} id=${model} />
        <span class=${`state ${TONES[status] ?? "idle"}`} aria-live="polite">${status}</span>
      </p>
      <p class="muted small figures">${facts(pull, several).join(" · ")}</p>
      <div class="actions"><${Controls} pull=${pull} may=${may} downloads=${downloads} /></div>
      <p class="wide"><progress class="whole" aria-label=${`Downloaded of ${model}`} max="1" value=${total ? done / total : 0}></progress></p>
      ${error && html`<p class="notice bad" role="alert">${error}</p>`}
      ${files.length > 0 && html`
        <details class="wide small">
          <summary>${plural(files.length, "file")}</summary>
          <ul>
            ${files.map((file) => html`
              <li key=${file.path} class="progress">
                <span>${file.path}: ${bytes(file.done_bytes)} of ${bytes(file.total_bytes)}</span>
                <progress aria-label=${file.path} max="1" value=${file.done_bytes / Math.max(1, file.total_bytes)}></progress>
              </li>`)}
          </ul>
        </details>`}
    </li>`;
}

const facts = ({ node, status, done_bytes: done, total_bytes: total, bytes_per_second: rate, seconds_left: left }, several) =>
  [
    total ? `${bytes(done)} of ${bytes(total)}, ${percent(done, total)}` : ACTIVE.has(status) && "asking the hub for its files",
    rate ? `${bytes(rate)}/s` : total && !Number.isFinite(left) && status === "downloading" && "waiting for bytes from the hub",
    Number.isFinite(left) && `${duration(left)} left`,
    several && `on ${node}`,
  ].filter(Boolean);

/** Cancelling deletes what arrived, so it asks once more. */
function Controls({ pull, may, downloads }) {
  const [asked, setAsked] = useState(false);
  const [busy, setBusy] = useState(false);
  const { model, status, done_bytes: done } = pull;
  const runs = status === "waiting" || status === "downloading";
  const during = (act) => async () => {
    setBusy(true);
    await act(pull);
    setBusy(false);
  };
  if (asked) {
    return html`
      <span class="small">Delete the ${bytes(done)} that arrived?</span>
      <button onClick=${() => setAsked(false)}>Keep</button>
      <button class="danger" disabled=${busy} onClick=${during(downloads.cancel)}>Cancel and delete</button>`;
  }
  const button = (word, act) => html`
    <button disabled=${!may || busy || status === "pausing"} aria-describedby=${may ? null : LOOKING}
      aria-label=${`${word} the download of ${model}`} onClick=${act}>${word}</button>`;
  return html`
    ${runs ? button("Pause", during(downloads.pause)) : button("Resume", during(downloads.begin))}
    ${button("Cancel", () => setAsked(true))}`;
}
