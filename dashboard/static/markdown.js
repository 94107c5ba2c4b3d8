/** Model text to safe HTML: markdown-it without raw HTML, highlighted code, then DOMPurify. */

import { extend } from "./extensions.js";
import { drawing } from "./formulas.js";
import { readFormulas } from "./tex.js";
import DOMPurify from "./vendor/purify.es.mjs";
import MarkdownIt from "./vendor/markdown-it.min.mjs";

/** Parts of an answer that are drawn: a browser needs seconds for some ten thousand elements. */
const MOST_PARTS = 20_000;
/** Parts that a block and a formula count as besides their own, and letters of code and of a formula that count as one. */
const EXTRA = 10;
const LETTERS = { code: 10, formula: 2 };
const TOO_MANY = "What follows has more parts than a browser draws without a pause, so it is shown as it was written.";
/** After drawing, the page rests so many times as long as that took, for whoever types or scrolls; at most MOST_REST_MS. */
const REST = 4;
const MOST_REST_MS = 3000;
const GATHER_MS = 30;

/** Fetched with the first code in that language. */
const GRAMMARS = {
  bash: () => import("./vendor/hljs-bash.min.js"),
  cpp: () => import("./vendor/hljs-cpp.min.js"),
  css: () => import("./vendor/hljs-css.min.js"),
  go: () => import("./vendor/hljs-go.min.js"),
  javascript: () => import("./vendor/hljs-javascript.min.js"),
  json: () => import("./vendor/hljs-json.min.js"),
  python: () => import("./vendor/hljs-python.min.js"),
  rust: () => import("./vendor/hljs-rust.min.js"),
  sql: () => import("./vendor/hljs-sql.min.js"),
  swift: () => import("./vendor/hljs-swift.min.js"),
  typescript: () => import("./vendor/hljs-typescript.min.js"),
  xml: () => import("./vendor/hljs-xml.min.js"),
  yaml: () => import("./vendor/hljs-yaml.min.js"),
};
const ALIASES = {
  "c++": "cpp", c: "cpp", golang: "go", html: "xml", js: "javascript", py: "python", rs: "rust",
  sh: "bash", shell: "bash", svg: "xml", ts: "typescript", yml: "yaml", zsh: "bash",
};

const markdown = new MarkdownIt({ html: false, linkify: true });
readFormulas(markdown);
extend(markdown);
markdown.renderer.rules.fence = (tokens, index) => codeBlock(tokens[index].content, tokens[index].info);
markdown.renderer.rules.code_block = (tokens, index) => codeBlock(tokens[index].content, "");
markdown.renderer.rules.formula = (tokens, index) => formula(tokens[index]);

const FORMULA_TAGS = [
  "math", "menclose", "mfrac", "mi", "mmultiscripts", "mn", "mo", "mover", "mpadded", "mphantom", "mprescripts",
  "mroot", "mrow", "ms", "mspace", "msqrt", "mstyle", "msub", "msubsup", "msup", "mtable", "mtd", "mtext", "mtr",
  "munder", "munderover",
];
const FORMULA_ATTRIBUTES = [
  "accent", "accentunder", "columnalign", "columnlines", "columnspacing", "columnspan", "depth", "display",
  "displaystyle", "fence", "form", "height", "linebreak", "linethickness", "lspace", "mathbackground", "mathcolor",
  "mathsize", "mathvariant", "maxsize", "minsize", "movablelimits", "notation", "rowlines", "rowspacing", "rspace",
  "scriptlevel", "separator", "stretchy", "style", "symmetric", "voffset", "width",
];
const WORDS = ["align", "dir", "start", "type", ...FORMULA_ATTRIBUTES];
const POLICY = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "button", "code", "del", "div", "em", "h1", "h2", "h3", "h4", "h5",
    "h6", "hr", "li", "ol", "p", "pre", "s", "span", "strong", "sup", "table", "tbody", "td", "th",
    "thead", "tr", "ul", ...FORMULA_TAGS,
  ],
  ALLOWED_ATTR: ["class", "href", "rel", "target", "title", ...WORDS],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: WORDS, // which are no addresses
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
};

