/** The list of models for a chat: found by typing, each with its size and whether it is loaded or fits. */

import { bytes, naturally } from "./format.js";
import { Badge, fits, ModelName, speed } from "./model_row.js";
import { copiesOf, isEmbedder, modelOf, whereLoaded } from "./node.js";
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.module.js";

const LIST = "picker-models";

/** `chosen`: the model now; `onClose` is called after a choice and for Escape. */
export function Picker({ models, placements, nodes, chosen, onPick, onClose }) {
  const [text, setText] = useState("");
  const [at, setAt] = useState(chosen);
  const field = useRef(null);
  const list = useRef(null);
  const rows = sorted(models).filter((model) => matches(model, text));
  const active = rows.find(({ id }) => id === at) ?? rows[0];
  const marked = active && optionId(active);
  // A phone's keyboard would cover the list before anybody wants to type.
  useEffect(() => (matchMedia("(pointer: fine)").matches ? field : list).current.focus(), []);
  useEffect(() => document.getElementById(marked)?.scrollIntoView({ block: "nearest" }), [marked]);

  const pick = (model) => {
    if (!model || isTooLarge(model)) return;
    onPick(model.id);
    onClose();
  };
  const move = (step) => setAt(rows[Math.max(0, Math.min(rows.length - 1, rows.indexOf(active) + step))]?.id);
  const keys = { ArrowDown: () => move(1), ArrowUp: () => move(-1), Enter: () => pick(active), Escape: onClose };
  const onKeyDown = (event) => {
    if (event.isComposing || event.target.matches("a") || !Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  };
  const option = (model) => html`
    <${Option} key=${model.id} model=${model} active=${model === active} chosen=${model.id === chosen}
      copies=${copiesOf(placements, modelOf(model))} nodes=${nodes} onPick=${() => pick(model)} />`;
  const profiles = rows.filter((model) => model.profile_of);
  return html`
    <div class="picker-box" onKeyDown=${onKeyDown}>
      <input ref=${field} type="search" role="combobox" aria-label="Search your models" aria-expanded="true" aria-controls=${LIST}
        aria-autocomplete="list" aria-activedescendant=${marked} spellcheck="false" placeholder="Search your models"
        onInput=${({ target }) => { setText(target.value); setAt(undefined); }} />
      <div ref=${list} id=${LIST} role="listbox" aria-label="Models" tabindex="0" aria-activedescendant=${marked} class="models">
        ${rows.filter((model) => !model.profile_of).map(option)}
        ${profiles.length > 0 && html`
          <div role="group" aria-label="Your profiles"><p class="muted small" aria-hidden="true">Your profiles</p>${profiles.map(option)}</div>`}
      </div>
      <p class="small muted foot">
        <span role="status">${rows.length > 0 ? "" : text ? "None of your models has that name. " : "No model is on a disk yet. "}</span>
        <a href="#/models" onClick=${onClose}>Get other models</a>
      </p>
    </div>`;
}

function Option({ model, active, chosen, copies, nodes, onPick }) {
  const state = copies.some(({ status }) => status === "ready") ? `loaded on ${whereLoaded(copies, nodes)}` : fits(model);
  return html`
    <div id=${optionId(model)} role="option" class=${`model ${active ? "active" : ""}`} aria-selected=${chosen}
        aria-disabled=${isTooLarge(model)} onClick=${onPick}>
      <p class="line"><${ModelName} id=${model.id} />
        ${(copies.length > 0 || isTooLarge(model)) && html`<${Badge} model=${model} placement=${copies[0]} />`}</p>
      <p class="muted small">${[model.profile_of, bytes(model.size_bytes), speed(model), state].filter(Boolean).join(" · ")}</p>
    </div>`;
}

const optionId = ({ id }) => `picker-${encodeURIComponent(id)}`;

const isTooLarge = ({ loaded, fits: fit }) => !loaded && fit?.nodes === 0;

const standing = (model) => (model.loaded ? 0 : isTooLarge(model) ? 2 : 1);
const usable = (model) => !model.error && !isEmbedder(model);

/** Models of their own before profiles, as they are shown. */
const sorted = (models) =>
  models.filter(usable).sort((a, b) =>
    Boolean(a.profile_of) - Boolean(b.profile_of) || standing(a) - standing(b) || naturally(a.id, b.id));

/** Whether the model's name has every word of `text`, in any order. */
const matches = ({ id, profile_of: of }, text) => {
  const name = `${id} ${of ?? ""}`.toLowerCase();
  return text.toLowerCase().split(/\s+/).every((word) => name.includes(word));
};
