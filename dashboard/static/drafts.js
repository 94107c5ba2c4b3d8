/** What is written and not sent yet, by conversation: its text outlives a reload of this tab. */

import { parsed } from "./api.js";

const KEY = "exo-node.drafts";
const NOTHING = { text: "", urls: [], files: [] };

const drafts = new Map(Object.entries(parsed(sessionStorage.getItem(KEY)) ?? {}).map(([name, text]) => [name, { ...NOTHING, text }]));

/** All new conversations have one draft. */
export const draftName = ({ id, messages }) => (messages.length > 0 ? id : "");

/** {text, urls, files} */
export const draftOf = (name) => drafts.get(name) ?? NOTHING;

export function keepDraft(name, draft) {
  if (draft.text || draft.urls.length > 0 || draft.files.length > 0) drafts.set(name, draft);
  else drafts.delete(name);
  keep();
}

export function forgetDrafts(names = [...drafts.keys()]) {
  for (const name of names) drafts.delete(name);
  keep();
}

function keep() {
  try {
    sessionStorage.setItem(KEY, JSON.stringify(Object.fromEntries([...drafts].map(([name, { text }]) => [name, text]))));
  } catch {
    // Too long for the browser: it lasts until the page is loaded again.
  }
}
