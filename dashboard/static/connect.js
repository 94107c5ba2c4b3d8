/** How other programs talk to this node: docs/clients.md with its address, key and model filled in. */

import { apiKey, send } from "./api.js";
import { copy } from "./clipboard.js";
import { chosen } from "./frame.js";
import { renderBlocks } from "./markdown.js";
import { html, useEffect, useState } from "./vendor/htm-preact.module.js";

const HIDDEN = "••••••••";
const CONTEXT = 65536;
const LONGEST = 8192;
const FENCE = /^```\w*\n([\s\S]*?)\n```$/m;

export function Place({ data, talk }) {
  const models = data.models?.data ?? [];
  const [picked, setPicked] = useState("");
  const [shown, setShown] = useState(false);
  const { page, failure } = useClients();
  const model = models.find(({ id }) => id === picked) ?? chosen(models, talk.current.options.model);
  const given = apiKey() !== "";
  const command = data.cluster?.command ?? "exo-node";
  const facts = { command, model: model?.id ?? "demo", context: contextOf(model), key: apiKey() || "any" };
  const masked = { ...facts, key: given && !shown ? HIDDEN : facts.key };
  return html`
    <div class="place">
      <p class="muted">This node speaks OpenAI's, Anthropic's and Ollama's dialects. ${" "}
        ${given ? "It asks for its API key or a token." : html`Any key will do unless it was given one: then take that, or make a token with <code>${command} token create NAME</code>.`}</p>
      <div class="line wrap">
        <label>Model
          <select value=${facts.model} onChange=${({ target }) => setPicked(target.value)}>
            ${models.map(({ id }) => html`<option key=${id} value=${id}>${id}</option>`)}
          </select>
        </label>
        ${given && html`<button aria-pressed=${shown} onClick=${() => setShown(!shown)}>${shown ? "Hide the key" : "Show the key"}</button>`}
      </div>
      ${failure && html`<p class="notice bad" role="alert">${failure}</p>`}
      <div class="recipes">
        ${sections(page).map(({ name, pieces }) => html`
          <section key=${name} class="recipe" aria-label=${name}>
            <h2>${name}</h2>
            ${pieces.map((piece, index) => index % 2
              ? html`<${Code} key=${index} name=${name} text=${filled(piece, masked)} whole=${filled(piece, facts)} />`
              : piece.trim() && renderBlocks(piece.replaceAll("Qwen/Qwen3.6-27B", () => facts.model), new Map()).map((block, at) => html`
                  <div key=${`${index}/${at}`} class="prose small" dangerouslySetInnerHTML=${block}></div>`))}
          </section>`)}
      </div>
    </div>`;
}

function useClients() {
  const [state, setState] = useState({ page: "" });
  useEffect(() => {
    send("GET", "/static/clients.md")
      .then((response) => response.text())
      .then((page) => setState({ page }), (error) => setState({ page: "", failure: error.message }));
  }, []);
  return state;
}

/** [{name, pieces}]: text and code take turns in `pieces`, text first. */
const sections = (page) =>
  page.split(/^## /m).slice(1).map((section) => {
    const [name, ...lines] = section.split("\n");
    return { name, pieces: lines.join("\n").split(FENCE) };
  });

/** The context of a load: of a model in memory its own, else the one that would be planned. */
const contextOf = (model) =>
  (model?.loaded ? model.context_length : model?.fits?.context_length || model?.context_length) || CONTEXT;

/** A recipe with the document's examples replaced; a host name other than localhost stays. */
const filled = (code, { command, model, context, key }) =>
  code
    .replaceAll("http://localhost:52415", location.origin)
    .replaceAll("docker.internal:52415", `docker.internal:${location.port || 80}`)
    .replaceAll(/\bexo-node (?=launch|start)/g, () => `${command} `)
    .replaceAll("Qwen/Qwen3.6-27B", () => model)
    .replaceAll(String(CONTEXT), String(context))
    .replaceAll(String(LONGEST), String(Math.min(LONGEST, Math.floor(context / 4))))
    .replaceAll(/\bany\b/g, () => key);

function Code({ name, text, whole }) {
  const [done, setDone] = useState("");
  async function onClick() {
    setDone((await copy(whole)) ? "Copied" : "Not allowed");
    setTimeout(() => setDone(""), 1500);
  }
  return html`
    <div class="code">
      <pre tabindex="0">${text}</pre>
      <button class="quiet" aria-label=${`Copy the recipe for ${name}`} onClick=${onClick}>${done || "Copy"}</button>
    </div>`;
}
