/** The cluster drawn: nodes with their memory, measured links, and the way that tokens take. */

import { bytes, layerRange, plural } from "./format.js";
import { html, useEffect, useState } from "./vendor/htm-preact.module.js";

const HEIGHT = 54;
const MANY = 10;
const APART = 250;
const NARROW = "(max-width: 720px)";

export function Topology({ nodes, placements, links }) {
  const narrow = useMedia(NARROW);
  const { width, height, at } = layout(nodes.length, narrow);
  const places = new Map(nodes.map((node, index) => [node.id, at(index)]));
  const alive = new Map(nodes.filter(({ status }) => status !== "dead").map(({ id }) => [id, places.get(id)]));
  const hops = placements.flatMap((placement) => hopsOf(placement, alive, nodes));
  const drawn = links.filter(({ nodes: [a, b], chosen }) => chosen && alive.has(a) && alive.has(b));
  const few = nodes.length <= 4;
  return html`
    <figure class="topology">
      <svg viewBox=${`0 0 ${width} ${height}`} style=${{ maxWidth: `${width}px` }} role="img"
          aria-label=${described(nodes, placements)}>
        ${drawn.map((link) => html`<${Link} key=${link.nodes.join()} link=${link} places=${places} labelled=${few} />`)}
        ${hops.map((hop) => html`<${Hop} key=${hop.key} hop=${hop} />`)}
        ${!narrow && nodes.length > 8 && html`<${Sum} nodes=${nodes} x=${width / 2} y=${height / 2} />`}
        ${nodes.map((node) => html`
          <${Card} key=${node.id} node=${node} place=${places.get(node.id)} width=${nodes.length > MANY ? 124 : 144} />`)}
      </svg>
    </figure>`;
}

/** What all nodes have together, in the middle of the ring. */
function Sum({ nodes, x, y }) {
  const alive = nodes.filter(({ status }) => status === "alive");
  const all = alive.reduce((sum, node) => sum + (node.memory_bytes ?? 0), 0);
  return html`
    <text class="sum first" x=${x} y=${y - 4}>${bytes(all)} of memory</text>
    <text class="sum" x=${x} y=${y + 17}>${bytes(alive.reduce((sum, node) => sum + held(node), 0))} in use by models</text>`;
}

const held = (node) => (node.stages ?? []).reduce((sum, s) => sum + (s.weight_bytes ?? 0) + (s.cache_bytes ?? 0), 0);

function useMedia(query) {
  const [matches, setMatches] = useState(() => matchMedia(query).matches);
  useEffect(() => {
    const media = matchMedia(query);
    const onChange = () => setMatches(media.matches);
    media.addEventListener("change", onChange);
    return () => media.removeEventListener("change", onChange);
  }, [query]);
  return matches;
}

/** Where the card of each of `count` nodes has its middle. */
function layout(count, narrow) {
  if (narrow) {
    const rows = Math.ceil(count / 2);
    const at = (index) => ({ x: count === 1 ? 180 : index % 2 ? 272 : 88, y: 50 + Math.floor(index / 2) * 92 });
    return { width: 360, height: rows * 92 + 8, at };
  }
  if (count <= 4) {
    const at = (index) => ({ x: 480 + (index - (count - 1) / 2) * APART, y: 40 });
    return { width: 960, height: count > 2 ? 135 : 80, at };
  }
  const height = count <= 8 ? 300 : 440;
  const at = (index) => {
    const angle = (2 * Math.PI * index) / count - Math.PI / 2;
    return { x: 480 + 395 * Math.cos(angle), y: height / 2 + (height / 2 - 34) * Math.sin(angle) };
  };
  return { width: 960, height, at };
}

