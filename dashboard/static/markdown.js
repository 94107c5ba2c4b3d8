/** Model text to safe HTML: markdown-it without raw HTML, highlighted code, then DOMPurify. */

import DOMPurify from "./vendor/purify.es.mjs";
import MarkdownIt from "./vendor/markdown-it.min.mjs";
import hljs from "./vendor/hljs-core.min.js";
import bash from "./vendor/hljs-bash.min.js";
import cpp from "./vendor/hljs-cpp.min.js";
import css from "./vendor/hljs-css.min.js";
import go from "./vendor/hljs-go.min.js";
import javascript from "./vendor/hljs-javascript.min.js";
import json from "./vendor/hljs-json.min.js";
import python from "./vendor/hljs-python.min.js";
import rust from "./vendor/hljs-rust.min.js";
import sql from "./vendor/hljs-sql.min.js";
import swift from "./vendor/hljs-swift.min.js";
import typescript from "./vendor/hljs-typescript.min.js";
import xml from "./vendor/hljs-xml.min.js";
import yaml from "./vendor/hljs-yaml.min.js";

const LANGUAGES = {
  bash, cpp, css, go, javascript, json, python, rust, sql, swift, typescript, xml, yaml,
};
for (const [name, grammar] of Object.entries(LANGUAGES)) hljs.registerLanguage(name, grammar);

// An image would fetch whatever address the model wrote, so `image` is off and its text stays.
const markdown = new MarkdownIt({ html: false, linkify: true, highlight }).disable("image");

const POLICY = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li",
    "ol", "p", "pre", "s", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["class", "href", "rel", "start", "target", "title"],
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
  if (element.tagName === "PRE") element.setAttribute("tabindex", "0");
});

function highlight(code, language) {
  return hljs.getLanguage(language) ? hljs.highlight(code, { language }).value : "";
}

/** Sanitised HTML of an answer, complete or still growing. */
export const renderMarkdown = (text) => DOMPurify.sanitize(markdown.render(text), POLICY);
