/** How a conversation is answered: system prompt and sampling, with named presets. */

import { NUMBERS, toolsOf } from "./chat.js";
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.module.js";

const KEY = "exo-node.presets";
const FIELDS = ["system", "temperature", "topP", "topK", "minP", "maxTokens", "seed", "k", "effort", "tools"];
const EXAMPLE = `[{"type": "function", "function": {
  "name": "weather",
  "parameters": {"type": "object",
    "properties": {"city": {"type": "string"}}}}}]`;
/** Where the model's own value comes from. */
const SOURCES = {
  card: "the model's card",
  "generation_config.json": "the publisher's generation_config.json",
  default: "neither the publisher nor a card says otherwise",
};
const GIVEN = [
  { name: "The model's own", options: {} },
  { name: "Greedy", options: { temperature: "0" } },
  { name: "Lively", options: { temperature: "1", minP: "0.05" } },
];

export function Options({ options, drafts, model, onChange, onClose }) {
  const first = useRef(null);
  useEffect(() => first.current.focus(), []);
  const set = (name) => (event) => onChange({ [name]: event.target.value, preset: "" });
  const number = (name, label, attributes, otherwise = "the model's") => {
    const own = model?.profile?.[NUMBERS[name]];
    const { value, source } = model?.sampling?.[NUMBERS[name]] ?? {};
    return html`
      <label title=${own === undefined && source ? `${value}: ${SOURCES[source] ?? source}` : undefined}>${label}
        <input type="number" value=${options[name] ?? ""} placeholder=${own ?? value ?? otherwise} ...${attributes}
          onInput=${set(name)} />
      </label>`;
  };
  const onKeyDown = (event) => {
    if (event.key === "Escape") onClose();
  };
  return html`
    <aside class="options" aria-label="Options of this conversation" onKeyDown=${onKeyDown}>
      <div class="line">
        <h2>Options</h2>
        <button class="quiet end" aria-label="Close options" onClick=${onClose}>✕</button>
      </div>
      <${Presets} options=${options} onChange=${onChange} first=${first} />
      <label>System prompt
        <textarea rows="4" dir="auto" value=${options.system ?? ""} onInput=${set("system")}></textarea>
      </label>
      <div class="pairs">
        ${number("temperature", "Temperature", { min: 0, max: 2, step: 0.1 })}
        ${number("topP", "Top P", { min: 0, max: 1, step: 0.05 })}
        ${number("topK", "Top K", { min: 0, step: 1 })}
        ${number("minP", "Min P", { min: 0, max: 1, step: 0.01 })}
        ${number("maxTokens", "Longest answer", { min: 1, step: 1 }, "the context")}
        ${number("seed", "Seed", { min: 0, step: 1 }, "none")}
        <${Drafts} drafts=${drafts} k=${options.k ?? ""} own=${model?.profile?.num_draft_tokens} onPick=${set("k")} />
        <${Effort} model=${model} effort=${options.effort ?? ""} onPick=${set("effort")} />
      </div>
      ${drafts.reason && html`<p class="muted small">No drafts: ${drafts.reason}</p>`}
      <${Tools} text=${options.tools ?? ""} onInput=${set("tools")} />
      <label class="check">
        <input type="checkbox" checked=${options.tokens ?? false}
          onChange=${(event) => onChange({ tokens: event.target.checked })} />
        <span>Keep each token's origin <span class="muted small">for the view “Tokens” below an answer:
          model or accepted draft, and its probability</span></span>
      </label>
    </aside>`;
}

/** `own` is the K of a profile. */
function Drafts({ drafts: { maxK }, k, own, onPick }) {
  const choices = Array.from({ length: maxK ?? 0 }, (_, index) => index + 1);
  return html`
    <label>Drafts (K)
      <select value=${maxK ? k : ""} disabled=${!maxK} onChange=${onPick}>
        <option value="">${maxK ? own ?? "adaptive" : "off"}</option>
        ${maxK && html`<option value="0">none</option>`}
        ${choices.map((n) => html`<option key=${n} value=${n}>${n}</option>`)}
      </select>
    </label>`;
}

function Tools({ text, onInput }) {
  const { tools, fault } = toolsOf(text);
  return html`
    <details class="tools" open=${text !== ""}>
      <summary>Tools${tools ? `: ${tools.map((tool) => tool.function.name).join(", ")}` : ""}</summary>
      <textarea rows="6" class="code" aria-label="Tools" spellcheck="false" value=${text} placeholder=${EXAMPLE} onInput=${onInput}></textarea>
      ${fault && html`<p class="notice bad small" role="alert">${fault}</p>`}
      <p class="muted small">What the model may call, as in OpenAI's API. A call is shown with a field for its result.</p>
    </details>`;
}

/** Models that cannot switch their thinking refuse the field, so it is sent only where it is set. */
function Effort({ model, effort, onPick }) {
  return html`
    <label>Thinking
      <select value=${effort} onChange=${onPick}>
        <option value="">${model?.profile?.reasoning_effort ?? "the model's"}</option>
        <option value="none">off</option>
        <option value="low">low</option>
        <option value="medium">medium</option>
        <option value="high">high</option>
      </select>
    </label>`;
}

function Presets({ options, onChange, first }) {
  const [own, setOwn] = useState(read);
  const [name, setName] = useState("");
  const all = [...GIVEN, ...own];
  const apply = ({ target }) => {
    const found = all.find((preset) => preset.name === target.value);
    if (!found) return;
    const cleared = Object.fromEntries(FIELDS.map((field) => [field, ""]));
    onChange({ ...cleared, ...found.options, preset: found === GIVEN[0] ? "" : found.name });
  };
  const keep = (changed) => {
    localStorage.setItem(KEY, JSON.stringify(changed));
    setOwn(changed);
  };
  const add = () => {
    const kept = Object.fromEntries(FIELDS.filter((field) => options[field]).map((field) => [field, options[field]]));
    keep([...own.filter((preset) => preset.name !== name.trim()), { name: name.trim(), options: kept }]);
    onChange({ preset: name.trim() });
    setName("");
  };
  const isOwn = own.some((preset) => preset.name === options.preset);
  return html`
    <label>Preset
      <select ref=${first} value=${options.preset || ""} onChange=${apply}>
        <option value="">${FIELDS.some((field) => options[field]) ? "none" : GIVEN[0].name}</option>
        ${all.map((preset) => html`<option key=${preset.name} value=${preset.name}>${preset.name}</option>`)}
      </select>
    </label>
    <div class="line">
      <input aria-label="Name for a new preset" maxlength="40" placeholder="Keep these as…" value=${name}
        onInput=${(event) => setName(event.target.value)} />
      <button disabled=${!name.trim() || GIVEN.some((preset) => preset.name === name.trim())} onClick=${add}>Keep</button>
      ${isOwn && html`<button onClick=${() => { keep(own.filter((preset) => preset.name !== options.preset)); onChange({ preset: "" }); }}>Forget</button>`}
    </div>`;
}

/** What an older page kept in another form is not taken. */
function read() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(kept) ? kept.filter(({ name, options }) => typeof name === "string" && options) : [];
  } catch {
    return [];
  }
}
