/** The models: downloads, a search, what is on disk and fits, what does not, what could be fetched. */

import { call } from "./api.js";
import { answersOn } from "./copies.js";
import { bytes, naturally, plural, profileWords, sentence } from "./format.js";
import { Offers, Search } from "./hub.js";
import { LoadDialog } from "./load.js";
import { Badge, facts, ModelName, speed } from "./model_row.js";
import { Pulls, usePulls } from "./pulls.js";
import { RemoveDialog } from "./remove.js";
import { LOOKING, OFFLINE, atHand, copiesOf, isToy, mayChange, mayTalk, useCatalogue } from "./node.js";
import { html, useState } from "./vendor/htm-preact.module.js";

export function Place({ state, data, talk, refresh }) {
  const models = data.models?.data;
  const placements = data.placements?.data ?? [];
  const nodes = data.cluster?.nodes ?? [];
  const error = state.errors.models ?? state.errors.placements;
  const [asked, setAsked] = useState(null);
  const [unwanted, setUnwanted] = useState(null);
  const [removal, setRemoval] = useState(null);
  const [target, setTarget] = useState("");
  const downloads = usePulls(state.events.at(-1)?.id, refresh);
  const { models: catalogue, failure } = useCatalogue(true);
  const may = mayChange(data);
  const offline = data.cluster?.offline;
  const lock = may ? (offline ? OFFLINE : null) : LOOKING;
  const arriving = new Set(downloads.pulls.map(({ model }) => model));
  const groups = grouped((models ?? []).filter(({ id, error }) => !error || !arriving.has(id)));
  const here = new Map((models ?? []).filter(({ downloaded }) => downloaded).map((model) => [model.id, model]));
  const others = (catalogue ?? []).filter(({ id, downloaded }) => !here.has(id) && !downloaded);
  const onChat = (model) => {
    talk.show("", { ...talk.current.options, model });
    location.hash = "#/chat";
  };
  const offers = { several: nodes.length > 1, lock, downloads, target, here, onChat };
  const wantsModel = isToy(atHand(models ?? []) ?? { parameters: 0 });
  const best = others.filter(({ recommended }) => recommended).slice(0, 3);
  const proposal = models && best.length > 0 && html`
    <section aria-label="Recommended">
      <h2>Recommended for ${nodes.length > 1 ? "this cluster" : "this machine"}</h2>
      <p class="muted small">The largest that fit and answer faster than you read. Those that draft for themselves come first: they answer sooner.</p>
      <${Offers} models=${best} ...${offers} first=${wantsModel} />
    </section>`;
  const searching = models && !catalogue && !failure && html`
    <section aria-label="Recommended">
      <h2>Recommended for ${nodes.length > 1 ? "this cluster" : "this machine"}</h2>
      <p class="muted pulse small">Looking for models that fit…</p>
    </section>`;
  const group = (title, list, note) => list.length > 0 && html`
    <section aria-label=${title}>
      <h2>${title}</h2>
      ${note && html`<p class="muted small">${note}</p>`}
      <ul class="models">
        ${list.map((model) => html`
          <${Model} key=${model.id} model=${model} may=${may} refresh=${refresh} nodes=${nodes} onLoad=${() => setAsked(model)}
            onRemove=${() => { setUnwanted(model); setRemoval(null); }} onChat=${mayTalk(model) && (() => onChat(model.id))}
            copies=${copiesOf(placements, model.id)} />`)}
      </ul>
    </section>`;
  return html`
    <div class="place">
      ${error && html`<p class="notice bad" role="alert">${error.message}</p>`}
      ${offline && html`<p id=${OFFLINE} class="muted small">This node is offline (${offline}): it neither searches nor downloads.</p>`}
      ${!models && !error && html`<p class="muted pulse">Asking the node…</p>`}
      ${models?.length === 0 && html`<p class="muted">No model is on a disk of this cluster yet.</p>`}
      <p class="outcome" role="status">${removal && `${removal.id} was deleted from ${nodes.length > 1 ? `${removal.node}'s` : "the"} disk: ${bytes(removal.freed_bytes)} are free again.`}</p>
      <${Pulls} downloads=${downloads} several=${nodes.length > 1} may=${may} here=${here} onChat=${onChat} />
      ${wantsModel && (proposal || searching)}
      ${group("Loaded", groups.loaded)}
      ${group("On disk", groups.fits)}
      ${group("On disk, too large", groups.large, "They would run with more memory, another node, or fewer bits.")}
      ${group("Not usable", groups.broken)}
      <${Profiles} profiles=${groups.profiles} />
      ${!wantsModel && (proposal || searching)}
      <${Search} nodes=${nodes} onTarget=${setTarget} ...${offers} />
      ${failure && html`<p class="notice bad" role="alert">${failure}</p>`}
      ${others.length > best.length && html`
        <details class="catalogue">
          <summary><h2>Others that exo-node knows</h2></summary>
          <${Offers} models=${others.filter((model) => !best.includes(model))} ...${offers} />
        </details>`}
      ${asked && html`<${LoadDialog} model=${asked} nodes=${nodes} onClose=${() => { setAsked(null); refresh(); }} />`}
      ${unwanted && html`<${RemoveDialog} model=${unwanted} several=${nodes.length > 1} onClose=${(answer) => { setUnwanted(null); setRemoval(answer ?? null); refresh(); }} />`}
    </div>`;
}

