/** Draws formulas as MathML apart from the page, which ends this worker where one takes too long. */

importScripts("./vendor/temml.min.js");

/** More than any formula that somebody reads: the page would be slow to show it. */
const MOST_CHARS = 100_000;
/** Signs that browsers draw with styles only, which style.css does not have. */
const UNSTYLED = /class="[^"]*(?:actuarial|cancelto|circle|longdiv|phasor)/;
/** The widest space and the largest glyph, in em and in points. */
const WIDEST = [40, 400];

/** Answers {tex, display} with MathML, or with "" where it cannot be drawn. */
onmessage = ({ data: { tex, display } }) => {
  let drawn = "";
  try {
    drawn = temml.renderToString(tex, { displayMode: display, throwOnError: true, maxSize: WIDEST });
  } catch {
    // No formula, or one that this library does not know: the page shows its source.
  }
  postMessage(drawn.length > MOST_CHARS || UNSTYLED.test(drawn) ? "" : drawn);
};

postMessage("ready");
