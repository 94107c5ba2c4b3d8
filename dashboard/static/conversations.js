/** The conversations of this browser: search, choose, rename, export, delete. */

import { ago } from "./format.js";
import { asMarkdown } from "./tree.js";
import { html, useState } from "./vendor/htm-preact.module.js";

const SHOWN = 100;

export function Conversations({ talk, place, onChosen }) {
  const [query, setQuery] = useState("");
  const [acting, setActing] = useState(null);
  const found = matching(talk.list, query);
  return html`
    <section id="conversations" aria-labelledby="conversations-title">
      <div class="line">
        <h2 id="conversations-title">Conversations</h2>
        <a class="new end" href="#/chat" title="New chat" aria-label="New chat"
          onClick=${() => { talk.show(""); onChosen(); }}>+</a>
      </div>
      ${talk.list.length > 0 && html`<input type="search" dir="auto" aria-label="Search conversations" 
        placeholder="Search" value=${query} onInput=${(event) => setQuery(event.target.value)} />`}
      <ul>
        ${found.slice(0, SHOWN).map((one) => html`
          <${Entry} key=${one.id} one=${one} talk=${talk} onChosen=${onChosen}
            current=${place === "chat" && one.id === talk.current.id}
            acting=${acting === one.id} setActing=${setActing} />`)}
      </ul>
      ${talk.ready && talk.list.length === 0 && html`<p class="muted small">Kept in this browser only.</p>`}
      ${query && found.length === 0 && html`<p class="muted small">Nothing has “${query}” in it.</p>`}
      ${!talk.lasting && html`<p class="warn-text small">This browser keeps nothing here: conversations
        end with the page.</p>`}
    </section>`;
}

function matching(list, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length === 0) return list;
  return list.filter(({ title, messages }) => {
    const text = [title, ...messages.map((message) => message.text)].join("\n").toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

function Entry({ one, talk, current, acting, setActing, onChosen }) {
  const title = one.title || "Untitled";
  return html`
    <li class=${current ? "current" : ""}>
      <a href=${`#/chat/${one.id}`} aria-current=${current ? "true" : null} onClick=${onChosen}>
        <span class="title" dir="auto">${title}</span>
        <span class="when">${talk.isRunning(one.id) ? html`<span class="pulse">answering</span>` : ago(one.updated)}</span>
      </a>
      <button class="quiet more" aria-expanded=${acting} aria-label=${`More for ${title}`}
        onClick=${() => setActing(acting ? null : one.id)}>⋯</button>
      ${acting && html`<${Actions} one=${one} talk=${talk} onDone=${() => setActing(null)} />`}
    </li>`;
}

function Actions({ one, talk, onDone }) {
  const [title, setTitle] = useState(one.title);
  const [sure, setSure] = useState(false);
  const rename = (event) => {
    event.preventDefault();
    talk.rename(one.id, title);
    onDone();
  };
  const remove = () => (sure ? (talk.remove(one.id), onDone()) : setSure(true));
  const kept = () => JSON.stringify({ format: "exo-node conversation 1", ...one }, null, 2);
  return html`
    <form class="entry-actions" onSubmit=${rename}>
      <input aria-label="Name" dir="auto" maxlength="120" value=${title} onInput=${(event) => setTitle(event.target.value)} />
      <button disabled=${!title.trim() || title === one.title}>Rename</button>
      <button type="button" onClick=${() => save(`${fileName(one)}.md`, asMarkdown(one))}>Export text</button>
      <button type="button" onClick=${() => save(`${fileName(one)}.json`, kept())}>JSON</button>
      <button type="button" class=${sure ? "danger" : ""} onClick=${remove}>${sure ? "Really delete" : "Delete"}</button>
    </form>`;
}

const fileName = ({ title }) => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "conversation";

/** Hands `text` to the browser's downloads. */
export function save(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/plain;charset=utf-8" }));
  const link = Object.assign(document.createElement("a"), { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
