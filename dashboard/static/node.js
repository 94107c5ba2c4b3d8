/** What the node says about itself: asked once, and again whenever its events say that it changed. */

import { call, send } from "./api.js";
import { lines } from "./stream.js";
import { useEffect, useRef, useState } from "./vendor/htm-preact.module.js";

const RETRY_MS = 2000;
const LOADING_MS = 1000;
const GATHER_MS = 150;
const PATIENCE_MS = 5000;
const KEPT_EVENTS = 300;
const PATHS = {
  cluster: "/v1/cluster",
  models: "/v1/models",
  placements: "/v1/placements",
  joining: "/v1/join/requests",
};

const NOTHING = { data: {}, errors: {}, events: [], lost: false, locked: false };

/**
 * The last known state and `refresh`, which asks at once. `data` keeps what was last heard and
 * `errors` the latest refusals, both by the names in PATHS; `events` the cluster's, oldest first;
 * `lost`: nobody answers; `locked`: the node wants another API key, and asking waits for `refresh`.
 */
export function useNode() {
  const [state, setState] = useState(NOTHING);
  const watch = useRef(null);
  useEffect(() => {
    watch.current = new Watch((change) => setState((before) => changed(before, change)));
    return () => watch.current.close();
  }, []);
  return [state, () => watch.current?.refresh()];
}

/**
 * Follows `/v1/events` while the page is visible (a browser has six connections to a host for all
 * its tabs) and asks for the state when the stream begins and after each event. Only while a model
 * loads, which has no events of its own, or while the stream cannot be had, it asks by the clock.
 */
class Watch {
  #tell;
  #timer = 0;
  #round = null;
  #again = false;
  #following = null;
  #past = 0;
  #last = "";