/** From the node of each stage to the next one, and from the last back to the generator's. */
function hopsOf({ id, stages, status }, places, nodes) {
  const ring = stages.map(({ node }) => node).filter((node, index, all) => node !== all[index - 1]);
  if (ring.length > 2 && ring[0] === ring.at(-1)) ring.pop();
  if (ring.length < 2) return [];
  const live = ring.some((node) => requests(nodes.find((one) => one.id === node), id) > 0);
  return ring.flatMap((node, index) => {
    const [from, to] = [places.get(node), places.get(ring[(index + 1) % ring.length])];
    if (!from || !to || (ring.length === 2 && index === 1)) return [];
    return [{ key: `${id}/${index}`, from, to, live, ready: status === "ready" }];
  });
}

const requests = (node, placement) =>
  (node?.stages ?? []).find((stage) => stage.placement === placement)?.live_requests ?? 0;

function Hop({ hop: { from, to, live, ready } }) {
  const skips = from.y === to.y && Math.abs(from.x - to.x) > APART;
  const over = `Q${(from.x + to.x) / 2} ${from.y + 2 * HEIGHT} `;
  const path = `M${from.x} ${from.y}${skips ? over : "L"}${to.x} ${to.y}`;
  return html`<path class=${`hop ${ready ? "" : "pending"} ${live ? "live" : ""}`} d=${path} />`;
}

function Link({ link, places, labelled }) {
  const [from, to] = link.nodes.map((id) => places.get(id));
  const words = `${milliseconds(link.round_trip_s)}, ${bytes(link.bandwidth)}/s`;
  return html`
    <g class="link">
      <line x1=${from.x} y1=${from.y} x2=${to.x} y2=${to.y}><title>${words}</title></line>
      ${labelled && adjacent(from, to) && html`
        <text x=${(from.x + to.x) / 2} y=${(from.y + to.y) / 2 - 8}>${milliseconds(link.round_trip_s)}</text>
        <text x=${(from.x + to.x) / 2} y=${(from.y + to.y) / 2 + 16}>${bytes(link.bandwidth)}/s</text>`}
    </g>`;
}

const adjacent = (from, to) => Math.hypot(from.x - to.x, from.y - to.y) < 300 && Math.abs(from.x - to.x) > 200;
const milliseconds = (s) => (s >= 0.001 ? `${(s * 1000).toFixed(1)} ms` : `${Math.round(s * 1e6)} µs`);

function Card({ node, place: { x, y }, width }) {
  const used = held(node);
  const share = node.memory_bytes > 0 ? Math.min(1, used / node.memory_bytes) : 0;
  const layers = (node.stages ?? []).map((stage) => layerRange(stage.layers)).join(", ");
  const inner = width - 24;
  return html`
    <g class=${`card ${node.colour} ${node.status}`} transform=${`translate(${x - width / 2} ${y - HEIGHT / 2})`}>
      <title>${node.name}: ${node.status}, ${bytes(used)} of ${bytes(node.memory_bytes)} in use by models</title>
      <rect class="body" width=${width} height=${HEIGHT} rx="9" />
      ${node.head
        ? html`<path class="dot head" d="M9 22l-1.5 -7 3.5 3.3 3 -5.3 3 5.3 3.5 -3.3 -1.5 7z"><title>the head: it plans and holds placements</title></path>`
        : html`<circle class="dot" cx="15" cy="17" r="4.5" />`}
      <text class="name" x="26" y="21.5">${clipped(node.name, width > 130 ? 13 : 11)}</text>
      <text class="what" x="12" y="38">${clipped(layers || bytes(node.memory_bytes), width > 130 ? 21 : 18)}</text>
      <rect class="room" x="12" y="44.5" width=${inner} height="3" rx="1.5" />
      <rect class="used" x="12" y="44.5" width=${share > 0 ? Math.max(3, inner * share) : 0} height="3" rx="1.5" />
    </g>`;
}

const clipped = (name, most) => (name.length > most ? `${name.slice(0, most - 1)}…` : name);

/** The drawing in words. */
function described(nodes, placements) {
  const alive = nodes.filter(({ status }) => status === "alive").length;
  const runs = placements.map(({ model, stages }) => `${model} runs on ${plural(stages.length, "node")}`);
  return [`${plural(nodes.length, "node")}, ${alive} alive`, ...runs].join("; ");
}
