/** What keys do everywhere on the page, and the list of them. */

import { copy } from "./clipboard.js";
import { branch } from "./tree.js";
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.module.js";

const MAC = /Mac|iPhone|iPad/.test(navigator.platform);
const named = (keys) => (MAC ? `⌘ ${keys}` : `Ctrl ${keys}`).replace("Shift", MAC ? "⇧" : "Shift");

/** By `code` of the key: a letter is where it is on the keyboard's own layout. */
const KEYS = [
  { key: "o", shift: true, keys: "Shift O", words: "New chat" },
  { key: "k", shift: false, keys: "K", words: "Search conversations" },
  { key: "c", shift: true, keys: "Shift C", words: "Copy the last answer" },
  { key: "/", shift: false, keys: "/", words: "This list" },
];
const FIXED = [
  ["Enter", "Send the message"],
  [MAC ? "⇧ Enter" : "Shift Enter", "Break the line"],
  ["Esc", "Stop the answer, close what is open"],
];

/** Shows the list of keys. */
export const showKeys = () => dispatchEvent(new Event("exo-keys"));

/** Acts on keys, and shows the list of them or what came of one. */
export function Keys({ talk }) {
  const [shown, setShown] = useState(false);
  const [outcome, setOutcome] = useState("");
  useEffect(() => {
    const acts = {
      o: () => {
        talk.show("");
        location.hash = "#/chat";
        focus(".composer textarea");
      },
      k: () => focus("#conversations input[type=search]"),
      c: async () => setOutcome(await copyLast(talk)),
      "/": () => setShown((before) => !before),
    };
    const onKeyDown = (event) => {
      if (!(MAC ? event.metaKey : event.ctrlKey) || event.altKey) return;
      const found = KEYS.find(({ key, shift }) => key === event.key.toLowerCase() && (shift === event.shiftKey || key === "/"));
      if (!found) return;
      event.preventDefault();
      acts[found.key]();
    };
    addEventListener("keydown", onKeyDown);
    addEventListener("exo-keys", acts["/"]);
  }, []);
  useEffect(() => {
    const timer = setTimeout(() => setOutcome(""), 2500);
    return () => clearTimeout(timer);
  }, [outcome]);
  return html`
    <p class=${`toast ${outcome ? "" : "unseen"}`} role="status">${outcome}</p>
    ${shown && html`<${List} onClose=${() => setShown(false)} />`}`;
}

/** Waits for what a change of the place draws. */
const focus = (selector) => setTimeout(() => document.querySelector(selector)?.focus(), 50);

async function copyLast(talk) {
  const answer = branch(talk.current).findLast(({ role, text }) => role === "assistant" && text);
  if (!answer) return "There is no answer to copy.";
  return (await copy(answer.text)) ? "The last answer was copied." : "The browser does not allow copying.";
}

function List({ onClose }) {
  const dialog = useRef(null);
  useEffect(() => dialog.current.showModal(), []);
  return html`
    <dialog ref=${dialog} class="keys" aria-labelledby="keys-title" onClose=${onClose}>
      <h2 id="keys-title">Keys</h2>
      <dl class="facts-grid">
        ${[...FIXED, ...KEYS.map(({ keys, words }) => [named(keys), words])].map(([keys, words]) => html`
          <dt key=${keys}><kbd>${keys}</kbd></dt><dd>${words}</dd>`)}
      </dl>
      <div class="line foot"><button autofocus onClick=${() => dialog.current.close()}>Close</button></div>
    </dialog>`;
}
