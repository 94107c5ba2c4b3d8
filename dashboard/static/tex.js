/** Where formulas are in Markdown. They are taken before anything else reads the backslashes in them. */

const CLOSERS = { "$$": "$$", "\\[": "\\]", "\\(": "\\)", $: "$" };
const MARKS = Object.keys(CLOSERS);
const DISPLAY = new Set(["$$", "\\["]);
/** Characters of a formula: without a limit, marks that nothing closes would be looked for again and again. */
const LONGEST = { "$$": 5_000, "\\[": 5_000, "\\(": 2_000, $: 500 };
/** Signs that an open formula is one: prices have none of them. */
const SIGNS = /[\\^_=]/;
const COMMANDS = /\\[a-z,;:!{}|\\]/i;

/** Adds tokens "formula" whose `content` is the source, with `meta` {tex, display}; `tex` is "" of an open one. */
export function readFormulas(markdown) {
  markdown.inline.ruler.before("escape", "formula", inline);
  const alt = ["paragraph", "reference", "blockquote", "list"];
  markdown.block.ruler.before("lheading", "formula", block, { alt });
}

function inline(state, silent) {
  const mark = MARKS.find((one) => state.src.startsWith(one, state.pos));
  const found = mark && formulaAt(state, mark);
  if (!found) return false;
  if (!silent) {
    const token = state.push("formula", "", 0);
    token.content = state.src.slice(state.pos, found.end);
    token.meta = { tex: found.tex, display: found.display };
  }
  state.pos = found.end;
  return true;
}

/** {end, tex, display} of the formula at the state's position, closed or open to the end of the text. */
function formulaAt(state, mark) {
  const text = state.src.slice(0, state.posMax);
  const from = state.pos + mark.length;
  const display = DISPLAY.has(mark);
  const to = isClosable(state, mark, from) ? closing(text, from, mark) : -1;
  if (to < 0) return isOpen(text, from, mark) ? { end: text.length, tex: "", display } : null;
  const tex = text.slice(from, to);
  const end = to + mark.length;
  if (!tex.trim() || (!display && tex.includes("`"))) return null;
  if (mark === "$" && !isTight(tex, text[end] ?? "")) return null;
  return { end, tex, display };
}

/** Whether a closing mark follows `from`; where none does, none is looked for again in this text. */
function isClosable(state, mark, from) {
  state.unclosable ??= new Set();
  if (state.unclosable.has(mark)) return false;
  const found = state.src.includes(CLOSERS[mark], from);
  if (!found) state.unclosable.add(mark);
  return found;
}

/** Where the closing mark is, -1 where it is nowhere near. A single dollar closes outside of braces. */
function closing(text, from, mark) {
  const closer = CLOSERS[mark];
  const last = Math.min(text.length, from + LONGEST[mark]);
  let depth = 0;
  for (let at = from; at < last; at++) {
    const letter = text[at];
    if (letter === closer[0] && text.startsWith(closer, at) && (mark !== "$" || depth <= 0)) return at;
    if (letter === "\\") at += 1;
    else if (letter === "{") depth += 1;
    else if (letter === "}") depth -= 1;
  }
  return -1;
}

/** Whether `$tex$` is a formula: "$5 and $10" and "$HOME:$PATH" are text. */
function isTight(tex, next) {
  if (/^\s|\s$/.test(tex) || /[\dA-Z_]/.test(next)) return false;
  const words = tex.replace(/\\[a-z]+\s*\{[^{}]*\}/gi, "");
  return !(/^[\d.,]/.test(tex) && /(?<![\\\p{L}])\p{L}{3,}/u.test(words));
}

function isOpen(text, from, mark) {
  if (text.length - from > LONGEST[mark]) return false;
  const rest = text.slice(from);
  if (rest.includes("`")) return false;
  if (mark === "$") return /^[^\s\d]/.test(rest) && COMMANDS.test(rest);
  return mark !== "$$" || SIGNS.test(rest);
}

/** Makes the lines of a formula one paragraph, whatever they begin with. */
function block(state, line, endLine, silent) {
  if (state.sCount[line] - state.blkIndent >= 4) return false;
  const end = lastLine(state, line, endLine);
  if (end === line) return false;
  if (silent) return true;
  state.line = end;
  const content = state.getLines(line, end, state.blkIndent, false).trim();
  const map = [line, end];
  state.push("paragraph_open", "p", 1).map = map;
  Object.assign(state.push("inline", "", 0), { content, map, children: [] });
  state.push("paragraph_close", "p", -1);
  return true;
}

/** The line after the formula that begins in `line` and ends in another; `line` where there is none. */
function lastLine(state, line, endLine) {
  let mark = displayOpenAfter(lineOf(state, line), "");
  if (!mark) return line;
  const first = line;
  const isLong = state.src.length - state.bMarks[line] > LONGEST[mark];
  if (isLong && !isClosable(state, mark, state.bMarks[line] + 2)) return line;
  let text = lineOf(state, line);
  for (let at = line + 1; at < endLine && !(state.sCount[at] < state.blkIndent && !state.isEmpty(at)); at++) {
    const next = lineOf(state, at);
    if (state.isEmpty(at)) {
      const closer = CLOSERS[mark];
      const bare = text.trimEnd().endsWith(mark);
      if (bare || (at + 1 < endLine && lineOf(state, at + 1).startsWith(closer))) continue;
      return isOpenBlock(text, mark) ? at : first;
    }
    text += `\n${next}`;
    if (text.length > LONGEST[mark]) return first;
    mark = displayOpenAfter(next, mark);
    if (!mark) return at + 1;
  }
  return isOpenBlock(text, mark) ? endOf(state, line, endLine) : first;
}

const isOpenBlock = (text, mark) => {
  const at = text.lastIndexOf(mark);
  return isOpen(text, at + mark.length, mark);
};

/** The first line after `line` that is not part of this container or empty. */
function endOf(state, line, endLine) {
  let at = line + 1;
  while (at < endLine && !state.isEmpty(at) && state.sCount[at] >= state.blkIndent) at += 1;
  return at;
}

const lineOf = (state, line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);

/** The mark of the display formula that is open at the end of `text`, where `mark` is open at its beginning. */
function displayOpenAfter(text, mark) {
  let open = mark;
  for (let at = 0; at < text.length; at++) {
    if (open) {
      if (text.startsWith(CLOSERS[open], at)) {
        at += 1;
        open = "";
      } else if (text[at] === "\\") at += 1;
    } else if (text[at] === "`") at = afterCode(text, at) - 1;
    else if (text.startsWith("$$", at) || text.startsWith("\\[", at)) {
      open = text.slice(at, at + 2);
      at += 1;
    } else if (text[at] === "\\") at += 1;
  }
  return open;
}

/** The end of the code span that begins at `at`, or of its backticks where none does. */
function afterCode(text, at) {
  const ticks = /^`+/.exec(text.slice(at))[0];
  const end = text.indexOf(ticks, at + ticks.length);
  return (end < 0 ? at : end) + ticks.length;
}
