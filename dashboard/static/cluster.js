/** The cluster: who asks to join, how each loaded model's layers lie, every node, what happened. */

import { call } from "./api.js";
import { Copies, answerWords, byModel, useAnswers } from "./copies.js";
import { bytes, layerRange, naturally, plural, sentence, short, tone, whole } from "./format.js";
import { Joining } from "./joining.js";
import { mayChange, nameOf, roster } from "./node.js";
import { Reason } from "./reason.js";
import { Timeline } from "./timeline.js";
import { Topology } from "./topology.js";
import { html, useEffect, useState } from "./vendor/htm-preact.module.js";

export function Place({ state, data, refresh }) {
  const { cluster, joining } = data;
  const placements = data.placements?.data ?? [];
  const error = state.errors.cluster ?? state.errors.joining;
  const profile = useProfile(state.events.length);
  const nodes = cluster?.nodes ?? [];
  const known = roster(nodes);
  useAnswers(placements, refresh);
  return html`
    <div class="place">
      ${error && html`<p class="notice bad" role="alert">${error.message}</p>`}
      ${!cluster && !error && html`<p class="muted pulse">Asking the node…</p>`}
      <${Joining} joining=${joining} refresh=${refresh} />
      ${nodes.length > 0 && html`
        <${Topology} nodes=${ordered(known)} placements=${placements} links=${profile?.links ?? []} />`}
      ${nodes.length === 1 && html`<p class="muted">
        This node is alone. To add another machine of this network, run ${" "}
        <code>exo-node start</code> there: it asks to join and shows six digits to type here.</p>`}
      <section aria-labelledby="running-title">
        <h2 id="running-title">Loaded models</h2>
        ${[...byModel(placements, known)].map(([model, copies]) => html`
          <${Loaded} key=${model} copies=${copies} known=${known} may=${mayChange(data)} refresh=${refresh} />`)}
        ${cluster && placements.length === 0 && html`<p class="muted">
          None. The first message of a chat loads its model, or load one under ${" "}
          <a href="#/models">Models</a>.</p>`}
      </section>
      <section aria-labelledby="nodes-title">
        <h2 id="nodes-title">Nodes</h2>
        <ul class="cards">
          ${ordered(known).map((node) => html`<${Node} key=${node.id} node=${node} />`)}
        </ul>
        ${cluster && html`<p class="muted small">Cluster <code>${short(cluster.cluster)}</code>, term ${cluster.term}, ${" "}
          exo-node ${cluster.version}.${cluster.offline && ` Nothing is downloaded, by ${cluster.offline}; models come from this disk and from peers.`}</p>`}
      </section>
      <${Timeline} events=${state.events} />
    </div>`;
}

/** Measured links and layer times; anew when something happened in the cluster. */
function useProfile(changes) {
  const [profile, setProfile] = useState(null);
  useEffect(() => {
    call("GET", "/v1/cluster/profile").then(setProfile, () => setProfile(null));
  }, [changes]);
  return profile;
}

/** This node first, then by name. */
const ordered = (known) =>
  [...known.values()].sort(
    (a, b) => Number(b.self) - Number(a.self) || naturally(a.name, b.name),
  );

/** One model: how many copies of it answer, and each of them. */
function Loaded({ copies, known, may, refresh }) {
  const [{ model, stages }] = copies;
  return html`
    <div class="layout">
      <p class="line">
        <strong class="model-id">${model}</strong>
        ${copies.length === 1 && html`<${Condition} placement=${copies[0]} />`}
        <span class="muted end">${plural(lastLayer(stages), "layer")}</span>
      </p>
      ${hasChoice(copies[0], known) && html`<${Copies} copies=${copies} may=${may} refresh=${refresh} />`}
      ${copies.length === 1
        ? html`<${Layout} placement=${copies[0]} known=${known} />`
        : html`<ul aria-label=${`The copies of ${model}`}>
            ${copies.map((placement) => html`
              <li key=${placement.id} class="copy">
                <p class="line"><${Condition} placement=${placement} /> <code class="muted end">${placement.id}</code></p>
                <${Layout} placement=${placement} known=${known} />
              </li>`)}
          </ul>`}
    </div>`;
}

/** A node that is alone has room for no other copy. */
const hasChoice = ({ replicas, auto_replicas: auto }, known) => known.size > 1 || replicas > 1 || auto;

const Condition = ({ placement: { status, answers, kv_bits: bits } }) => html`
  <span class=${`state ${tone(status)}`}>${status}</span>
  ${bits && html`<span class="muted small">caches of ${bits} bits</span>`}
  <span class="muted small">${answerWords(answers)}</span>`;

