/** Formulas drawn as MathML by a worker: the library is fetched with the first, and no formula holds the page. */

const PATIENCE_MS = 2000;
/** After as many that took too long, no more are drawn on this page. */
const MOST_FAILURES = 4;

/** MathML by formula: "" where it cannot be drawn, null while it is being drawn. */
const drawings = new Map();
const queue = [];
let worker = null;
let timer = 0;
let failures = 0;

/**
 * The MathML of `tex`, "" where its source is to be shown, null where `onDrawn` will be called.
 * It is not safe to show unless it has been sanitised.
 */
export function drawing(tex, display, onDrawn) {
  const name = `${display}\0${tex}`;
  const drawn = drawings.get(name);
  if (drawn !== undefined) return drawn;
  if (failures >= MOST_FAILURES) return "";
  drawings.set(name, null);
  queue.push({ name, tex, display, onDrawn });
  if (!worker) start();
  else if (worker.ready) draw(queue.at(-1));
  return null;
}

function start() {
  const own = new Worker(new URL("./formula_worker.js", import.meta.url));
  worker = own;
  own.onmessage = ({ data }) => (own.ready ? settle(data) : begin(own));
  own.onerror = () => abandon(own);
}

function begin(own) {
  own.ready = true;
  for (const formula of queue) draw(formula);
}

function draw({ tex, display }) {
  worker.postMessage({ tex, display });
  timer ||= setTimeout(restart, PATIENCE_MS);
}

/** Formulas are drawn in order: this one was asked for first. */
function settle(drawn) {
  const { name, onDrawn } = queue.shift();
  clearTimeout(timer);
  timer = queue.length > 0 ? setTimeout(restart, PATIENCE_MS) : 0;
  drawings.set(name, drawn);
  onDrawn();
}

/** The first formula in the queue takes too long: its source stays, and the others are drawn anew. */
function restart() {
  worker.terminate();
  worker = null;
  failures += 1;
  settle("");
  clearTimeout(timer);
  timer = 0;
  if (failures >= MOST_FAILURES) while (queue.length > 0) settle("");
  else if (queue.length > 0) start();
}

/** The worker cannot be fetched. A later formula tries again. */
function abandon(own) {
  if (worker !== own) return;
  clearTimeout(timer);
  timer = 0;
  worker = null;
  for (const { name } of queue.splice(0)) drawings.delete(name);
}