const MATHML = "http://www.w3.org/1998/Math/MathML";
/** What a formula's parts may be styled with: nothing that leaves its place or fetches. */
const STYLE = /^(?:(?:padding|margin|border)(?:-(?:left|right|top|bottom))?|background-color|color|width)\s*:[-#.%\w\s]+$/;

DOMPurify.addHook("uponSanitizeAttribute", (element, attribute) => {
  if (attribute.attrName !== "style") return;
  const kept = attribute.attrValue.split(";").filter((one) => STYLE.test(one.trim()));
  attribute.attrValue = kept.join(";");
  attribute.keepAttr = element.namespaceURI === MATHML && kept.length > 0;
});

DOMPurify.addHook("afterSanitizeAttributes", (element) => {
  if (element.tagName === "A") {
    element.setAttribute("target", "_blank");
    element.setAttribute("rel", "noopener noreferrer");
  }
  // A wide block scrolls sideways, which the keyboard must be able to do too.
  if (element.matches("pre, table, .formula.display")) element.setAttribute("tabindex", "0");
});

/**
 * Sanitised HTML of an answer, complete or still growing, by top-level block as `{__html}`.
 * `rendered` keeps blocks by their source from one call to the next; those that are gone leave it.
 */
export function renderBlocks(text, rendered) {
  const begun = performance.now();
  const blocks = blocksOf(text, rendered);
  slowestMs = Math.max(performance.now() - begun, slowestMs * 0.8); // other answers are quick
  return blocks;
}

let slowestMs = 0;

/** Milliseconds until a growing answer may be drawn again, by how long that takes. */
export const rest = (least) => Math.max(least, Math.min(MOST_REST_MS, REST * slowestMs));

function blocksOf(text, rendered) {
  const env = {};
  const lines = text.split("\n");
  const groups = topLevel(markdown.parse(text, env));
  // A later block may give an address to an earlier link, or a note to a mark.
  const references = JSON.stringify([env.references, env.footnotes]);
  if (rendered.references !== references) rendered.clear();
  rendered.references = references; // once, and not in each key: long lists of sources are sent
  const blocks = new Map();
  const found = [];
  let parts = 0;
  for (const tokens of groups) {
    const [from, to] = tokens[0].map ?? [0, 0];
    parts += EXTRA + partsOf(tokens);
    if (parts > MOST_PARTS) {
      found.push({ __html: asWritten(lines.slice(from).join("\n")) });
      break;
    }
    const key = lines.slice(from, to).join("\n");
    const block = rendered.get(key) ?? rendering(tokens, env);
    blocks.set(key, block);
    found.push(block);
  }
  rendered.clear();
  for (const [key, block] of blocks) rendered.set(key, block);
  return found;
}

/** Whether the block that is being rendered shows source which will be drawn or highlighted. */
let isWaiting = false;

function rendering(tokens, env) {
  isWaiting = false;
  const __html = DOMPurify.sanitize(markdown.renderer.render(tokens, markdown.options, env), POLICY);
  return { __html, isWaiting };
}

function partsOf(tokens) {
  let parts = tokens.length;
  for (const { type, content, children } of tokens) {
    if (type === "fence" || type === "code_block") parts += content.length / LETTERS.code;
    else if (type === "formula") parts += EXTRA + content.length / LETTERS.formula;
    if (children) parts += partsOf(children);
  }
  return parts;
}

const asWritten = (text) => `<p class="notice">${TOO_MANY}</p><div class="written" dir="auto">${escaped(text)}</div>`;

function topLevel(tokens) {
  const groups = [];
  let depth = 0;
  for (const token of tokens) {
    if (depth === 0) groups.push([]);
    groups.at(-1).push(token);
    depth += token.nesting;
  }
  return groups;
}

let highlighter = null;
const asked = new Set();
const listeners = new Set();

/** Forgets blocks of `rendered` and calls `draw` when they can be shown better, until what it returns. */
export function onImproved(rendered, draw) {
  const listener = () => {
    for (const [key, block] of rendered) if (block.isWaiting) rendered.delete(key);
    draw();
  };
  listeners.add(listener);
  return () => listeners.delete(listener);
}

let improving = 0;

function improve() {
  improving ||= setTimeout(() => {
    improving = 0;
    for (const listener of listeners) listener();
  }, rest(GATHER_MS));
}

/** A formula that cannot be drawn, or is open yet, is shown as it was written. */
function formula({ content, meta: { tex, display } }) {
  const drawn = tex && drawing(tex, display, improve);
  if (drawn === null) isWaiting = true;
  return drawn
    ? `<span class="formula ${display ? "display" : ""}" dir="ltr">${drawn}</span>`
    : `<code class="tex" dir="ltr">${escaped(content)}</code>`;
}

function codeBlock(code, info) {
  const said = info.trim().split(/\s+/, 1)[0].toLowerCase();
  const language = Object.hasOwn(ALIASES, said) ? ALIASES[said] : said;
  const inside = highlighted(code, language) ?? escaped(code);
  const head = `<span>${escaped(said || "text")}</span><button type="button" class="copy-code">Copy</button>`;
  return `<div class="code" dir="ltr"><div class="code-head">${head}</div><pre><code>${inside}</code></pre></div>`;
}

const escaped = (text) => markdown.utils.escapeHtml(text);

function highlighted(code, language) {
  if (highlighter?.getLanguage(language)) return highlighter.highlight(code, { language }).value;
  if (Object.hasOwn(GRAMMARS, language)) {
    isWaiting = true;
    if (!asked.has(language)) learn(language);
  }
  return null;
}

/** Where a grammar cannot be fetched the code stays plain. */
async function learn(language) {
  asked.add(language);
  try {
    const [core, grammar] = await Promise.all([import("./vendor/hljs-core.min.js"), GRAMMARS[language]()]);
    highlighter = core.default;
    highlighter.registerLanguage(language, grammar.default);
  } catch {
    asked.delete(language);
    return;
  }
  improve();
}
