/** Model text to safe HTML: markdown-it without raw HTML, highlighted code, then DOMPurify. */

import DOMPurify from "./vendor/purify.es.mjs";
import MarkdownIt from "./vendor/markdown-it.min.mjs";

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

// An image would fetch whatever address the model wrote, so `image` is off and its text stays.
const markdown = new MarkdownIt({ html: false, linkify: true }).disable("image");
markdown.renderer.rules.fence = (tokens, index) => codeBlock(tokens[index].content, tokens[index].info);
markdown.renderer.rules.code_block = (tokens, index) => codeBlock(tokens[index].content, "");

const POLICY = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "button", "code", "del", "div", "em", "h1", "h2", "h3", "h4", "h5",
    "h6", "hr", "li", "ol", "p", "pre", "s", "span", "strong", "table", "tbody", "td", "th",
    "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["class", "href", "rel", "start", "target", "title", "type"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
};

DOMPurify.addHook("afterSanitizeAttributes", (element) => {
  if (element.tagName === "A") {
    element.setAttribute("target", "_blank");
    element.setAttribute("rel", "noopener noreferrer");
  }
  // A wide block scrolls sideways, which the keyboard must be able to do too.
  if (element.tagName === "PRE" || element.tagName === "TABLE") element.setAttribute("tabindex", "0");
});

/**
 * Sanitised HTML of an answer, complete or still growing, by top-level block as `{__html}`.
 * `rendered` keeps blocks by their source from one call to the next; those that are gone leave it.
 */
export function renderBlocks(text, rendered) {
  const env = {};
  const lines = text.split("\n");
  const groups = topLevel(markdown.parse(text, env));
  const references = JSON.stringify(env.references ?? {}); // a later block may give an address to an earlier link
  const blocks = new Map();
  const found = groups.map((tokens) => {
    const [from, to] = tokens[0].map ?? [0, 0];
    const key = `${references}\0${lines.slice(from, to).join("\n")}`;
    const block = rendered.get(key) ?? { __html: sanitised(tokens, env) };
    blocks.set(key, block);
    return block;
  });
  rendered.clear();
  for (const [key, block] of blocks) rendered.set(key, block);
  return found;
}

const sanitised = (tokens, env) =>
  DOMPurify.sanitize(markdown.renderer.render(tokens, markdown.options, env), POLICY);

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

/** Calls `listener` whenever code in one more language can be highlighted, until what it returns. */
export function onGrammar(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function codeBlock(code, info) {
  const said = info.trim().split(/\s+/, 1)[0].toLowerCase();
  const language = Object.hasOwn(ALIASES, said) ? ALIASES[said] : said;
  const inside = highlighted(code, language) ?? escaped(code);
  const head = `<span>${escaped(said || "text")}</span><button type="button" class="copy-code">Copy</button>`;
  return `<div class="code"><div class="code-head">${head}</div><pre><code>${inside}</code></pre></div>`;
}

const escaped = (text) => markdown.utils.escapeHtml(text);

function highlighted(code, language) {
  if (highlighter?.getLanguage(language)) return highlighter.highlight(code, { language }).value;
  if (Object.hasOwn(GRAMMARS, language) && !asked.has(language)) learn(language);
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
  for (const listener of listeners) listener();
}
