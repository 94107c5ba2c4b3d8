/** Models on no disk yet: those that exo-node has cards of, and what a search of the hub finds. */

import { call } from "./api.js";
import { bytes, naturally, percent, rate, whole } from "./format.js";
import { facts, ModelName, speed } from "./model_row.js";
import { mayTalk } from "./node.js";
import { TONES } from "./pulls.js";
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.module.js";

/**
 * The form and its hits. `lock`: the id of the line that says why nothing can be fetched; null: it can.
 * `target`: the node that downloads; "": the best one for each model.
 */
export function Search({ nodes, lock, target, onTarget, ...offers }) {
  const [text, setText] = useState("");
  const { query, busy, stopped, cards = [], hits, failure, begin, stop } = useSearch();
  const others = hits?.filter(({ id }) => cards.every((card) => card.id !== id));
  const alive = nodes.filter(({ status }) => status === "alive").sort((a, b) => naturally(a.name, b.name));
  const list = (models, title) => models?.length > 0 && html`
    <h3>${title}</h3>
    <${Offers} models=${models} ...${offers} lock=${lock} target=${target} />`;
  const onSubmit = (event) => {
    event.preventDefault();
    if (text.trim()) begin(text.trim());
  };
  const onInput = ({ target }) => {
    setText(target.value);
    stop();
  };
  /** The key would clear the word as well, and the button submit it once it is no longer busy. */
  const giveUp = (event) => {
    event.preventDefault();
    stop();
  };
  return html`
    <section aria-label="Find a model">
      <h2>Find a model</h2>
      <form role="search" class="line find" onSubmit=${onSubmit} onKeyDown=${(event) => busy && event.key === "Escape" && giveUp(event)}>
        <label class="grow">Name of a model on Hugging Face
          <input type="search" value=${text} required maxlength="200" spellcheck="false" disabled=${Boolean(lock)}
            aria-describedby=${lock} placeholder="qwen3 4bit" onInput=${onInput} />
        </label>
        ${alive.length > 1 && html`
          <label>Download to
            <select value=${target} disabled=${Boolean(lock)} onChange=${({ target }) => onTarget(target.value)}>
              <option value="">where it runs best</option>
              ${alive.map(({ id, name }) => html`<option key=${id} value=${id}>${name}</option>`)}
            </select>
          </label>`}
        <button class=${busy ? "" : "primary"} type=${busy ? "button" : "submit"} disabled=${Boolean(lock) || !text.trim()}
          onClick=${busy ? giveUp : null}>${busy ? "Stop" : "Search"}</button>
      </form>
      ${list(cards, "Known to exo-node")}
      <div aria-live="polite">
        ${busy && html`<p class="muted pulse small">Asking the hub…</p>`}
        ${stopped && html`<p class="muted small">Stopped: the hub has not answered for ${query}.</p>`}
        ${others?.length === 0 && html`<p class="muted small">The hub has no ${cards.length > 0 ? "other " : ""}model in safetensors format by the name ${query}.</p>`}
        ${cards.length + (others?.length ?? 0) > 0 && html`<p class="unseen">${cards.length + (others?.length ?? 0)} found</p>`}
      </div>
      ${failure && html`<p class="notice bad" role="alert">${failure}</p>`}
      ${list(others, "On Hugging Face")}
    </section>`;
}

/**
 * One search at a time: what there are cards of comes at once, what the hub has when it answers.
 * `begin` and `stop` abort the one before, which changes nothing from then on.
 */
function useSearch() {
  const [state, setState] = useState({});
  const running = useRef(null);
  const abort = () => {
    running.current?.abort();
    running.current = null;
  };
  useEffect(() => abort, []);
  async function begin(query) {
    abort();
    const { signal } = (running.current = new AbortController());
    const change = (part) => !signal.aborted && setState((before) => ({ ...before, ...part }));
    const ask = async (source, name) => {
      const path = `/v1/models/search?${new URLSearchParams({ q: query, source })}`;
      await call("GET", path, { signal }).then(
        ({ data }) => change({ [name]: data }),
        (error) => change({ failure: error.message }),
      );
    };
    setState({ query, busy: true });
    await Promise.all([ask("cards", "cards"), ask("hub", "hits")]);
    change({ busy: false });
  }
  function stop() {
    abort();
    setState((before) => (before.busy ? { ...before, busy: false, stopped: !before.hits } : before));
  }
  return { ...state, begin, stop };
}

