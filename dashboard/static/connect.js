/** How other programs talk to this node: recipes with its address, key and model filled in. */

import { apiKey } from "./api.js";
import { copy } from "./clipboard.js";
import { chosen } from "./frame.js";
import { html, useState } from "./vendor/htm-preact.module.js";

const HIDDEN = "••••••••";

/** As docs/clients.md has them; `tested` names what the project's tests run against a node. */
const RECIPES = [
  {
    name: "curl",
    text: ({ base, key, model }) => `curl ${base}/v1/chat/completions -H 'Content-Type: application/json' \\
  -H 'Authorization: Bearer ${key}' \\
  -d '{"model": "${model}", "messages": [{"role": "user", "content": "Who are you?"}]}'`,
  },
  {
    name: "openai (Python)", tested: true,
    text: ({ base, key, model }) => `from openai import OpenAI

client = OpenAI(base_url="${base}/v1", api_key="${key}")
for chunk in client.chat.completions.create(
    model="${model}", messages=[{"role": "user", "content": "Who are you?"}], stream=True
):
    print(chunk.choices[0].delta.content or "", end="")`,
  },
  {
    name: "anthropic (Python)", tested: true,
    text: ({ base, key, model }) => `from anthropic import Anthropic

client = Anthropic(base_url="${base}", api_key="${key}")
print(client.messages.create(
    model="${model}", max_tokens=100, messages=[{"role": "user", "content": "Who are you?"}]
).content)`,
  },
  {
    name: "ollama (Python)", tested: true,
    text: ({ base, key, model, given }) => `from ollama import Client

client = Client(host="${base}"${given ? `, headers={"Authorization": "Bearer ${key}"}` : ""})
print(client.chat(
    model="${model}", messages=[{"role": "user", "content": "Who are you?"}]
).message.content)`,
  },
  {
    name: "Claude Code",
    text: ({ base, key, model }) => `ANTHROPIC_BASE_URL=${base} ANTHROPIC_AUTH_TOKEN=${key} \\
ANTHROPIC_MODEL=${model} ANTHROPIC_SMALL_FAST_MODEL=${model} claude`,
  },
  {
    name: "Codex", where: "~/.codex/config.toml",
    text: ({ base, model, given }) => `model = "${model}"
model_provider = "exo"

[model_providers.exo]
name = "exo-node"
base_url = "${base}/v1"
wire_api = "responses"${given ? '\nenv_key = "EXO_API_KEY"' : ""}`,
  },
  {
    name: "aider",
    text: ({ base, key, model }) => `OPENAI_API_BASE=${base}/v1 OPENAI_API_KEY=${key} aider --model openai/${model}`,
  },
  {
    name: "opencode, Cline, Continue, llm", note: "Choose the provider for OpenAI-compatible servers.",
    text: ({ base, key, model }) => `Base URL  ${base}/v1\nAPI key   ${key}\nModel     ${model}`,
  },
  {
    name: "Open WebUI, and anything in Docker",
    note: "A container reaches the node by another name, which the node has to be told. On Linux the container needs --add-host=host.docker.internal:host-gateway.",
    text: ({ key }) => `EXO_ALLOWED_HOSTS=host.docker.internal exo-node start

Base URL  http://host.docker.internal:${location.port || 80}/v1
API key   ${key}`,
  },
];

export function Place({ data, talk }) {
  const models = data.models?.data ?? [];
  const [wanted, setWanted] = useState("");
  const [shown, setShown] = useState(false);
  const model = (models.find(({ id }) => id === wanted) ?? chosen(models, talk.current.options.model))?.id ?? "demo";
  const given = apiKey() !== "";
  const facts = { base: location.origin, model, key: given ? apiKey() : "any", given };
  const masked = { ...facts, key: given && !shown ? HIDDEN : facts.key };
  return html`
    <div class="place">
      <p class="muted">This node speaks OpenAI's, Anthropic's and Ollama's dialects. ${" "}
        ${given ? "It asks for its API key or a token." : html`Any key will do unless it was given one: then take that, or make a token with <code>exo-node token create</code>.`}</p>
      <div class="line wrap">
        <label>Model
          <select value=${model} onChange=${({ target }) => setWanted(target.value)}>
            ${models.map(({ id }) => html`<option key=${id} value=${id}>${id}</option>`)}
          </select>
        </label>
        ${given && html`<button aria-pressed=${shown} onClick=${() => setShown(!shown)}>${shown ? "Hide the key" : "Show the key"}</button>`}
      </div>
      <div class="recipes">
        ${RECIPES.map((recipe) => html`<${Recipe} key=${recipe.name} recipe=${recipe} text=${recipe.text(masked)} whole=${recipe.text(facts)} />`)}
      </div>
      <p class="muted small">The packages marked “tested” run against a node in exo-node's own tests; the other tools were not run.
        What the API does and refuses is in docs/api.md, what goes wrong with clients in docs/clients.md.</p>
    </div>`;
}

function Recipe({ recipe, text, whole }) {
  const [done, setDone] = useState("");
  async function onClick() {
    setDone((await copy(whole)) ? "Copied" : "Not allowed");
    setTimeout(() => setDone(""), 1500);
  }
  return html`
    <section class="recipe" aria-label=${recipe.name}>
      <div class="line">
        <h2>${recipe.name}</h2>
        ${recipe.tested && html`<span class="badge">tested</span>`}
        ${recipe.where && html`<code class="muted small">${recipe.where}</code>`}
        <button class="quiet end" aria-label=${`Copy the recipe for ${recipe.name}`} onClick=${onClick}>${done || "Copy"}</button>
      </div>
      ${recipe.note && html`<p class="muted small">${recipe.note}</p>`}
      <pre tabindex="0">${text}</pre>
    </section>`;
}
