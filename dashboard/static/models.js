/** The models section: what this node can serve, what is loaded, and native MTP's state. */

import { call } from "./api.js";
import { bytes, plural, tone, whole } from "./format.js";
import { html, useState } from "./vendor/htm-preact.module.js";

export function Models({ models, placements = [], nodes, error, refresh }) {
  const alive = nodes.filter((node) => node.status === "alive").length;
  return html`
    <section id="models" class="panel" aria-labelledby="models-title">
      <h2 id="models-title">Models</h2>
      ${error && html`<p class="notice bad" role="alert">${error.message}</p>`}
      ${!models && !error && html`<p class="muted">Asking the node…</p>`}
      <ul class="rows">
        ${models?.map((model) => html`
          <${Model} key=${model.id} model=${model} alive=${alive} refresh=${refresh}
            placement=${placements.find((placement) => placement.model === model.id)}
            live=${liveRequests(nodes, model.id)} />`)}
      </ul>
      <p class="muted small">These are on disk. In a terminal <code>exo-node models recommend</code> names
        others that fit, and <code>exo-node models pull</code> gets one.</p>
    </section>`;
}

/** The most requests that one stage of the model holds: stages of a pipeline share them. */
const liveRequests = (nodes, model) =>
  Math.max(
    0,
    ...nodes
      .flatMap((node) => node.stages ?? [])
      .filter((stage) => stage.model === model)
      .map((stage) => stage.live_requests ?? 0),
  );

function Model({ model, placement, alive, live, refresh }) {
  const [busy, setBusy] = useState("");
  const [failure, setFailure] = useState("");

  async function act(word, method, path, body) {
    setBusy(word);
    setFailure("");
    try {
      await call(method, path, { body });
    } catch (error) {
      setFailure(error.message);
    }
    setBusy("");
    refresh();
  }
  const load = (minNodes) =>
    act("Loading…", "POST", "/v1/placements", {
      model: model.id,
      ...(minNodes > 1 && { min_nodes: minNodes }),
    });
  const unload = () =>
    act("Unloading…", "DELETE", `/v1/placements/${encodeURIComponent(placement.id)}`);

  const status = placement?.status ?? (model.loaded ? "ready" : "not loaded");
  if (model.error) {
    return html`
      <li class="model">
        <p class="line">
          <strong class="model-id">${model.id}</strong>
          <span class="state bad">cannot be used</span>
        </p>
        <p class="notice bad small">${model.error}</p>
      </li>`;
  }
  return html`
    <li class="model">
      <p class="line">
        <strong class="model-id">${model.id}</strong>
        <span class=${`state ${tone(status)}`}>${placement?.progress || status}</span>
      </p>
      <p class="muted small">
        ${bytes(model.size_bytes)} · ${model.format ?? "–"} · ${fits(model)}
        ${model.nodes?.length > 0 && html` · on ${model.nodes.join(", ")}`}
      </p>
      <p class="muted small">
        ${whole(model.context_length)} tokens of context · <${Mtp} model=${model} placement=${placement} />
      </p>
      <div class="actions">
        ${placement
          ? html`<${Unload} live=${live} busy=${busy} name=${model.id} onUnload=${unload} />`
          : html`<${Load} alive=${alive} busy=${busy} name=${model.id} onLoad=${load} />`}
      </div>
      ${failure && html`<p class="notice bad" role="alert">${failure}</p>`}
    </li>`;
}

/** Whether the model would run if no other one did. */
function fits({ fits: fit }) {
  if (!fit) return "size not checked";
  if (fit.nodes === 0) return html`<span class="warn-text">does not fit: needs ${bytes(fit.needed_bytes)}</span>`;
  return fit.nodes === 1 ? "fits one node" : `fits over ${plural(fit.nodes, "node")}`;
}

/** Native MTP in one phrase: the placement's word counts once there is one. */
function Mtp({ model, placement }) {
  const drafting = placement?.drafting;
  const head = model.native_mtp;
  if (!head) return html`<span>MTP: ${model.mtp ?? "no head"}</span>`;
  if (drafting?.drafter_kind === "native_mtp") {
    return html`<span>MTP on, K ${drafting.num_draft_tokens}, at most ${head.max_k}</span>`;
  }
  if (head.enabled && !drafting) {
    return html`<span>MTP on, K ${head.default_k}, at most ${head.max_k}</span>`;
  }
  const reason = drafting?.reason || head.reason || "the node gave no reason";
  return html`<span>MTP off: <span class="warn-text">${reason}</span></span>`;
}

function Load({ alive, busy, name, onLoad }) {
  const [minNodes, setMinNodes] = useState(1);
  const choices = Array.from({ length: Math.max(alive, 1) }, (_, index) => index + 1);
  return html`
    <label class="inline">
      Spread over
      <select value=${minNodes} disabled=${busy !== ""} aria-label=${`Nodes for ${name}`}
          onChange=${(event) => setMinNodes(Number(event.target.value))}>
        ${choices.map((n) => html`<option key=${n} value=${n}>
          ${n === 1 ? "best choice" : `at least ${plural(n, "node")}`}</option>`)}
      </select>
    </label>
    <button class="primary" disabled=${busy !== ""} aria-label=${`Load ${name}`}
        onClick=${() => onLoad(minNodes)}>${busy || "Load"}</button>`;
}

/** Unloading waits for running answers, so a model in use asks once more. */
function Unload({ live, busy, name, onUnload }) {
  const [asked, setAsked] = useState(false);
  if (asked && !busy) {
    return html`
      <span class="small">${plural(live, "answer")} running.</span>
      <button onClick=${() => setAsked(false)}>Keep</button>
      <button class="danger" onClick=${() => { setAsked(false); onUnload(); }}>Unload anyway</button>`;
  }
  return html`
    <button disabled=${busy !== ""} aria-label=${`Unload ${name}`}
        onClick=${() => (live > 0 ? setAsked(true) : onUnload())}>${busy || "Unload"}</button>`;
}
