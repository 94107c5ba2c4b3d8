/** How this node does over time, and what each hop between the nodes costs. */

import { call } from "./api.js";
import { Chart } from "./chart.js";
import { save } from "./conversations.js";
import { bytes, percent, rate, seconds, whole } from "./format.js";
import { asCsv, rows, useSamples } from "./measures.js";
import { nameOf, roster } from "./node.js";
import { html, useEffect, useState } from "./vendor/htm-preact.module.js";

const share = (part) => percent(part, 1);
const CHARTS = [
  { title: "Tokens per second", value: (row) => row.tokens_per_second, shown: rate },
  { title: "Time to first token", value: (row) => row.first_token_s, shown: seconds },
  { title: "Drafts accepted", value: (row) => row.acceptance, shown: share, most: 1, note: "of those proposed" },
  { title: "Drafts a step (K)", value: (row) => row.mean_k, shown: rate, note: "mean" },
  { title: "Requests running", value: (row) => row.running, shown: whole },
  { title: "Requests waiting", value: (row) => row.waiting, shown: whole },
  { title: "Steps shared", value: (row) => row.shared, shown: share, most: 1, note: "tokens whose step several requests shared" },
  { title: "Prefix cache", value: (row) => row.prefix_hits, shown: share, most: 1, note: "of the prompts' tokens" },
  { title: "Memory of models here", value: (row) => row.memory_bytes, shown: bytes },
];

export function Place({ data, state }) {
  const { samples, error } = useSamples();
  const name = `exo-node-${new Date().toISOString().slice(0, 19).replaceAll(":", "")}`;
  const nothing = samples.length === 0;
  return html`
    <div class="place">
      <div class="line">
        <p class="muted">Requests that came to this node, since this page was opened; every two seconds while you look, or an answer of this page is written.</p>
        <button class="end" disabled=${nothing} onClick=${() => save(`${name}.csv`, asCsv(samples))}>CSV</button>
        <button disabled=${nothing} onClick=${() => save(`${name}.json`, JSON.stringify(rows(samples), null, 2))}>JSON</button>
      </div>
      ${error && html`<p class="notice bad" role="alert">${error}</p>`}
      <${Answered} changes=${samples.at(-1)?.raw["vllm:request_success_total"]} />
      ${samples.some(hasRequests)
        ? html`<div class="charts">
            ${CHARTS.map((chart) => html`<${Chart} key=${chart.title} samples=${samples} ...${chart} />`)}
          </div>`
        : !nothing && html`<p class="muted">Charts are drawn here from the first request on.</p>`}
      <${Hops} nodes=${data.cluster?.nodes ?? []} changes=${state.events.length} />
    </div>`;
}

const hasRequests = ({ raw, running, waiting }) => running > 0 || waiting > 0 || raw["vllm:generation_tokens_total"] > 0;

/** Totals by model, asked for whenever another request has ended. */
function Answered({ changes }) {
  const [models, setModels] = useState({});
  useEffect(() => {
    call("GET", "/v1/mtp/stats").then((told) => setModels(told.models ?? {}), () => {});
  }, [changes]);
  const names = Object.keys(models).sort();
  if (names.length === 0) return null;
  return html`
    <section aria-labelledby="answered-title">
      <h2 id="answered-title">Since the node started</h2>
      <div class="scroll" tabindex="0" role="region" aria-label="Totals by model">
        <table>
          <thead><tr><th>Model</th><th>Answers</th><th>Tokens</th><th>Accepted</th><th>of the output</th><th>From the prefix cache</th></tr></thead>
          <tbody>
            ${names.map((name) => {
              const one = models[name];
              return html`
                <tr key=${name}><th scope="row">${name}</th><td>${whole(one.requests)}</td><td>${whole(one.completion_tokens)}</td>
                  <td>${percent(one.accepted_draft_tokens, one.proposed_draft_tokens)}</td>
                  <td>${percent(one.accepted_draft_tokens, one.completion_tokens)}</td>
                  <td>${percent(one.cached_tokens, one.prompt_tokens)}</td></tr>`;
            })}
          </tbody>
        </table>
      </div>
    </section>`;
}

function Hops({ nodes, changes }) {
  const [links, setLinks] = useState([]);
  useEffect(() => {
    call("GET", "/v1/cluster/profile").then((profile) => setLinks(profile.links), () => {});
  }, [changes]);
  const known = roster(nodes);
  const used = links.filter(({ chosen }) => chosen);
  if (used.length === 0) return null;
  return html`
    <section aria-labelledby="hops-title">
      <h2 id="hops-title">Hops between nodes</h2>
      <div class="scroll" tabindex="0" role="region" aria-label="Measured links">
        <table>
          <thead><tr><th>Between</th><th>Round trip</th><th>Least</th><th>Bandwidth</th><th>Measured</th></tr></thead>
          <tbody>
            ${used.map(({ nodes: [a, b], round_trip_s: trip, round_trip_min_s: least, bandwidth, age_s: age }) => html`
              <tr key=${`${a}${b}`}><th scope="row">${nameOf(known, a)} – ${nameOf(known, b)}</th>
                <td>${(trip * 1000).toFixed(2)} ms</td><td>${(least * 1000).toFixed(2)} ms</td>
                <td>${bytes(bandwidth)}/s</td><td>${whole(Math.round(age))} s ago</td></tr>`)}
          </tbody>
        </table>
      </div>
    </section>`;
}
