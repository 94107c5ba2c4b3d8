/** A small line chart of one figure over time. */

import { html } from "./vendor/htm-preact.module.js";

const [WIDTH, HEIGHT, SPAN_MS] = [300, 72, 5 * 60 * 1000];

/** `value(row)` null is a gap; `most`, if given, is the top of the scale. */
export function Chart({ title, samples, value, shown, most, note }) {
  const end = samples.at(-1)?.time ?? Date.now();
  const points = samples.filter(({ time }) => end - time <= SPAN_MS).map((row) => ({ time: row.time, y: value(row) }));
  const last = points.findLast(({ y }) => y !== null)?.y ?? null;
  const top = most ?? Math.max(1e-9, ...points.map(({ y }) => y ?? 0));
  const place = ({ time, y }) =>
    `${(WIDTH - ((end - time) / SPAN_MS) * WIDTH).toFixed(1)} ${(HEIGHT - 3 - (Math.min(y, top) / top) * (HEIGHT - 10)).toFixed(1)}`;
  return html`
    <figure class="chart">
      <figcaption><span>${title}</span><strong>${last === null ? "–" : shown(last)}</strong></figcaption>
      <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img"
          aria-label=${`${title}, the last five minutes; now ${last === null ? "nothing measured" : shown(last)}`}>
        <line x1="0" y1=${HEIGHT - 2} x2=${WIDTH} y2=${HEIGHT - 2} />
        ${runs(points).map((run) => html`<path d=${`M${run.map(place).join("L")}`} />`)}
        ${runs(points).filter((run) => run.length === 1).map((run) => {
          const [x, y] = place(run[0]).split(" ");
          return html`<circle cx=${x} cy=${y} r="1.8" />`;
        })}
      </svg>
      <p class="muted small">${note ?? (top > 1e-9 ? `top ${shown(top)}` : "nothing yet")}</p>
    </figure>`;
}

/** Points without a gap between them; a lone value is joined to the next within half a minute. */
function runs(points) {
  const found = [];
  for (const point of points.filter(({ y }) => y !== null)) {
    const run = found.at(-1);
    if (run && point.time - run.at(-1).time < 30_000) run.push(point);
    else found.push([point]);
  }
  return found;
}
