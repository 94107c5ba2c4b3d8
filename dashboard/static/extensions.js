/** Footnotes, task lists, aligned tables and images of Markdown, and the direction of its blocks. */

const DEFINITION = /^\[\^([^\]\s]{1,40})\]:[ \t]*(.*)$/;
const REFERENCE = /^\[\^([^\]\s]{1,40})\]/;
/** Characters of a table's cell that stays in one line: on a narrow page the table scrolls instead. */
const BRIEF = 24;
const TASK = /^\[([ xX])\][ \t]+/;

export function extend(markdown) {
  markdown.block.ruler.before("reference", "footnote", definition, { alt: ["paragraph"] });
  markdown.inline.ruler.before("link", "footnote", reference);
  markdown.core.ruler.push("blocks", finish);
  const { rules } = markdown.renderer;
  const escaped = markdown.utils.escapeHtml;
  rules.footnote = (tokens, index) => `<sup>${escaped(tokens[index].content)}</sup>`;
  rules.footnote_name = (tokens, index) => `${rules.footnote(tokens, index)} `;
  rules.image = (tokens, index) => picture(tokens, index, escaped);
}

/** `[^label]: text`, shown where it stands. */
function definition(state, line, _endLine, silent) {
  if (state.sCount[line] - state.blkIndent >= 4) return false;
  const found = DEFINITION.exec(state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]));
  if (!found) return false;
  if (silent) return true;
  const [, label, content] = found;
  state.env.footnotes = { ...state.env.footnotes, [`^${label}`]: true };
  state.line = line + 1;
  const map = [line, line + 1];
  const open = Object.assign(state.push("footnote_open", "p", 1), { map });
  open.attrSet("class", "footnote");
  state.push("footnote_name", "", 0).content = label;
  Object.assign(state.push("inline", "", 0), { content, map, children: [] });
  state.push("footnote_close", "p", -1);
  return true;
}

/** `[^label]`, if it is defined: elsewhere it may be a regular expression. */
function reference(state, silent) {
  const found = REFERENCE.exec(state.src.slice(state.pos, state.pos + 50));
  if (!found || !state.env.footnotes?.[`^${found[1]}`]) return false;
  if (!silent) state.push("footnote", "", 0).content = found[1];
  state.pos += found[0].length;
  return true;
}

function finish({ tokens }) {
  for (const [index, token] of tokens.entries()) {
    const align = /^text-align:(left|center|right)$/.exec(token.attrGet?.("style") ?? "");
    if (align) token.attrs = [["align", align[1]]];
    // Blocks in a block have their own direction by their style: "auto" looks at no text below another "auto".
    if (token.level === 0 && token.nesting === 1) token.attrSet("dir", "auto");
    if (/^t[hd]_open$/.test(token.type) && tokens[index + 1].content.length <= BRIEF) token.attrJoin("class", "short");
    if (token.type === "inline" && tokens[index - 2]?.type === "list_item_open") markTask(tokens[index - 2], token);
  }
}

function markTask(item, { children }) {
  const [first] = children;
  const box = first?.type === "text" && TASK.exec(first.content);
  if (!box) return;
  first.content = `${box[1] === " " ? "☐" : "☑"} ${first.content.slice(box[0].length)}`;
  item.attrJoin("class", "task");
}

/** A link to the image: fetching it would tell whatever address the model wrote. */
function picture(tokens, index, escaped) {
  const token = tokens[index];
  const name = `Image: ${token.content || "without a description"}`;
  const within = tokens.slice(0, index).reduce((depth, { type }) => depth + (type === "link_open") - (type === "link_close"), 0);
  if (within > 0) return `<span class="picture">${escaped(name)}</span>`;
  return `<a class="picture" href="${escaped(token.attrGet("src"))}" title="${escaped(token.attrGet("src"))}">${escaped(name)}</a>`;
}
