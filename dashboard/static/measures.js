/** This node's figures over time, read from its Prometheus metrics while somebody looks at them. */

import { send } from "./api.js";
import { useEffect, useState } from "./vendor/htm-preact.module.js";

const EVERY_MS = 2000;
const KEPT = 450;
const LINE = /^([a-zA-Z_:][\w:]*)(?:\{([^}]*)\})? (\S+)/;
/** Of this page, oldest first: going elsewhere and back does not lose them. */
const samples = [];
const users = new Set();
let timer = 0;
/**
 * The samples so far, and one more every two seconds while they are looked at or an answer of this
 * page is written: nobody else and no hidden tab asks. Events do not tell of tokens, and an event for
 * each would cost every page more than this costs the one that is looked at.
 */
export function useSamples() {
  const [state, setState] = useState({ samples, error: "" });
  useEffect(() => sampling((error) => setState({ samples: samples.slice(), error })), []);
  return state;
}

/** Samples until `answer` settles, and once more: its figures are whole only then. */
export async function sampleDuring(answer) {
  const end = sampling(() => {});
  try {
    return await answer;
  } finally {
    taken().then(end);
  }
}

/** Calls `onSample` with what went wrong, or "", after each sample; returns what ends that. */
function sampling(onSample) {
  users.add(onSample);
  sample();
  return () => users.delete(onSample);
}

async function sample() {
  clearTimeout(timer);
  if (users.size === 0 || document.hidden) return; // its return begins anew
  const error = await taken();
  for (const user of users) user(error);
  clearTimeout(timer);
  timer = setTimeout(sample, EVERY_MS);
}

document.addEventListener("visibilitychange", sample);

async function taken() {
  try {
    const response = await send("GET", "/metrics", { signal: AbortSignal.timeout(5000) });
    samples.push(figures(parse(await response.text()), samples.at(-1)));
    samples.splice(0, Math.max(0, samples.length - KEPT));
    return "";
  } catch (error) {
    return error.message;
  }
}

/** Sums over all models by metric name, and by `position` and `k` where there are such labels. */
export function parse(text) {
  const sums = new Map();
  const add = (name, value) => sums.set(name, (sums.get(name) ?? 0) + value);
  for (const line of text.split("\n")) {
    const found = LINE.exec(line);
    const value = Number(found?.[3]);
    if (!found || !Number.isFinite(value)) continue;
    add(found[1], value);
    for (const [, label, index] of (found[2] ?? "").matchAll(/\b(position|k)="(\d+)"/g)) {
      add(`${found[1]}/${label}${index}`, value);
    }
  }
  return sums;
}

/** One row: what `sums` says since the row before. Null where nothing happened to measure. */
function figures(sums, before) {
  const now = Date.now();
  const raw = Object.fromEntries(sums);
  const since = (name) => {
    const change = (raw[name] ?? 0) - (before?.raw[name] ?? raw[name] ?? 0);
    return change >= 0 ? change : (raw[name] ?? 0); // a counter that went back is another process's
  };
  const seconds = before ? (now - before.time) / 1000 : EVERY_MS / 1000;
  const ratio = (part, all) => (all > 0 ? part / all : null);
  const rounds = Object.keys(raw).filter((name) => name.startsWith("exo_node_draft_rounds_total/k"));
  const steps = rounds.reduce((sum, name) => sum + since(name), 0);
  const drafted = rounds.reduce((sum, name) => sum + since(name) * Number(name.split("/k")[1]), 0);
  const busy = raw["vllm:num_requests_running"] ?? 0;
  const tokens = since("vllm:generation_tokens_total");
  return {
    time: now,
    raw,
    tokens_per_second: busy > 0 || tokens > 0 ? tokens / seconds : 0,
    first_token_s: ratio(since("vllm:time_to_first_token_seconds_sum"), since("vllm:time_to_first_token_seconds_count")),
    acceptance: ratio(since("vllm:spec_decode_num_accepted_tokens_total"), since("vllm:spec_decode_num_draft_tokens_total")),
    mean_k: ratio(drafted, steps),
    running: busy,
    waiting: raw["vllm:num_requests_waiting"] ?? 0,
    shared: ratio(since("exo_node_batched_tokens_total"), tokens),
    prefix_hits: ratio(since("vllm:prefix_cache_hits_total"), since("vllm:prefix_cache_queries_total")),
    memory_bytes: ["weights", "cache", "prefix_cache"].reduce((sum, part) => sum + (raw[`exo_node_runner_${part}_bytes`] ?? 0), 0),
  };
}

/** The rows without the raw counters, for a file. */
export const rows = (all) => all.map(({ raw, ...row }) => ({ ...row, time: new Date(row.time).toISOString() }));

export function asCsv(all) {
  const table = rows(all);
  if (table.length === 0) return "";
  const names = Object.keys(table[0]);
  return [names.join(","), ...table.map((row) => names.map((name) => row[name] ?? "").join(","))].join("\n");
}
