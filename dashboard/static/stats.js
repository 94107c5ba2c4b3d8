/** The final numbers of an answer. */

import { bytes, layerRange, percent, rate, seconds, whole } from "./format.js";
import { nameOf } from "./node.js";
import { html } from "./vendor/htm-preact.module.js";

const DRAFTERS = { native_mtp: "native MTP", block_drafter: "block drafter", prompt_lookup: "prompt lookup" };

/** Positions that are shown: as many as a head drafts at most. Copies are longer. */
const SHOWN_POSITIONS = 8;

export function Stats({ stats, usage, known }) {
  const none = stats.drafter_kind === "none";
  const proposed = stats.proposed_draft_tokens;
  const accepted = stats.accepted_draft_tokens;
  return html`
    <div class="stats">
      <dl>
        <${Fact} name="Drafter" value=${DRAFTERS[stats.drafter_kind] ?? "none"} />
        ${stats.num_draft_tokens > 0 && html`<${Fact} name="K" value=${`up to ${stats.num_draft_tokens}, ${stats.draft_policy}`} />`}
        ${!none && html`<${Fact} name="Accepted"
          value=${`${percent(accepted, proposed)} (${whole(accepted)} of ${whole(proposed)}), rule ${stats.acceptance_rule}`} />`}
        ${stats.lookup_rounds > 0 && html`<${Fact} name="Copied drafts"
          value=${`${whole(stats.lookup_accepted_tokens)} of ${whole(stats.lookup_proposed_tokens)} accepted`} />`}
        <${Fact} name="Speed" value=${`${rate(stats.generation_tps)} tokens/s; prompt ${rate(stats.prompt_tps)}`} />
        ${stats.load_s > 0 && html`<${Fact} name="Load" value=${seconds(stats.load_s)} />`}
        <${Fact} name="First token" value=${seconds(stats.time_to_first_token_s)} />
        ${usage && html`<${Fact} name="Tokens"
          value=${`${whole(usage.prompt_tokens)} in, ${whole(usage.completion_tokens)} out`} />`}
        ${stats.cached_tokens > 0 && html`<${Fact} name="Cached" value=${cached(stats, usage)} />`}
        ${stats.read_by?.length > 0 && html`<${Fact} name="Read" value=${stats.read_reason} />`}
        ${stats.placement && html`<${Fact} name="Ran on" value=${where(stats.placement, known)} />`}
        ${stats.placement?.reason && html`<${Fact} name="Why there" value=${stats.placement.reason} />`}
        <${Fact} name="Peak memory" value=${bytes(stats.peak_memory_bytes)} />
        ${stats.batch_size > 1 && html`<${Fact} name="Shared" value=${`${rate(stats.batch_size)} requests a step`} />`}
        ${stats.resumes > 0 && html`<${Fact} name="Resumed"
          value=${`${stats.resumes}×, ${stats.resume_exact ? "exact" : "not exact"}`} />`}
      </dl>
      ${stats.loop_reason && html`<p class="muted small">Ended: ${stats.loop_reason}</p>`}
      ${none && stats.drafting_reason && html`<p class="muted small">No drafts: ${stats.drafting_reason}</p>`}
      ${!none && html`<${Positions} stats=${stats} />`}
      ${!none && stats.depth_reason && html`<p class="muted small">Last round: ${stats.depth_reason}</p>`}
    </div>`;
}

const Fact = ({ name, value }) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`;

const TIERS = { memory: "memory", disk: "disk", peer: "another copy" };

/** How much of the prompt was not read again: "8,012 of 8,100 prompt tokens from disk". */
export function cached({ cached_tokens: count, cached_tier: tier }, usage) {
  const all = usage ? ` of ${whole(usage.prompt_tokens)}` : "";
  return `${whole(count)}${all} prompt tokens${Object.hasOwn(TIERS, tier ?? "") ? ` from ${TIERS[tier]}` : ""}`;
}

const where = ({ stages }, known) =>
  stages.map(({ node, layers }) => `${nameOf(known, node)} ${layerRange(layers)}`).join(", ");

/** How often the draft at each position was accepted, of the rounds that drafted so far. */
export function Positions({ stats }) {
  const rounds = stats.draft_k_histogram ?? [];
  const counts = stats.accepted_per_position ?? [];
  const drafted = (index) => rounds.slice(index + 1).reduce((sum, count) => sum + count, 0);
  if (!drafted(0)) return null;
  return html`
    <ul class="positions" aria-label="Accepted drafts by position">
      ${counts.slice(0, SHOWN_POSITIONS).map((count, index) => drafted(index) > 0 && html`
        <li key=${index} title=${`${whole(count)} of ${whole(drafted(index))} rounds`}>
          <span>draft ${index + 1}</span>
          <span class="track" aria-hidden="true">
            <span style=${{ width: `${(100 * count) / drafted(index)}%` }}></span>
          </span>
          <span>${percent(count, drafted(index))}</span>
        </li>`)}
    </ul>`;
}