function grouped(models) {
  const sorted = [...models].sort((a, b) => naturally(a.id, b.id));
  const broken = sorted.filter(({ error }) => error);
  const named = sorted.filter(({ error, profile_of: of }) => !error && of);
  const sound = sorted.filter(({ error, profile_of: of }) => !error && !of);
  return {
    profiles: named,
    loaded: sound.filter(({ loaded }) => loaded),
    fits: sound.filter(({ loaded, fits }) => !loaded && fits?.nodes !== 0),
    large: sound.filter(({ loaded, fits }) => !loaded && fits?.nodes === 0),
    broken,
  };
}

function Model({ model, copies, may, refresh, nodes, onLoad, onRemove, onChat }) {
  const placement = copies[0];
  const [busy, setBusy] = useState(false);
  const [failure, setFailure] = useState("");
  async function unload() {
    setBusy(true);
    setFailure("");
    const unloads = copies.map(({ id }) => call("DELETE", `/v1/placements/${encodeURIComponent(id)}`));
    const refusals = (await Promise.allSettled(unloads)).map(({ reason }) => reason).filter(Boolean);
    const refusal = refusals.find(({ code }) => code !== "placement_not_found"); // it ended by itself
    if (refusal) setFailure(refusal.message);
    await refresh(); // until then the model is still shown as loaded, and could be unloaded again
    setBusy(false);
  }
  return html`
    <li class="model">
      <p class="line">
        <${ModelName} id=${model.id} />
        <${Badge} model=${model} placement=${placement} />
        ${copies.length > 1 && html`<a class="small" href="#/cluster">${copies.length} copies</a>`}
      </p>
      <p class="muted small">${[bytes(model.size_bytes), speed(model)].filter(Boolean).join(" · ")}</p>
      <div class="actions">
        ${!model.kept && html`<button disabled=${!may} aria-label=${`Delete ${model.id}`} onClick=${onRemove}>Delete…</button>`}
        ${placement
          ? html`<${Unload} live=${answersOn(copies)} busy=${busy} may=${may} name=${model.id} onUnload=${unload} />`
          : !model.error && model.fits?.nodes !== 0 && html`<button disabled=${!may}
            aria-label=${`Load ${model.id}`} onClick=${onLoad}>Load…</button>`}
        ${onChat && html`<button class=${isToy(model) ? "" : "primary"} aria-label=${`Chat with ${model.id}`} onClick=${onChat}>Chat</button>`}
      </div>
      <details class="wide small">
        <summary>Details</summary>
        <p class="muted">${facts(model, nodes).join(" · ")}</p>
        ${model.native_mtp && html`<p><${Mtp} model=${model} placement=${placement} /></p>`}
        <${Lookup} placement=${placement} />
        ${model.kept && html`<p class="muted">Not deleted from here: ${model.kept}.</p>`}
      </details>
      ${copies.filter(({ status }) => status === "loading").map((copy) => html`
        <${Progress} key=${copy.id} placement=${copy} model=${model} nodes=${nodes} />`)}
      ${model.error && html`<p class="notice bad small">${sentence(model.error)}</p>`}
      ${placement?.error && html`<p class="notice bad small">${sentence(placement.error)}</p>`}
      ${failure && html`<p class="notice bad" role="alert">${failure}</p>`}
    </li>`;
}

