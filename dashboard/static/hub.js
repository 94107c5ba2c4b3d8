/** Models on no disk yet: those that exo-node has cards of, and what a search of the hub finds. */

import { call } from "./api.js";
import { bytes, modelName, naturally, rate, whole } from "./format.js";
import { facts } from "./models.js";
import { LOOKING } from "./node.js";
import { html, useState } from "./vendor/htm-preact.module.js";

/** The form and its hits. `target`: the node that downloads; "": the best one for each model. */
export function Search({ nodes, may, offline, downloads, target, onTarget }) {
  const [text, setText] = useState("");
  const [{ hits, query, failure, busy }, setState] = useState({});
  const alive = nodes.filter(({ status }) => status === "alive").sort((a, b) => naturally(a.name, b.name));

  async function search(event) {
    event.preventDefault();
    setState({ busy: true });
    try {
      const { data, query } = await call("GET", `/v1/models/search?${new URLSearchParams({ q: text.trim() })}`);
      setState({ hits: data, query });
    } catch (error) {
      setState({ failure: error.message });
    }
  }
  const locked = !may || Boolean(offline);
  return html`
    <section aria-label="Find a model">
      <h2>Find a model on the hub</h2>
      ${offline && html`<p class="muted small">This node is offline (${offline}): it neither searches nor downloads.</p>`}
      <form role="search" class="line find" onSubmit=${search}>
        <label class="grow">Name of a model on Hugging Face
          <input type="search" value=${text} required maxlength="200" spellcheck="false" disabled=${locked}
            aria-describedby=${may ? null : LOOKING} placeholder="qwen3 4bit" onInput=${({ target }) => setText(target.value)} />
        </label>
        ${alive.length > 1 && html`
          <label>Download to
            <select value=${target} disabled=${locked} onChange=${({ target }) => onTarget(target.value)}>
              <option value="">where it runs best</option>
              ${alive.map(({ id, name }) => html`<option key=${id} value=${id}>${name}</option>`)}
            </select>
          </label>`}
        <button class="primary" disabled=${locked || busy || !text.trim()}>${busy ? "Searching…" : "Search"}</button>
      </form>
      <div aria-live="polite">
        ${busy && html`<p class="muted pulse small">Asking the hub…</p>`}
        ${hits?.length === 0 && html`<p class="muted small">The hub has no model in safetensors format by the name ${query}.</p>`}
        ${hits?.length > 0 && html`<p class="unseen">${hits.length} found</p>`}
      </div>
      ${failure && html`<p class="notice bad" role="alert">${failure}</p>`}
      ${hits?.length > 0 && html`
        <${Offers} models=${hits} several=${alive.length > 1} may=${!locked} downloads=${downloads} target=${target} />`}
    </section>`;
}

/** Models with a button that downloads each. */
export const Offers = ({ models, several, may, downloads, target }) => html`
  <ul class="models">
    ${models.map((model) => html`
      <${Offer} key=${model.id} model=${model} several=${several} may=${may} downloads=${downloads} target=${target} />`)}
  </ul>`;

function Offer({ model, several, may, downloads, target }) {
  const [busy, setBusy] = useState(false);
  const { owner, name } = modelName(model.id);
  const pull = downloads.pulls.find((one) => one.model === model.id);
  const state = pull ? pull.status : model.downloaded ? `on ${several ? model.nodes.join(", ") : "disk"}` : "";
  async function begin() {
    setBusy(true);
    await downloads.begin({ model: model.id, node: target || model.fits?.on?.[0] });
    setBusy(false);
  }
  const known = [...facts(model, []), model.drafts && "drafts for itself", ...popularity(model)];
  return html`
    <li class="model">
      <p class="line">
        <strong class="model-id">${owner && html`<span class="owner">${owner}/</span>`}${name}</strong>
        ${state && html`<span class=${`state ${pull ? "busy" : "good"}`}>${state}</span>`}
        ${model.gated && html`<span class="badge">gated</span>`}
      </p>
      ${!model.error && html`<p class="muted small">${known.filter(Boolean).join(" · ")}</p>`}
      ${model.error && html`<p class="muted small">Not usable: ${model.error}</p>`}
      ${several && model.by_node && html`<p class="muted small wide">${model.by_node.map(alone).join(" · ")}</p>`}
      ${!model.error && !state && html`<div class="actions">
        <button disabled=${!may || busy} aria-describedby=${may ? null : LOOKING}
          aria-label=${`Download ${model.id}, ${bytes(model.download_bytes ?? model.size_bytes)}`}
          onClick=${begin}>${busy ? "Beginning…" : "Download"}</button></div>`}
    </li>`;
}

/** Whether one node holds the model by itself, and how fast. */
const alone = ({ node, fits, tokens_per_second: speed }) =>
  fits ? `${node} alone: about ${rate(speed)} tok/s` : `${node} alone: too small`;

const popularity = ({ downloads, likes }) => [
  downloads > 0 && `${whole(downloads)} downloads a month`,
  likes > 0 && `${whole(likes)} likes`,
];
