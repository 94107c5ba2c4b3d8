/** Numbers and states as a person reads them. */

const UNITS = ["B", "kB", "MB", "GB", "TB"];

/** `bytes(17179869184)` is "17 GB", decimal as in plans and on the hub; an absent number is a dash. */
export function bytes(count) {
  if (!Number.isFinite(count)) return "–";
  const step = count < 1 ? 0 : Math.min(Math.floor(Math.log10(count) / 3), UNITS.length - 1);
  const value = count / 1000 ** step;
  return `${value < 10 && step ? trimmed(value, 1) : Math.round(value)} ${UNITS[step]}`;
}

const trimmed = (value, digits) => String(Number(value.toFixed(digits)));

export const whole = (value) => (Number.isFinite(value) ? value.toLocaleString("en") : "–");

export const percent = (part, all) => (all > 0 ? `${Math.round((100 * part) / all)} %` : "–");

export const seconds = (value) =>
  !Number.isFinite(value) ? "–" : value < 1 ? `${Math.round(value * 1000)} ms` : `${trimmed(value, 2)} s`;

/** What takes long, in one unit or two: "40 s", "12 min", "3 h 20 min". */
export function duration(value) {
  if (value < 90) return `${Math.max(1, Math.round(value))} s`;
  const minutes = Math.round(value / 60);
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const rate = (value) => (Number.isFinite(value) ? trimmed(value, value < 100 ? 1 : 0) : "–");

/** The half-open range [a, b) as "layers 0-15" or "layer 3", as in a placement's reason. */
export function layerRange(range) {
  if (!range) return "–";
  const [first, last] = [Number(range[0]), Number(range[1]) - 1];
  return first < last ? `layers ${first}-${last}` : `layer ${first}`;
}

export const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;

/** The first `length` characters of an id. */
export const short = (id, length = 8) => String(id ?? "").slice(0, length);

const TONES = {
  alive: "good",
  ready: "good",
  loading: "busy",
  restoring: "busy",
  suspect: "warn",
  dead: "bad",
  failed: "bad",
};

/** The colour class of a state word; the word comes from a peer, so it never becomes a class. */
export const tone = (state) => (Object.hasOwn(TONES, state) ? TONES[state] : "idle");

let command = "exo-node";

/** Takes the command as it can be typed on the node's machine. */
export const setCommand = (typed) => (command = typed);

/** What messages begin with that is no name: of those many begin with a small letter. */
const PLAIN = /^(the|this|it|its|an?|no|none|nothing|nobody|not|there|their|they|another|one|only|some|each|all)(?= )/;
const PATH = /'?messages\[\d*\][\w.[\]]*'?/g;

/** A message as the page shows it: without paths into a request, its commands as they can be typed. */
export const sentence = (text) =>
  String(text)
    .replace(PATH, (path) => (path.includes("image") ? "the image" : "the message"))
    .replaceAll("`exo-node ", () => `\`${command} `)
    .replace(PLAIN, (word) => word[0].toUpperCase() + word.slice(1));

/** Names in the order that people count: mac-2 before mac-10. */
export const naturally = new Intl.Collator("en", { numeric: true, sensitivity: "base" }).compare;

/** How long ago Unix `ms` was, for a list: "now", "5 min", "3 h", "12 Nov". */
export function ago(ms, now = Date.now()) {
  const minutes = Math.floor((now - ms) / 60000);
  if (minutes < 1) return "now";
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 24 * 60) return `${Math.floor(minutes / 60)} h`;
  return new Date(ms).toLocaleDateString("en", { day: "numeric", month: "short" });
}

const SETTINGS = {
  temperature: "temperature", top_p: "top P", top_k: "top K", min_p: "min P", max_tokens: "longest answer",
  seed: "seed", reasoning_effort: "thinking", priority: "priority", keep_alive: "stays loaded",
};

/** What a profile sets: "temperature 0.2, thinking low, a system message". */
export function profileWords({ system, num_draft_tokens: k, ...set }) {
  const words = Object.entries(set).map(([name, value]) =>
    Object.hasOwn(SETTINGS, name) ? `${SETTINGS[name]} ${value}` : name.replaceAll("_", " "));
  return [...words, k === 0 ? "no drafts" : k && `K ${k}`, system && "a system message"].filter(Boolean).join(", ") || "nothing but the name";
}

/** The owner and the name of a model id; the owner is empty where there is none. */
export function modelName(id) {
  const at = String(id).lastIndexOf("/");
  return { owner: id.slice(0, Math.max(0, at)), name: id.slice(at + 1) };
}