function Layout({ placement, known }) {
  const { model, reason, moved, error, stages, readers = [] } = placement;
  const helpers = readers.map((each) => `${nameOf(known, each.node)} (${layerRange(each.layers)})`);
  return html`
    <ol class="layers" aria-label=${`Layers of ${model} by node`}>
      ${stages.map((stage, index) => html`<${Segment} key=${index} stage=${stage} known=${known} />`)}
    </ol>
    ${error && html`<p class="notice bad">${sentence(error)}</p>`}
    ${helpers.length > 0 && html`<p class="muted small">Long prompts are read with ${helpers.join(", ")}</p>`}
    <${Reason} reason=${reason} lead=${moved} />`;
}

const lastLayer = (stages) => Math.max(0, ...stages.map((stage) => Number(stage.layers[1])));

function Segment({ stage, known }) {
  const [from, to] = stage.layers.map(Number);
  const node = known.get(stage.node);
  const here = `${nameOf(known, stage.node)}, ${layerRange(stage.layers)}, ${stage.status}`;
  const ready = stage.status === "ready";
  return html`
    <li class=${`${node?.colour ?? "gone"} ${ready ? "" : "pending"}`}
        style=${{ flexGrow: Math.max(to - from, 0) }} title=${here}>
      <span class="seg-name">${nameOf(known, stage.node)}</span>
      <span class="seg-range">${layerRange(stage.layers)}</span>
      ${!ready && html`<span class="unseen"> ${stage.status}</span>`}
    </li>`;
}

const WARNING = {
  suspect: "Its heartbeats stopped arriving. It gets no new work until they return.",
  dead: "It does not answer. Start exo-node on it again, or check its network.",
};

function Node({ node }) {
  const stages = node.stages ?? [];
  const facts = [node.chip, node.backend, bytes(node.memory_bytes), `version ${node.version}`];
  return html`
    <li class=${node.status === "dead" ? "node faded" : "node"}>
      <p class="line">
        <span class=${`swatch ${node.colour}`} aria-hidden="true"></span>
        <strong title=${node.id}>${node.name}</strong>
        ${node.self && html`<span class="badge">this node</span>`}
        ${node.head && html`<span class="badge">head</span>`}
        <span class=${`state end ${tone(node.status)}`}>${node.status}</span>
      </p>
      <p class="muted small">${facts.filter(Boolean).join(" · ")} · <code>${node.host}:${node.port}</code></p>
      ${WARNING[node.status] && html`<p class="small warn-text">${WARNING[node.status]}</p>`}
      ${stages.length > 0 && html`<${Memory} stages=${stages} total=${node.memory_bytes} />`}
      <ul aria-label=${`Stages on ${node.name}`}>
        ${stages.map((stage) => html`<${Stage} key=${`${stage.placement}/${stage.stage}`} stage=${stage} />`)}
      </ul>
    </li>`;
}

function Memory({ stages, total }) {
  const used = stages.reduce((sum, s) => sum + (s.weight_bytes ?? 0) + (s.cache_bytes ?? 0), 0);
  const share = total > 0 ? Math.min(100, (100 * used) / total) : 0;
  const words = `${bytes(used)} of ${bytes(total)} in use by models`;
  return html`
    <div class="memory">
      <span class="track" aria-hidden="true"><span style=${{ width: `${share}%` }}></span></span>
      <span class="muted small">${words}</span>
    </div>`;
}

function Stage({ stage }) {
  const live = stage.live_requests ?? 0;
  const facts = [
    layerRange(stage.layers),
    `weights ${bytes(stage.weight_bytes)}`,
    `KV cache ${bytes(stage.cache_bytes)}`,
    `peak ${bytes(stage.peak_memory_bytes)}`,
    stage.status === "loading" && `${bytes(stage.checkpoint_bytes_read)} read`,
    live > 0 && plural(live, "request"),
  ];
  return html`
    <li class="stage-row small">
      <p class="line">
        <span class="model-id" title=${`Placement ${stage.placement}, process ${stage.pid ?? "none"}`}>
          ${stage.model} <span class="muted">stage ${stage.stage}</span>
        </span>
        <span class=${`state end ${tone(stage.status)}`}>${stage.status}</span>
      </p>
      <p class="muted">${facts.filter(Boolean).join(" · ")}</p>
      ${cachedPrompts(stage).map((words) => html`<p key=${words} class="muted">${words}</p>`)}
      ${stage.error && html`<p class="bad-text">${stage.error}</p>`}
    </li>`;
}

/** The prompts that a stage has cached, and how many tokens of others they spared since its start. */
export function cachedPrompts(stage) {
  const sum = (title, words, pairs) => {
    const parts = pairs.filter(([count]) => count > 0).map(([count, place]) => `${words(count)} ${place}`);
    return parts.length > 0 && `${title}: ${parts.join(", ")}`;
  };
  return [
    sum("prompts cached", bytes, [[stage.prefix_cache_bytes, "in memory"], [stage.prefix_disk_bytes, "on disk"]]),
    sum("prompt tokens reused", whole, [
      [stage.prefix_memory_rows, "from memory"],
      [stage.prefix_disk_rows, "from disk"],
      [stage.prefix_peer_rows, "from other copies"],
    ]),
  ].filter(Boolean);
}