/** Names of this node's `profiles.toml`. They load nothing of their own: their models are listed above. */
const Profiles = ({ profiles }) => profiles.length > 0 && html`
  <section aria-label="Profiles">
    <h2>Your profiles</h2>
    <p class="muted small">Names for models with settings of their own; choose one in a chat as you would a model.</p>
    <ul class="models">
      ${profiles.map(({ id, profile_of: of, profile }) => html`
        <li key=${id} class="model">
          <p class="wide"><strong class="model-id">${id}</strong></p>
          <p class="muted small wide">${of} · ${profileWords(profile)}</p>
        </li>`)}
    </ul>
  </section>`;

/** Prompt lookup in one phrase, as the model's runner reports it; nothing before. */
function Lookup({ placement }) {
  const lookup = placement?.drafting?.prompt_lookup;
  return lookup && html`<p class="small wide muted">Prompt lookup ${lookup.enabled ? "on" : `off: ${lookup.reason}`}</p>`;
}

/** Native MTP in one phrase: the placement's word counts once there is one. */
function Mtp({ model, placement }) {
  const drafting = placement?.drafting;
  const head = model.native_mtp;
  const off = (reason) => html`<span class="muted">MTP off: ${reason}</span>`;
  if (drafting && drafting.drafter_kind !== "none") {
    const most = drafting.draft_policy === "adaptive" ? "up to " : "";
    return html`<span class="muted">MTP on, drafts ${most}${drafting.num_draft_tokens} a round${
      drafting.depth_reason ? html`<span class="small"> (${drafting.depth_reason})</span>` : ""}</span>`;
  }
  if (drafting || !head.enabled) return off(drafting?.reason || head.reason || "the node gave no reason");
  return html`<span class="muted">MTP on, drafts up to ${head.max_k} a round</span>`;
}

/** Bytes read on each node of a placement that is loading. */
function Progress({ placement, model, nodes }) {
  const total = Math.max(...placement.stages.map(({ layers }) => layers[1]));
  return html`
    <ul class="wide small">
      ${placement.stages.map(({ node, layers, checkpoint_bytes_read: read = 0, status }) => {
        const share = (model.size_bytes * (layers[1] - layers[0])) / Math.max(1, total);
        return html`
          <li key=${node} class="progress">
            <span>${nodes.find(({ id }) => id === node)?.name ?? node}: ${status}, ${bytes(read)} read</span>
            <progress aria-label="Read" max="1" value=${Math.min(1, read / Math.max(1, share))}></progress>
          </li>`;
      })}
    </ul>`;
}

/** Unloading waits for running answers, so a model in use asks once more. */
function Unload({ live, busy, may, name, onUnload }) {
  const [asked, setAsked] = useState(false);
  if (asked && !busy) {
    return html`
      <span class="small">${plural(live, "answer")} running.</span>
      <button onClick=${() => setAsked(false)}>Keep</button>
      <button class="danger" onClick=${() => { setAsked(false); onUnload(); }}>Unload anyway</button>`;
  }
  return html`
    <button disabled=${busy || !may} aria-label=${`Unload ${name}`}
      onClick=${() => (live > 0 ? setAsked(true) : onUnload())}>${busy ? "Unloading…" : "Unload"}</button>`;
}