/** Models with a button that downloads each; `first`: the first one is what to get. */
export const Offers = ({ models, first = false, ...offers }) => html`
  <ul class="models">
    ${models.map((model, at) => html`<${Offer} key=${model.id} model=${model} best=${first && at === 0} ...${offers} />`)}
  </ul>`;

/** `here`: the models on disk by id, which change after a search was answered. */
function Offer({ model, several, downloads, here, ...rest }) {
  const pull = downloads.pulls.find((one) => one.model === model.id);
  const copy = here.get(model.id);
  const state = pull ? progress(pull) : copy ? `on ${several ? copy.nodes.join(", ") : "disk"}` : "";
  const tooLarge = model.fits?.nodes === 0;
  return html`
    <li class="model">
      <p class="line">
        <${ModelName} id=${model.id} />
        ${state && html`<span class=${`state ${pull ? TONES[pull.status] ?? "idle" : "good"}`}>${state}</span>`}
        ${(model.gated || (!state && model.drafts)) && html`<span class="badge">${model.gated ? "gated" : "drafts for itself"}</span>`}
      </p>
      ${!model.error && html`<p class="muted small">${[bytes(model.size_bytes), speed(model), ...popularity(model)].filter(Boolean).join(" · ")}</p>`}
      ${model.error && html`<p class="muted small">Not usable: ${model.error}</p>`}
      ${!model.error && tooLarge && html`<p class="warn-text small wide">Does not fit: ${shortage(model)}.</p>`}
      ${!model.error && html`<details class="wide small">
        <summary>Details</summary>
        <p class="muted">${facts(model, []).join(" · ")}</p>
        ${several && model.by_node && html`<p class="muted">${model.by_node.map(alone).join(" · ")}</p>`}
      </details>`}
      ${!model.error && !state && html`
        <${Download} model=${model} verb=${tooLarge ? "Download anyway" : "Download"} downloads=${downloads} ...${rest} />`}
      ${!pull && copy && mayTalk(copy) && html`<div class="actions">
        <button aria-label=${`Chat with ${model.id}`} onClick=${() => rest.onChat(model.id)}>Chat</button></div>`}
    </li>`;
}

function Download({ model, verb, best, lock, downloads, target }) {
  const [busy, setBusy] = useState(false);
  async function begin() {
    setBusy(true);
    await downloads.begin({ model: model.id, node: target || model.fits?.on?.[0] });
    setBusy(false);
  }
  return html`
    <div class="actions">
      <button class=${best ? "primary" : ""} disabled=${Boolean(lock) || busy} aria-describedby=${lock}
        aria-label=${`${verb} ${model.id}, ${bytes(model.download_bytes ?? model.size_bytes)}`}
        onClick=${begin}>${busy ? "Beginning…" : verb}</button>
    </div>`;
}

/** The list of downloads may be out of sight. */
const progress = ({ status, done_bytes: done, total_bytes: total }) =>
  status === "downloading" && total ? `${status}, ${percent(done, total)}` : status;

/** The memory that the model needs and the nodes have; the line above it names the model. */
const shortage = ({ id, fits: { reason, needed_bytes: needed } }) => (reason ?? `it needs ${bytes(needed)}`).replace(id, "it");

/** Whether one node holds the model by itself, and how fast. */
const alone = ({ node, fits, tokens_per_second: speed }) =>
  fits ? `${node} alone: estimated ${rate(speed)} tok/s` : `${node} alone: too small`;

const popularity = ({ downloads, likes }) => [
  downloads > 0 && `${whole(downloads)} downloads a month`,
  likes > 0 && `${whole(likes)} likes`,
];
