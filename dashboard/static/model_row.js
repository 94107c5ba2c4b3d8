/** A model's row, wherever models are listed: its name, its one badge, and its figures in words. */

import { bytes, modelName, plural, rate, tone, whole } from "./format.js";
import { html } from "./vendor/htm-preact.module.js";

export function ModelName({ id }) {
  const { owner, name } = modelName(id);
  return html`<strong class="model-id">${owner && html`<span class="owner">${owner}/</span>`}${name}</strong>`;
}

/** The one thing to know at a glance: how it is loaded, or why it cannot be. */
export function Badge({ model, placement }) {
  if (placement) return html`<span class=${`state ${tone(placement.status)}`}>${placement.progress || placement.status}</span>`;
  if (model.fits?.nodes === 0) return html`<span class="badge">too large</span>`;
  const drafts = model.native_mtp?.drafter ? "has a drafter" : "drafts for itself";
  return model.native_mtp?.enabled && html`<span class="badge">${drafts}</span>`;
}

/** All that is known of a model in short, for its details. */
export function facts(model, nodes) {
  const where = model.nodes ?? [];
  return [
    bytes(model.size_bytes),
    model.format,
    fits(model),
    speed(model),
    ...abilities(model),
    Number.isFinite(model.context_length) && `${whole(model.context_length)} tokens of context`,
    nodes.length > 1 && where.length > 0 && `on ${where.length === nodes.length ? "every disk" : where.join(", ")}`,
  ].filter(Boolean);
}

/** Whether the model would run if no other one did. */
export function fits({ fits: fit }) {
  if (!fit) return "size not checked";
  if (fit.nodes === 0) return `does not fit: needs ${bytes(fit.needed_bytes)}`;
  const context = fit.shortened ? ` with ${whole(fit.context_length)} tokens of context` : "";
  return `fits ${fit.nodes === 1 ? "on one node" : `over ${plural(fit.nodes, "node")}`}${context}`;
}

export const speed = ({ fits: fit }) => fit?.tokens_per_second > 0 && `${fit.estimated === false ? "" : "estimated "}${rate(fit.tokens_per_second)} tok/s`;

const abilities = ({ capabilities = [] }) => ["tools", "thinking", "vision", "embeddings"].filter((name) => capabilities.includes(name));