  constructor(tell) {
    this.#tell = tell;
    this.seen = () => (document.hidden ? this.#pause() : this.#follow());
    document.addEventListener("visibilitychange", this.seen);
    this.seen();
  }

  close() {
    document.removeEventListener("visibilitychange", this.seen);
    this.#pause();
  }

  /** As after a change of the page's own, or with another key. */
  refresh() {
    return this.#following ? this.ask() : this.#follow();
  }

  /** Settles when a round that began after the call was heard. */
  async ask() {
    clearTimeout(this.#timer);
    if (document.hidden) return;
    this.#again = true;
    this.#round ??= this.#rounds().finally(() => (this.#round = null));
    await this.#round;
  }

  async #rounds() {
    while (this.#again) {
      this.#again = false;
      const answers = await askAll();
      const locked = Object.values(answers).some(({ reason }) => reason?.status === 401);
      const lost = Object.values(answers).every(({ reason }) => reason?.status === 0);
      this.#tell({ answers, locked, lost });
      if (locked) this.#pause();
      else if (!this.#following) this.#later(RETRY_MS);
      else if (isLoading(answers.placements.value)) this.#later(LOADING_MS);
    }
  }

  #later(ms) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => (this.#following ? this.ask() : this.#follow()), ms);
  }

  #pause() {
    clearTimeout(this.#timer);
    this.#following?.abort();
    this.#following = null;
  }

  /** Until the stream ends or the page is hidden. */
  async #follow() {
    if (this.#following) return;
    const abort = new AbortController();
    this.#following = abort;
    try {
      const from = this.#last ? `after=${encodeURIComponent(this.#last)}` : `limit=${KEPT_EVENTS}`;
      const response = await send("GET", `/v1/events?${from}`, { signal: abort.signal });
      for await (const line of lines(response)) this.#heard(line);
    } catch (error) {
      if (error.name === "AbortError") return;
    }
    if (this.#following !== abort) return;
    this.#following = null;
    await this.ask(); // which says whether the node is lost, and when to try again
  }

  #heard(line) {
    const past = /^: past events: (\d+)$/.exec(line);
    if (past) {
      this.#past = Number(past[1]);
      this.ask();
    }
    if (!line.startsWith("data:")) return;
    const event = JSON.parse(line.slice("data:".length));
    this.#last = event.id;
    this.#tell({ event });
    if (--this.#past < 0) this.#later(GATHER_MS);
  }
}

async function askAll() {
  const names = Object.keys(PATHS);
  const signal = AbortSignal.timeout(PATIENCE_MS);
  const results = await Promise.allSettled(names.map((name) => call("GET", PATHS[name], { signal })));
  return Object.fromEntries(names.map((name, index) => [name, results[index]]));
}

const isLoading = (placements) =>
  (placements?.data ?? []).some(({ status }) => status === "loading" || status === "restoring");

function changed(before, { answers, event, lost, locked }) {
  if (event) {
    if (before.events.some(({ id }) => id === event.id)) return before;
    return { ...before, events: [...before.events, event].slice(-KEPT_EVENTS) };
  }
  const data = {};
  const errors = {};
  for (const [name, { value, reason }] of Object.entries(answers)) {
    data[name] = reason ? before.data[name] : value;
    if (reason) errors[name] = reason;
  }
  const after = { ...before, data, errors: lost ? {} : errors, lost, locked };
  return said(after) === said(before) ? before : after;
}

/** A comparable form: an unchanged answer must not redraw the page. */
function said({ data, errors, lost, locked }) {
  const messages = Object.entries(errors).map(([name, error]) => [name, error.message]);
  return JSON.stringify([data, messages, lost, locked]);
}

/** What runs on a node. What a dead one said last of its stages is true no more. */
export const stagesOf = ({ status, stages }) => (status === "dead" ? [] : (stages ?? []));

/** Nodes by id with their colour, which follows the sorted ids so that every node's page agrees. */
export function roster(nodes) {
  const ids = nodes.map((node) => node.id).sort();
  const colour = ({ id }) => `node-${ids.indexOf(id) % COLOURS}`;
  return new Map(nodes.map((node) => [node.id, { ...node, stages: stagesOf(node), colour: colour(node) }]));
}

const COLOURS = 16;

/** A node's name; of a node that has left only its id is known. */
export const nameOf = (known, id) => known.get(id)?.name || id;

/** The names of a placement's nodes, each once. */
export const namesOf = (known, { stages }) => [...new Set(stages.map(({ node }) => nameOf(known, node)))];

/** Where the copies of a model are, as the header and the list of models say it. */
export function whereLoaded(copies, nodes) {
  const [placement] = copies;
  if (!placement) return "not loaded";
  const ready = copies.filter(({ status }) => status === "ready");
  if (ready.length > 1) return `${ready.length} copies`;
  if (placement.status !== "ready") return placement.progress || placement.status;
  const names = namesOf(roster(nodes), placement);
  return names.length > 3 ? `${names[0]} and ${names.length - 1} more` : names.join(" → ");
}

/** The model that an entry of the list answers with: a profile is another name for one. */
export const modelOf = (entry) => entry?.profile_of ?? entry?.id;

/** The placements of a model: several where it has copies, those that answer first. */
export function copiesOf(placements, model) {
  const copies = (placements ?? []).filter((placement) => placement.model === model);
  return copies.sort((a, b) => Number(b.status === "ready") - Number(a.status === "ready"));
}

/** A model to try things out with, such as the packaged one: too small to know anything. */
export const isToy = ({ parameters }) => parameters < 1e8;

export const isEmbedder = ({ capabilities }) => capabilities?.includes("embeddings");

const fitsHere = ({ fits }) => fits?.nodes > 0;

/** Whether it answers, or may: of a model that is on other disks alone, nobody has checked its size. */
const isUsable = (model) => !isEmbedder(model) && (model.loaded || (model.downloaded && model.fits?.nodes !== 0));

/** Whether a chat with the model would be answered. */
export const mayTalk = (model) => !model.error && isUsable(model);

/** The model of somebody who has not chosen: loaded, or on disk and fitting; else there is none. */
export function atHand(models) {
  const usable = models.filter(mayTalk);
  const fitting = usable.filter(fitsHere);
  return usable.find(({ loaded }) => loaded) ?? fitting.find((model) => !isToy(model)) ?? fitting[0] ?? usable[0];
}

/** The models that exo-node has cards of, the best for these nodes first; asked for once `wanted`. */
export function useCatalogue(wanted) {
  const [state, setState] = useState({ models: null, failure: "" });
  useEffect(() => {
    if (!wanted || state.models) return;
    call("GET", "/v1/models?catalog=1").then(
      ({ data }) => setState({ models: data.sort(byRank), failure: "" }),
      (error) => setState({ models: null, failure: error.message }),
    );
  }, [wanted]);
  return state;
}

const rank = ({ recommended, fits }) => recommended ?? (fits?.nodes > 0 ? 100 : 101);
const byRank = (a, b) => rank(a) - rank(b) || (a.size_bytes ?? 0) - (b.size_bytes ?? 0);

/** Whether this page may change anything: unknown until the node has answered. */
export const mayChange = ({ joining }) => joining?.may_decide !== false;

/** The id of the line that says why nothing can be changed. */
export const LOOKING = "looking";

/** The id of the line that says why no model can be fetched. */
export const OFFLINE = "offline";
