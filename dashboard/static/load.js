/** Before a model is loaded: where it would go, why, what else there is, and what a loss would mean. */

import { call } from "./api.js";
import { bytes, duration, layerRange, naturally, plural, rate, sentence } from "./format.js";
import { fits } from "./model_row.js";
import { firstClause } from "./reason.js";
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.module.js";

export function LoadDialog({ model, nodes, onClose }) {
  const box = useRef(null);
  const [minNodes, setMinNodes] = useState(1);
  const [split, setSplit] = useState(null);
  const [kvBits, setKvBits] = useState("");
  const { preview, failure } = usePreview(model.id, minNodes, split, kvBits);
  const [way, setWay] = useState("best");
  const [busy, setBusy] = useState(false);
  const [refused, setRefused] = useState("");
  useEffect(() => {
    box.current.showModal();
    box.current.focus();
  }, []);
  // The choice comes first, once there is one and unless somebody has gone elsewhere.
  useEffect(() => {
    if (document.activeElement === box.current) box.current.querySelector("[name=way]:checked")?.focus();
  }, [preview]);
  const chosen = preview?.[way] ?? preview?.best;

  async function load(event) {
    event.preventDefault();
    setBusy(true);
    setRefused("");
    const layers = chosen.stages.map(({ node, layers: [from, to] }) => ({ node, layers: to - from }));
    try {
      const body = way === "best" && !split ? asked(model.id, minNodes, kvBits) : { ...asked(model.id, 1, kvBits), layers };
      await call("POST", "/v1/placements", { body });
      onClose();
    } catch (error) {
      setRefused(error.message);
      setBusy(false);
    }
  }

  return html`
    <dialog ref=${box} tabindex="-1" aria-labelledby="load-title" onClose=${onClose}>
      <form onSubmit=${load}>
        <div>
          <h2 id="load-title">Load ${model.id}</h2>
          <p class="muted small">${bytes(model.size_bytes)} · ${model.format ?? ""} · ${fits(model)}</p>
        </div>
        ${!preview && !failure && html`<p class="muted pulse">Planning…</p>`}
        ${failure && html`<p class="notice bad" role="alert">${failure}</p>`}
        ${preview && html`
          <div class="choices" role="radiogroup" aria-label="Where">
            <${Way} name="best" title=${split ? "As you split it" : "Best"} plan=${preview.best} nodes=${nodes} way=${way} onPick=${setWay} />
            ${preview.runner_up && html`
              <${Way} name="runner_up" title="Next best" plan=${preview.runner_up} nodes=${nodes} way=${way} onPick=${setWay} />`}
          </div>
          <${Before} model=${model} plan=${chosen} nodes=${nodes} kvBits=${kvBits} />`}
        <details>
          <summary>Memory of the context</summary>
          <label>Attention caches
            <select value=${kvBits} onChange=${({ target }) => setKvBits(target.value)}>
              <option value="">as the setting or the model's card says</option>
              <option value="8">8 bits a number; answers change a little</option>
              <option value="4">4 bits a number; answers change more</option>
              <option value="0">not quantised</option>
            </select>
          </label>
        </details>
        ${nodes.length > 1 && html`
          <details>
            <summary>Spread it yourself</summary>
            <${Spread} nodes=${nodes} minNodes=${minNodes} plan=${preview?.best} split=${split}
              onMinNodes=${(n) => { setSplit(null); setWay("best"); setMinNodes(n); }}
              onSplit=${(one) => { setWay("best"); setSplit(one); }} />
          </details>`}
        ${preview?.best?.reason && html`<details><summary>Why there</summary><p class="muted small">${preview.best.reason}</p></details>`}
        ${preview?.refusal && html`<p class="notice bad" role="alert">${sentence(preview.refusal)}</p>`}
        ${refused && html`<p class="notice bad" role="alert">${refused}</p>`}
        <div class="line foot">
          <button type="button" onClick=${onClose}>Cancel</button>
          <button class="primary" disabled=${!preview || Boolean(preview.refusal) || busy}>${busy ? "Loading…" : "Load"}</button>
        </div>
      </form>
    </dialog>`;
}

const asked = (model, minNodes, kvBits) => ({
  model,
  ...(minNodes > 1 && { min_nodes: minNodes }),
  ...(kvBits && { kv_bits: Number(kvBits) }),
});

/** The plan for what is asked, and what it says to `without` a node. */
function usePreview(model, minNodes, split, kvBits) {
  const [found, setFound] = useState({});
  useEffect(() => {
    let current = true;
    setFound({});
    planned({ ...asked(model, minNodes, kvBits), ...(split && { layers: split }) }).then(
      (preview) => current && setFound({ preview }),
      (error) => current && setFound({ failure: error.message }),
    );
    return () => {
      current = false;
    };
  }, [model, minNodes, split, kvBits]);
  return found;
}

const planned = (query) => call("GET", `/v1/placements/preview?${new URLSearchParams(query)}`);

