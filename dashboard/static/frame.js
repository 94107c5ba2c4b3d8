/** The frame: side bar (a bar below on a phone), conversations, and the header over each place. */

import { Conversations } from "./conversations.js";
import { rate } from "./format.js";
import { atHand, copiesOf, modelOf, whereLoaded } from "./node.js";
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.module.js";

const PLACES = [
  ["chat", "Chat", "M4 5.5h12v8H9l-3.5 3v-3H4z"],
  ["cluster", "Cluster", "M10 3.2v3.6M5.6 12.4l2.6-1.8M14.4 12.4l-2.6-1.8M10 6.8a2.4 2.4 0 1 0 .01 0M4 13.8a1.9 1.9 0 1 0 .01 0M16 13.8a1.9 1.9 0 1 0 .01 0"],
  ["models", "Models", "M10 3l6.5 3.4L10 9.8 3.5 6.4zM3.5 10L10 13.4 16.5 10M3.5 13.6L10 17l6.5-3.4"],
  ["insight", "Insight", "M3.5 16.5h13M5 13.5l3-4 3 2.5 4-6.5"],
  ["connect", "Connect", "M7.5 3.5v4M12.5 3.5v4M5.5 7.5h9v2.2a4.5 4.5 0 0 1-9 0zM10 14.2v3"],
  ["settings", "Settings", "M4 6h7M14.5 6H16M4 14h1.5M9 14h7M12.7 4.2a1.8 1.8 0 1 0 .01 0M7.2 12.2a1.8 1.8 0 1 0 .01 0"],
];

const Icon = ({ path }) => html`
  <svg class="icon" viewBox="0 0 20 20" aria-hidden="true"><path d=${path} /></svg>`;

/** A verified token, and two drafts ahead of it. */
export const Mark = () => html`
  <svg class="mark" viewBox="0 0 34 16" aria-hidden="true">
    <circle cx="8" cy="8" r="7" /><circle cx="21" cy="8" r="4.6" /><circle cx="30.5" cy="8" r="2.8" />
  </svg>`;

export function SideBar({ place, talk, joining, locked }) {
  const [open, setOpen] = useState(false);
  const waiting = (joining?.data ?? []).length;
  return html`
    <aside class=${`side ${open ? "open" : ""}`}>
      <a class="brand" href="#/chat"><${Mark} /><span>exo-node</span></a>
      <nav aria-label="Places">
        ${PLACES.map(([id, name, path]) => html`
          <a key=${id} href=${`#/${id}`} aria-current=${place === id ? "page" : null}>
            <${Icon} path=${path} /><span>${name}</span>
            ${id === "cluster" && waiting > 0 && html`<span class="count" 
              aria-label=${`${waiting} asking to join`}>${waiting}</span>`}
          </a>`)}
      </nav>
      ${!locked && html`
        <button class="drawer-toggle quiet" aria-expanded=${open} aria-controls="conversations"
          onClick=${() => setOpen(!open)}>${open ? "Close" : "Conversations"}</button>
        <${Conversations} talk=${talk} place=${place} onChosen=${() => setOpen(false)} />`}
    </aside>`;
}

const TITLES = { cluster: "Cluster", models: "Models", insight: "Insight", connect: "Connect", settings: "Settings" };

/** What is answered by which model, where it runs and how fast the last answer was. */
export function Header({ place, state, talk }) {
  const { data, lost, locked } = state;
  const nodes = data.cluster?.nodes ?? [];
  const model = chosen(data.models?.data ?? [], talk.current.options.model);
  const copies = copiesOf(data.placements?.data, modelOf(model));
  const speed = lastSpeed(talk.current, model?.id);
  const alive = nodes.filter(({ status }) => status === "alive").length;
  const connection = lost ? ["bad", "Disconnected"] : locked ? ["bad", "Locked"] : data.cluster
    ? [alive < nodes.length ? "warn" : "good", nodes.length > 1 ? `${alive} of ${nodes.length} nodes` : "1 node"] : ["idle", "Connecting"];
  return html`
    <header>
      ${place === "chat"
        ? html`<h1 class="unseen">Chat</h1><${ModelPicker} data=${data} model=${model} talk=${talk} />`
        : html`<h1>${TITLES[place]}</h1>`}
      <p class="facts">
        ${place === "chat" && model && html`<span class="where">${whereLoaded(copies, nodes)}</span>`}
        ${place === "chat" && speed > 0 && html`<span title="The last answer's speed">
          <strong>${rate(speed)}</strong> tok/s</span>`}
        <a href="#/cluster" class=${`state ${connection[0]}`}>${connection[1]}</a>
      </p>
    </header>`;
}

export const chosen = (models, id) => models.find((model) => model.id === id) ?? atHand(models);

const lastSpeed = ({ messages }, model) =>
  messages.findLast((one) => one.model === model && one.stats)?.stats.generation_tps;

/** The chosen model; its list is fetched when it is first opened. */
function ModelPicker({ data, model, talk }) {
  const [open, setOpen] = useState(false);
  const [Picker, setPicker] = useState(null);
  const button = useRef(null);
  const box = useRef(null);
  useEffect(() => {
    if (open) import("./picker.js").then((part) => setPicker(() => part.Picker));
  }, [open]);
  const close = () => {
    box.current.hidePopover();
    button.current.focus();
  };
  const onBlur = ({ relatedTarget }) => {
    if (relatedTarget && !box.current.parentNode.contains(relatedTarget)) box.current.hidePopover();
  };
  return html`
    <div class="picker">
      <button ref=${button} disabled=${!data.models} popovertarget="picker" aria-haspopup="dialog">
        <span class="unseen">Model </span><span class="chosen">${model?.id ?? (data.models ? "Choose a model" : "…")}</span>
      </button>
      <div ref=${box} id="picker" popover="auto" role="dialog" aria-label="Choose a model" onfocusout=${onBlur}
        onToggle=${({ newState }) => setOpen(newState === "open")}>
        ${open && Picker && html`<${Picker} models=${data.models?.data ?? []} placements=${data.placements?.data}
          nodes=${data.cluster?.nodes ?? []} chosen=${model?.id} onClose=${close}
          onPick=${(id) => talk.setOptions({ ...talk.current.options, model: id })} />`}
      </div>
    </div>`;
}
