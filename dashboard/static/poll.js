/** What the node says about itself, asked every two seconds while the page is visible. */

import { call } from "./api.js";
import { useEffect, useRef, useState } from "./vendor/htm-preact.module.js";

const EVERY_MS = 2000;
const PATIENCE_MS = 5000;
const PATHS = {
  cluster: "/v1/cluster",
  models: "/v1/models",
  placements: "/v1/placements",
  settings: "/v1/settings",
  joining: "/v1/join/requests",
};

const NOTHING = { data: {}, errors: {}, lost: false, locked: false };

/**
 * The last known state and `refresh`, which asks at once. `data` keeps what was last heard and
 * `errors` the latest refusals, both by the names in PATHS; `lost`: nobody answers, said once for
 * all of them; `locked`: the node wants another API key, and polling waits for `refresh`.
 */
export function useNode() {
  const [state, setState] = useState(NOTHING);
  const refresh = useRef(() => {});
  useEffect(() => {
    const polling = poll((answers) => setState((before) => merged(before, answers)));
    refresh.current = polling.now;
    return polling.stop;
  }, []);
  return [state, () => refresh.current()];
}

function poll(heard) {
  let timer = 0;
  let round = null;
  let nextRound = null;
  let stopped = false;

  /** Settles when a round that began after the call has been heard. */
  function now() {
    clearTimeout(timer);
    if (stopped || document.hidden) return Promise.resolve();
    if (round) {
      nextRound ??= round.then(() => {
        nextRound = null;
        return now();
      });
      return nextRound;
    }
    round = ask().finally(() => {
      round = null;
    });
    return round;
  }

  async function ask() {
    const answers = await askAll();
    if (stopped) return;
    heard(answers);
    if (!isLocked(answers)) timer = setTimeout(now, EVERY_MS);
  }

  function stop() {
    stopped = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", now);
  }

  document.addEventListener("visibilitychange", now);
  now();
  return { now, stop };
}

async function askAll() {
  const names = Object.keys(PATHS);
  const signal = AbortSignal.timeout(PATIENCE_MS);
  const results = await Promise.allSettled(names.map((name) => call("GET", PATHS[name], { signal })));
  return Object.fromEntries(names.map((name, index) => [name, results[index]]));
}

const isLocked = (answers) => Object.values(answers).some(({ reason }) => reason?.status === 401);
const isLost = (answers) => Object.values(answers).every(({ reason }) => reason?.status === 0);

function merged(before, answers) {
  const data = {};
  const errors = {};
  for (const [name, { value, reason }] of Object.entries(answers)) {
    data[name] = reason ? before.data[name] : value;
    if (reason) errors[name] = reason;
  }
  const lost = isLost(answers);
  const after = { data, errors: lost ? {} : errors, lost, locked: isLocked(answers) };
  return said(after) === said(before) ? before : after;
}

/** A comparable form: an unchanged answer must not redraw the page. */
function said({ data, errors, lost, locked }) {
  const messages = Object.entries(errors).map(([name, error]) => [name, error.message]);
  return JSON.stringify([data, messages, lost, locked]);
}