function Way({ name, title, plan, nodes, way, onPick }) {
  const stages = plan.stages.map((stage) => `${named(nodes, stage)} ${layerRange(stage.layers)}`);
  return html`
    <label class="choice">
      <input type="radio" name="way" checked=${way === name} onChange=${() => onPick(name)} />
      <span>
        <strong>${title}: ${plan.stages.length === 1 ? named(nodes, plan.stages[0]) : plural(plan.stages.length, "node")}</strong>
        <span class="muted"> · about ${rate(1 / plan.seconds_per_token)} tok/s</span><br />
        ${plan.stages.length > 1 && html`<span class="small">${stages.join(" → ")}</span><br />`}
        <span class="muted small">${firstClause(plan.reason)}</span>
      </span>
    </label>`;
}

const named = (nodes, { node, name }) => name ?? nodes.find(({ id }) => id === node)?.name ?? node;

/** What the load takes of each node, and what the plan would be without it. */
function Before({ model, plan, nodes, kvBits }) {
  const [without, setWithout] = useState({});
  const ids = plan.stages.map(({ node }) => node).join();
  useEffect(() => {
    setWithout({});
    if (nodes.length < 2) return;
    for (const { node } of plan.stages) {
      planned({ ...asked(model.id, 1, kvBits), exclude: node }).then(
        ({ best }) => setWithout((all) => ({ ...all, [node]: `it moves to ${best.stages.map((s) => named(nodes, s)).join(", ")}, about ${rate(1 / best.seconds_per_token)} tok/s` })),
        () => setWithout((all) => ({ ...all, [node]: "it does not fit any more" })),
      );
    }
  }, [model.id, ids, nodes.length, kvBits]);
  const onDisk = new Set(model.nodes ?? []);
  return html`
    <dl class="facts-grid">
      ${plan.stages.map((stage) => {
        const name = named(nodes, stage);
        return html`
          <dt key=${stage.node}>${name}</dt>
          <dd><span class="track" aria-hidden="true"><span style=${{ width: `${Math.min(100, (100 * stage.memory_bytes) / stage.memory_left_bytes)}%` }}></span></span>
            ${bytes(stage.memory_bytes)} of the ${bytes(stage.memory_left_bytes)} that are left of its memory;
            ${" "}${broughtTo(stage.node, plan) ?? (onDisk.has(name) ? "its files are on its disk" : "its files are fetched first")}${
            without[stage.node] ? `; if it leaves: ${without[stage.node]}` : ""}</dd>`;
      })}
      <dt>Context</dt><dd>${plan.context_length.toLocaleString("en")} tokens${plan.kv_bits ? `, in caches of ${plan.kv_bits} bits` : ""}</dd>
    </dl>`;
}

/** What has to be copied or downloaded for a node, and how long that takes where the link was measured. */
function broughtTo(node, { to_bring: all = [] }) {
  const one = all.find((each) => each.node === node);
  if (!one) return null;
  const time = Number.isFinite(one.seconds) ? `, about ${duration(one.seconds)}` : "";
  return one.from
    ? `up to ${bytes(one.bytes)} are copied from ${one.from}${time}`
    : `${bytes(one.bytes)} are downloaded${time || ", as fast as the hub gives them"}`;
}

function Spread({ nodes, minNodes, plan, split, onMinNodes, onSplit }) {
  const alive = nodes.filter(({ status }) => status === "alive").sort((a, b) => naturally(a.name, b.name));
  const layers = plan?.stages.at(-1).layers[1] ?? 0;
  const [counts, setCounts] = useState({});
  const sum = alive.reduce((all, { id }) => all + Number(counts[id] || 0), 0);
  const use = () => onSplit(alive.filter(({ id }) => Number(counts[id]) > 0).map(({ id }) => `${id}:${Number(counts[id])}`).join());
  return html`
    <div class="choices">
      <label>At least
        <select value=${minNodes} onChange=${({ target }) => onMinNodes(Number(target.value))}>
          ${alive.map((_, index) => html`<option key=${index} value=${index + 1}>${plural(index + 1, "node")}</option>`)}
        </select>
      </label>
      <p class="small muted">Or layers by hand, ${layers || "all"} in all; the order is the one below, the first computes the tokens.</p>
      <div class="split">
        ${alive.map(({ id, name }) => html`
          <label key=${id}>${name}
            <input type="number" min="0" max=${layers} value=${counts[id] ?? ""} placeholder="0"
              onInput=${({ target }) => setCounts({ ...counts, [id]: target.value })} />
          </label>`)}
      </div>
      <div class="line">
        <span class="small muted">${sum} of ${layers}</span>
        ${split && html`<button type="button" class="end" onClick=${() => onSplit(null)}>Back to the best</button>`}
        <button type="button" class=${split ? "" : "end"} disabled=${!layers || sum !== layers} onClick=${use}>Plan this split</button>
      </div>
    </div>`;
}
